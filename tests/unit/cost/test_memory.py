"""What fills the memory of a device, what makes room in it, and up to where a layout fits."""

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.cost import dry_run as verdicts
from megatron_ext.cost.dry_run import verdict
from megatron_ext.cost.hardware import Machine, hardware
from megatron_ext.cost.memory import MemoryEstimate, described, helpful_flags, host_bytes, kept_at_least
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.errors import ConfigurationError
from tests.support import planner_numbers
from tests.support.planner_numbers import CASES, Case, config_of


def with_state(case: str, **parts: float) -> tuple[Any, MemoryEstimate]:
    return config_of(CASES[case]), MemoryEstimate(
        **{**dict.fromkeys(("weights", "gradients", "optimizer"), 1e9), **parts}
    )  # pyright: ignore


MORE = "more ranks with a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"
_AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("case", "activations", "flags"),
    [
        ("larger micro batches, SGD", 3.1e9, [_AGAIN, "--micro-batch-size 2"]),
        ("larger micro batches, SGD", 2.9e9, ["--use-distributed-optimizer"]),
        ("TP2, tied, dropout", 4e9, [_AGAIN, "--sequence-parallel"]),
        ("recomputed: full", 4e9, []),
        ("one device, GPT-2 with dropout in fp32", 4e9, [_AGAIN, "--bf16"]),
        ("one device", 1e9, ["--optimizer-cpu-offload"]),
        ("one rank that shards", 1e9, ["--optimizer-cpu-offload"]),
        ("fp16", 1e9, ["--use-torch-fsdp2 in place of --use-distributed-optimizer"]),
        ("FSDP2", 1e9, []),
        ("host memory", 1e9, ["--use-torch-fsdp2 in place of --use-distributed-optimizer"]),
        ("CPU ranks with a core each", 1e9, []),
    ],
)
def test_helpful_flags_are_those_of_what_fills_the_memory(case: str, activations: float, flags: list[str]) -> None:
    config, needed = with_state(case, activations=activations, loss=0.0, work=0.0)
    assert helpful_flags(config, needed, fused=CASES[case].device != "cpu") == [*flags, MORE]


def test_a_rank_keeps_its_state_and_without_training_its_weights() -> None:
    config = config_of(CASES["PP4, uneven"])
    kept = {
        stage: planner_numbers.evaluate_config(config, Machine(hardware("h100")), 1.0).stages[stage]
        for stage in range(4)
    }
    state = {stage: needed.weights + needed.gradients + needed.optimizer for stage, needed in kept.items()}
    least, parts = kept_at_least(config, fused=True, anywhere=True)
    most, of_most = kept_at_least(config, fused=True, anywhere=False)
    assert (least, sum(parts.values())) == (min(state, key=lambda stage: state[stage]), min(state.values()))
    assert (most, sum(of_most.values())) == (max(state, key=lambda stage: state[stage]), max(state.values()))
    idle = replace(config, training=replace(config.training, skip_train=True))
    assert list(kept_at_least(idle, fused=True, anywhere=True)[1]) == ["weights"]


def test_host_memory_is_that_of_the_emptiest_or_the_fullest_stage() -> None:
    config = config_of(Case(4, CASES["PP4, uneven"].flags.replace("--global-batch-size 16", "--global-batch-size 4")))
    moved = replace(
        config, optimizer=replace(config.optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    )
    sizes = [Shapes(config).parameters_of_stage(stage)[0] * 12 * 0.5 for stage in range(4)]
    assert (host_bytes(moved), host_bytes(moved, fullest=True)) == (min(sizes), max(sizes))
    assert host_bytes(config) == 0.0


def test_what_holds_how_much_is_said_the_largest_first() -> None:
    assert described({"a": 1e9, "b": 3.14e9, "c": 0.02e9, "d": 0.03e9}) == "b 3.1 GB, a 1.0 GB, d 30.0 MB"
    assert described({"a": 0.005, "b": 0.995}) == "b 0.0 MB, a 0.0 MB", "half a percent is said"


def test_a_layout_fits_up_to_what_may_be_filled() -> None:
    found = planner_numbers.evaluate_config(config_of(CASES["one device"]), Machine(hardware("h100")), 1.0)
    needs = found.memory_bytes
    assert replace(found, usable_bytes=needs).fits
    assert not replace(found, usable_bytes=needs - 1).fits
    assert "stages over it: 0" in "\n".join(planner_numbers.as_text(replace(found, usable_bytes=needs - 1)))
    config = config_of(CASES["one device"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "USABLE", 0.5)  # whose product with a size is exact
        gigabytes = 2 * (found.stages[0].total / 1e9)
        assert verdict(config, device_memory_gb=gigabytes)[1]
        assert not verdict(config, device_memory_gb=math.nextafter(gigabytes, 0.0))[1]
    assert verdict(config)[1]
    assert "of 36.8 GB (92% of 40)" in verdict(config, device_memory_gb=40.0, device_name="h100")[0][1]
    assert verdict(config, device_name="h100")[0][1].startswith("on h100              fits: ")
    with pytest.raises(ConfigurationError, match="--device-name x is not one of a100, a100-40"):
        verdict(config, device_name="x")
