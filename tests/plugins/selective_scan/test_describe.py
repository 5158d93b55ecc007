"""What a selective scan says of itself: sizes, operations, the layers that have it, and what is refused."""

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.stack import layers
from megatron_ext.parts.update_factors import factors
from megatron_ext.rules.validate import problems

LINE = (
    "--num-layers 4 --hidden-size 60 --num-attention-heads 5 --seq-length 128 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 100 --device cpu --position-embedding-type none --normalization RMSNorm "
    "--disable-bias-linear --attention-dropout 0"
)
SIZES = "--scan-channels 90 --scan-state-dim 6 --scan-conv-kernel-dim 5 --scan-time-step-rank 7"


def _config(more: str = "--hybrid-layer-pattern SS*-", ranks: int = 1) -> Config:
    typed = parse(f"{LINE} {more}".split()).values
    return resolve({"world_size": ranks, **typed}, Facts())


def test_sizes_are_those_of_the_flags() -> None:
    config = _config(f"--hybrid-layer-pattern SS*- {SIZES} --scan-norm with-weights --scan-bias")
    own = [p for p in parameters(config) if p.stage == 0 and "self_attention." in p.name]
    assert {p.name.partition("self_attention.")[2]: p.shape for p in own} == {
        **{"in_proj.weight": (180, 60), "in_proj.bias": (180,), "out_proj.weight": (60, 90), "out_proj.bias": (60,)},
        **{"conv1d.weight": (90, 1, 5), "conv1d.bias": (90,), "x_proj.weight": (19, 90), "A_log": (90, 6), "D": (90,)},
        **{"dt_proj.weight": (90, 7), "dt_proj.bias": (90,)},
        **{"dt_norm.weight": (7,), "b_norm.weight": (6,), "c_norm.weight": (6,)},
    }
    assert [layer.has_attention for layer in layers(config)] == [False, False, True, False]
    assert not problems(config, Facts())
    undecayed = {p.name.partition("self_attention.")[2] for p in own if factors(config, p).weight_decay == 0.0}
    assert {"A_log", "D", "conv1d.bias"} <= undecayed
    assert {"x_proj.weight", "dt_proj.weight", "conv1d.weight"}.isdisjoint(undecayed)


def test_sizes_that_are_not_given_follow_from_the_hidden_size() -> None:
    [scan, *_] = [layer.mixer for layer in layers(_config())]
    assert scan == layers(_config("--hybrid-layer-pattern SS*- --scan-channels 120 --scan-time-step-rank 4"))[0].mixer


def test_operations_are_those_of_products_and_of_the_recurrence() -> None:
    """Against attention in the first two layers: 3 times forward, and 2 operations for each weight."""
    width, channels, state, kernel, rank, length = 60, 90, 6, 5, 7, 128
    attention = 2 * 4 * width**2 + 2 * width * length
    matrices = 3 * channels * width + channels * (kernel + rank + 2 * state + rank + state)
    scan = 2 * matrices + channels * (5 * state + 4)
    ours, plain = (flops_per_token(_config(f"--hybrid-layer-pattern {one}*- {SIZES}")) for one in ("SS", "**"))
    assert ours - plain == 2 * 3 * (scan - attention)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (
            "--scan-channels 91 --tensor-model-parallel-size 5",
            5,
            "--scan-channels 91 is not divisible by --tensor-model-parallel-size 5; use",
        ),
        (
            "--scan-conv-kernel-dim 34 --context-parallel-size 2",
            2,
            "--scan-conv-kernel-dim 34 reaches beyond the 32 positions of a part of a sample with --context-parallel-"
            "size 2; use --seq-length 136",
        ),
        ("--fp8-format hybrid --bf16", 1, "never compared with another layout in Mamba-1 layers, but --hybrid-layer"),
    ],
)
def test_what_cannot_work_is_refused(flags: str, ranks: int, message: str) -> None:
    assert message in "\n".join(problems(_config(f"--hybrid-layer-pattern SS*- {flags}", ranks), Facts()))


def test_sizes_without_such_a_layer_are_warned_of() -> None:
    warnings = parse(f"{LINE} {SIZES} --scan-bias".split()).warnings
    assert [text.split()[0] for text in warnings] == [*SIZES.split()[::2], "--scan-bias"]
    assert not parse(f"{LINE} --hybrid-layer-pattern SS*- {SIZES} --scan-bias".split()).warnings
