"""The loss scale of fp16 belongs to the mean loss in every layout and is one for all optimizers, and a run that skips
every step at a scale that cannot fall ends."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.losses.layouts import write_corpus
from tests.support.program import Ended, run_program
from tests.support.several_models import in_turn

MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --swiglu --disable-bias-linear
    --position-embedding-type rope --make-vocab-size-divisible-by 16 --lr 1e-3 --hidden-dropout 0
    --attention-dropout 0 --eval-interval 0 --eval-iters 0 --log-interval 1 --fp16
"""
MOCK = "--mock-data --vocab-size 61"
TOKENS = f"{MOCK} --seq-length 128 --micro-batch-size 4 --global-batch-size 16"
"""2,048 tokens in a step."""

LAYOUTS = {
    "one rank": (1, ""),
    "DP2": (2, "--use-distributed-optimizer"),
    "TP2 SP, PP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2"),
    "ZeRO-3": (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
}
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.02"
EP2 = f"{EXPERTS} --expert-model-parallel-size 2"


def _run(flags: str, folder: Path, ranks: int = 1) -> tuple[Ended, list[dict[str, Any]]]:
    """Run the program; return how its last rank ended, and the rows of its steps."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    ended = run_ranks(ranks, run_program, shlex.split(f"{MODEL} {flags} --metrics-file {metrics}"))[-1]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return ended, [row for row in rows if "lm_loss" in row]


def test_a_fixed_scale_is_that_of_the_mean_loss(tmp_path: Path) -> None:
    """A scale of the sum over 2,048 tokens would overflow in every step."""
    ended, steps = _run(f"{TOKENS} --train-iters 2 --loss-scale 4096", tmp_path)
    assert (ended.code, [step["skipped_iterations"] for step in steps]) == (0, [0] * 2), ended.errors
    assert [step["loss_scale"] for step in steps] == [4096.0] * 2


def _masked(folder: Path) -> str:
    """Return flags of 512 tokens a step, of which not all count, nor as many on each rank."""
    write_corpus(folder)
    return (
        f"--train-data-path {folder}/train --tokenizer-type ByteTokenizer --eod-mask-loss --data-cache-path {folder} "
        "--seq-length 32 --micro-batch-size 2 --global-batch-size 16"
    )


def test_losses_and_norms_are_those_of_one_rank_in_every_layout(tmp_path: Path) -> None:
    flags = _masked(tmp_path)
    found = {}
    for name, (ranks, layout) in LAYOUTS.items():
        ended, steps = _run(f"{flags} --train-iters 2 --loss-scale 65536 {layout}", tmp_path, ranks)
        assert ended.code == 0, ended.errors
        assert [step["skipped_iterations"] for step in steps] == [0] * 2, name
        found[name] = [(step["lm_loss"], step["grad_norm"]) for step in steps]
    for name, steps in found.items():
        for one, other in zip(steps, found["one rank"], strict=True):
            assert one == pytest.approx(other, rel=2e-3), name


@pytest.mark.full
def test_a_dynamic_scale_settles_where_that_of_the_mean_does_whatever_the_replicas(tmp_path: Path) -> None:
    """A scale of the sum over 512 tokens would settle nine halvings lower, one of each replica's mean another one."""
    flags = f"{_masked(tmp_path)} --train-iters 9 --initial-loss-scale 268435456 --hysteresis 1"
    flags += " --accumulate-allreduce-grads-in-fp32"
    (_, alone), (_, replicas) = (
        _run(f"{flags} {layout}", tmp_path, ranks) for ranks, layout in (LAYOUTS["one rank"], LAYOUTS["DP2"])
    )
    assert 9 * 256 < alone[-1]["consumed_tokens"] < 9 * 512
    assert alone[-1]["skipped_iterations"] == 0
    assert 2**19 <= alone[-1]["loss_scale"] <= 2**24
    assert [step["loss_scale"] for step in replicas] == [step["loss_scale"] for step in alone]


def _gradients(flags: str) -> dict[str, Any]:
    """Return the gradients of the first step by name, without the loss scale."""
    from megatron_ext import device
    from megatron_ext.plugins.prove import gather
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.step import compute_gradients

    run = build_run(configure(shlex.split(f"{MODEL} {flags} --device cpu")).config, device.install("cpu"))
    compute_gradients(run, range(4))
    scale = float(run.optimizer.get_loss_scale())
    found = {shard.name: shard.values / scale for shard in gather.gradients(run)}
    run.loaders.close()
    return found


def test_auxiliary_losses_of_experts_have_the_scale_of_the_loss() -> None:
    """Their gradients are in those of the routers, which are the same with and without a loss scale."""
    sizes = f"{MOCK} {EXPERTS} --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 2"
    [(scaled, exact)] = run_ranks(
        1, in_turn, _gradients, [f"{sizes} --loss-scale 4096 --seed 3", f"{sizes} --fp16=false --seed 3"]
    )
    routers = [name for name in exact if "router" in name]
    assert len(routers) == 2
    for name, values in exact.items():
        difference = float(abs(scaled[name] - values).max() / abs(values).max())
        assert difference < 0.02, (name, difference)


def _norm_after(flags: str, overflowing: str | None) -> tuple[float | None, float, bool]:
    """Take the step after one whose gradient overflows in the first weight that is named so, on the last rank alone;
    without a name, begin with the step after it. Return its norm and scale, and whether the first was an update."""
    import torch

    from megatron_ext import device
    from megatron_ext.model.names import global_named_parameters
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.state import Position
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(shlex.split(f"{MODEL} {flags} --device cpu")).config, device.install("cpu"))
    trainer = Trainer(run, [])
    updated = False
    if overflowing is None:
        run.state.position = Position(1, 4, 0)
    else:
        weights = [weight for name, weight in global_named_parameters(run.chunks) if overflowing in name]
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        hooks = [weight.register_hook(lambda gradient: gradient * float("inf")) for weight in weights[:1] if last]
        updated = trainer.step().updated
        for hook in hooks:
            hook.remove()
    result = trainer.step()
    run.loaders.close()
    return result.grad_norm, result.loss_scale, updated


@pytest.mark.full
@pytest.mark.parametrize("distributed", ["", "--use-distributed-optimizer"])
@pytest.mark.parametrize("overflowing", ["input_layernorm", "experts"])
def test_experts_have_the_scale_of_the_rest(overflowing: str, distributed: str) -> None:
    """Whichever of the two optimizers meets an overflow, the next gradients are those of half the scale."""
    flags = f"{MOCK} {EP2} --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 9 --hysteresis 1"
    scaled = f"{flags} {distributed} --initial-loss-scale"
    after = run_ranks(2, _norm_after, f"{scaled} 2048", overflowing)
    alone = run_ranks(2, _norm_after, f"{scaled} 1024", None)
    assert after == alone == [(alone[0][0], 1024.0, False)] * 2
    assert alone[0][0] is not None


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--loss-scale", "--min-loss-scale"])
def test_steps_that_overflow_for_ever_end_the_run_and_name_a_scale_that_works(flag: str, tmp_path: Path) -> None:
    sizes = f"{TOKENS} --train-iters 6 --initial-loss-scale 5e9 --hysteresis 1"
    ended, steps = _run(f"{sizes} {flag} 5e9 --use-distributed-optimizer", tmp_path, ranks=2)
    assert (ended.code, len(steps)) == (70, 3)
    assert f"overflowed in all of the last 3 steps, to iteration 3, at {flag} 5000000000," in ended.errors
    advised = re.search(rf"Next: give {flag} (\d+)", ended.errors)
    assert advised is not None, ended.errors
    ended, steps = _run(f"{sizes} --initial-loss-scale {advised[1]} {flag} {advised[1]}", tmp_path)
    assert (ended.code, [step["skipped_iterations"] for step in steps]) == (0, [0] * 6), ended.errors


def test_patience_counts_steps_in_a_row_at_the_least_scale(tmp_path: Path) -> None:
    """A scale that still falls is given time."""
    ended, steps = _run(f"{TOKENS} --train-iters 4 --loss-scale 5e9", tmp_path)
    assert (ended.code, len(steps)) == (70, 2)
    ended, steps = _run(f"{TOKENS} --train-iters 4", tmp_path)
    assert (ended.code, [step["skipped_iterations"] for step in steps]) == (0, [1] * 4)


def _train_with_a_bad_gradient(flags: str) -> str:
    from megatron_ext import device
    from megatron_ext.errors import NumericError
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.large_gradients import Overflows
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(shlex.split(f"{MODEL} {flags} --device cpu")).config, device.install("cpu"))
    weight = next(iter(run.chunks[0].parameters()))
    weight.register_hook(lambda gradient: gradient * float("inf"))
    try:
        Trainer(run, [Overflows(run.config)]).fit()
    except NumericError as error:
        return f"{run.state.iteration}: {error}"
    return "no error"


def test_where_no_scale_would_do_that_is_said() -> None:
    sizes = f"{MOCK} --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --loss-scale 64"
    [told] = run_ranks(1, _train_with_a_bad_gradient, sizes)
    assert re.match(r"2: .* at --loss-scale 64, .* no loss scale would do", told), told


def _scale_of_a_checkpoint(flags: str, folder: str) -> tuple[float, float, bool]:
    """Save a scale of 512 as an earlier version did, of the sum over the tokens. Return the scale of who loads it, that
    of who loads what is saved then, and whether the next step is an update."""
    from megatron_ext import device
    from megatron_ext.checkpoint.native import checkpoint_state_dict
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(shlex.split(f"{MODEL} {flags} --device cpu")).config, device.install("cpu"))
    current = checkpoint_state_dict.grad_scaler_state
    checkpoint_state_dict.grad_scaler_state = lambda run: {"scale": 512.0, "growth_tracker": 3, "hysteresis_tracker": 1}
    save_checkpoint(run, f"{folder}/earlier")
    checkpoint_state_dict.grad_scaler_state = current
    load_checkpoint(run, f"{folder}/earlier")
    converted = float(run.optimizer.get_loss_scale())
    updated = Trainer(run, []).step().updated
    save_checkpoint(run, f"{folder}/now")
    load_checkpoint(run, f"{folder}/now")
    run.loaders.close()
    return converted, float(run.optimizer.get_loss_scale()), updated


def test_a_checkpoint_of_an_earlier_version_goes_on_at_the_scale_of_the_mean(tmp_path: Path) -> None:
    flags = f"{TOKENS} --train-iters 8"
    assert run_ranks(1, _scale_of_a_checkpoint, flags, str(tmp_path)) == [(512.0 * 2048, 512.0 * 2048, True)]


def _types_of_gradients(flags: str) -> set[str]:
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    run = build_run(configure(shlex.split(f"{MODEL} {flags} --device cpu")).config, device.install("cpu"))
    run.loaders.close()
    held = [tensor for chunk in run.chunks for tensor in run.sharding.held_gradients(chunk)]
    return {str(tensor.dtype) for tensor in held if tensor is not None and tensor.numel()}


def test_gradients_of_fp16_are_added_and_reduced_in_16_bits_unless_a_flag_says_so() -> None:
    """As in Megatron-LM, where --bf16 alone turns --accumulate-allreduce-grads-in-fp32 on."""
    sizes = f"{MOCK} --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 2"
    cases = {
        "": "torch.float16",
        "--use-distributed-optimizer": "torch.float16",
        "--accumulate-allreduce-grads-in-fp32": "torch.float32",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads": "torch.float32",
        "--fp16=false --bf16": "torch.float32",
        "--fp16=false --bf16 --grad-reduce-in-bf16": "torch.bfloat16",
    }
    [found] = run_ranks(1, in_turn, _types_of_gradients, [f"{sizes} {flags}" for flags in cases])
    assert dict(zip(cases, found, strict=True)) == {flags: {kind} for flags, kind in cases.items()}
