"""AdEMAMix, schedule-free AdamW, AdaptiveMuon and Adafactor in the program: resumed bit for bit, in other layouts, and
evaluated by averages."""

import shlex
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from megatron_ext.plugins.prove.parity import CURVE_TOLERANCE
from megatron_ext.train.configure import configure
from tests.support.resaving import FLAGS, assert_same_tensors, saved_by

# Of the second tier: each optimizer trains in a layout of tests/parity/test_matrix.py.
pytestmark = pytest.mark.full

OPTIMIZERS = {
    "ademamix": "--optimizer ademamix --ademamix-warmup 4 --ademamix-beta3 0.99",
    "schedule_free": "--optimizer schedule_free --lr-warmup-iters 3",
    "adaptive_muon": "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon",
    "adafactor": "--optimizer adafactor",
}
STATES = {
    "ademamix": {"exp_avg", "exp_avg_slow", "exp_avg_sq"},
    "schedule_free": {"z", "average", "exp_avg_sq"},
    "adaptive_muon": {"momentum_buffer", "moment2_buffer", "exp_avg", "exp_avg_sq"},
    "adafactor": {"row_var", "col_var", "exp_avg", "exp_avg_sq"},
}
SMALL = [*FLAGS, "--num-layers", "2", "--global-batch-size", "4"]
ZERO_1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def _train(flags: list[str]) -> tuple[list[float], dict[int, float]]:
    from megatron_ext.train.pretrain import pretrain

    result = pretrain(flags)
    return list(result.losses), dict(result.validation_losses)


def _words(save: Path, load: Path, flags: str) -> list[str]:
    run = f"--save {save} --load {load} --exit-interval 4 --eval-iters 1 --num-workers 0"
    return [*SMALL, *shlex.split(f"{flags} {run}")]


OF_EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --disable-bias-linear --swiglu --use-megatron-fsdp"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in OPTIMIZERS for layout in ("--use-torch-fsdp2 --bf16", f"{ZERO_1} --bf16")),
        ("schedule_free", "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"),
        ("adafactor", OF_EXPERTS),
    ],
)
def test_a_run_goes_on_bit_for_bit(name: str, layout: str, tmp_path: Path) -> None:
    """The whole run evaluates after every step, the other one at the end alone: no step may notice."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = f"{OPTIMIZERS[name]} {layout}"
    losses, validation = run_ranks(2, _train, _words(whole, whole, f"{flags} --save-interval 2 --eval-interval 1"))[-1]
    then = run_ranks(2, _train, _words(resumed, whole, f"{flags} --ckpt-step 2 --eval-interval 4"))[-1]
    assert then == (losses[2:], {4: validation[4]})
    one, other = (Tensors(folder / "iter_0000004") for folder in (whole, resumed))
    assert all(torch.equal(one.read(tensor), other.read(tensor)) for tensor in one.names())
    kept = {key.split(".")[2] for key in one.names() if key.startswith("optimizer.state.")}
    assert kept - {"param"} == STATES[name]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_to_other_layouts(name: str, tmp_path: Path) -> None:
    """What another layout loads and saves is the same to the bit, and the curve goes on."""
    flags = [*FLAGS, *shlex.split(OPTIMIZERS[name])]
    saved = saved_by((2, ZERO_1), flags, None, tmp_path / "saved")
    for number, layout in enumerate([(1, ""), (2, "--use-torch-fsdp2"), (2, "--tensor-model-parallel-size 2")]):
        other = saved_by(layout, flags, saved.folder, tmp_path / str(number))
        assert_same_tensors(saved, other)
        assert other.losses == pytest.approx(saved.losses, abs=CURVE_TOLERANCE)


def test_schedule_free_weights_are_evaluated_as_their_average(tmp_path: Path) -> None:
    """And not as the weights themselves, which a run that begins from the checkpoint evaluates."""
    flags = f"{OPTIMIZERS['schedule_free']} --use-distributed-optimizer --eval-interval 4"
    _, losses = run_ranks(2, _train, _words(tmp_path / "run", tmp_path / "run", flags))[-1]
    tensors = Tensors(tmp_path / "run" / "iter_0000004")
    name = "decoder.final_layernorm.weight"
    average, weight, steps = (tensors.read(f"{kept}{name}") for kept in (f"{STATE}average.", "", f"{STATE}z."))
    torch.testing.assert_close(weight, torch.lerp(steps, average, 0.9))
    plain = [*SMALL, "--eval-interval", "2", "--eval-iters", "1", "--load", str(tmp_path / "run"), "--skip-train"]
    [(_, of_weights)] = run_ranks(1, _train, [*plain, "--finetune", "--save", str(tmp_path / "plain")])
    assert losses[4] != pytest.approx(next(iter(of_weights.values())), abs=1e-6)


STATE = "optimizer.state."


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--optimizer schedule_free --lr-decay-style linear", "--lr-decay-style linear with --optimizer schedule_free"),
        (f"{OPTIMIZERS['schedule_free']} --ema-decay 0.9", "which keeps an average of its own"),
        (f"{OPTIMIZERS['schedule_free']} --optimizer-cpu-offload", "evaluated on the device"),
        ("--ademamix-alpha 3", "--ademamix-alpha 3.0 belongs to --optimizer ademamix"),
        ("--optimizer lion --adam-beta2 0.9", "--adam-beta2 0.9 belongs to --optimizer adam"),
    ],
)
def test_what_does_not_go_together(flags: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as found:
        configure([*FLAGS, *shlex.split(flags)])
    assert len(found.value.problems) == 1
