"""What the optimizer's parameter groups decay is what the catalogue says, in every sharding scheme, or a run is not
built."""

import re
import shlex

import pytest

from megatron_ext.verify.ranks import run_ranks
from tests.support.several_models import end_layout

BASE = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-interval 0 "
)
LAYOUTS = {
    "DDP": "",
    "DDP, bf16": "--bf16",
    "distributed optimizer": "--use-distributed-optimizer --bf16",
    "in host memory": "--use-distributed-optimizer --bf16 --optimizer-cpu-offload",
    "FSDP2": "--use-torch-fsdp2",
    "FSDP2 in host memory": "--use-torch-fsdp2 --torch-fsdp2-cpu-offload",
    "ZeRO-3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --bf16",
    "experts": "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2",
}


def _refusals(layouts: dict[str, str]) -> dict[str, tuple[set[str], set[str]]]:
    """By layout, where the engine's groups decay everything: the names in the error, and those that must not decay."""
    from megatron_ext import device

    here = device.install("cpu")
    import megatron.core.optimizer as engine

    from megatron_ext.parts.catalogue import parameters
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    engine.get_standard_config_overrides = lambda config: {}
    found = {}
    for layout, flags in layouts.items():
        config = configure(shlex.split(BASE + flags)).config
        text = ""
        try:
            build_run(config, here)
        except AssertionError as error:
            text = str(error)
        named = set(re.findall(r"(\S+) \(times 1, and the catalogue says 0\)", text))
        found[layout] = named, {parameter.name for parameter in parameters(config) if not parameter.decay}
        end_layout()
    return found


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[set[str], set[str]]]:
    """Of two ranks together: with the distributed optimizer, a rank names what its own shard has."""
    one, other = run_ranks(2, _refusals, LAYOUTS)
    return {layout: (one[layout][0] | other[layout][0], one[layout][1]) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_that_decays_what_should_not_is_an_error(
    layout: str, refusals: dict[str, tuple[set[str], set[str]]]
) -> None:
    named, expected = refusals[layout]
    assert named == expected
    assert "decoder.final_layernorm.weight" in named
