"""benchmarks/train_step.py: what it computes of what it measures; nothing is trained."""

import pytest

from benchmarks.startup import LAYOUTS, MODEL, commands
from benchmarks.timed_steps import MADE_UP
from benchmarks.train_step import SIZES as MODELS
from benchmarks.train_step import kind_of, shares
from megatron_ext.train.configure import configure


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("aten::_fused_adamw_", "fused optimizer"),
        ("norm_backward", "passes over memory"),
        ("aten::mul", "passes over memory"),
        ("triton_poi_fused_silu_mul_0", "passes over memory"),
    ],
)
def test_what_an_operator_is_counted_as(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_shares_are_all_of_the_time() -> None:
    found = shares([("aten::mm", 3.0), ("aten::bmm", 1.0), ("aten::mul", 2.0)], 8.0)
    assert found == {"products": 0.5, "passes over memory": 0.25, "no operator": 0.25}


def test_every_model_that_is_measured_can_be_configured() -> None:
    for flags in MODELS.values():
        configure([*MADE_UP, *flags.split(), "--train-iters", "3"])
    for ranks, layout in LAYOUTS.items():
        configure([*MODEL, *layout], world_size=ranks)
        assert [command.target for command in commands([ranks])][-1] == 20.0
