"""A loss spike's batch is run again in other ranks' places: the same loss is the data, another one a machine."""

import hashlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.schema import flags_of
from megatron_ext.data.formula_order import FormulaSource
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import share_of
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.silent_errors.flags import SilentErrorFlags
from tests.support.launched import reproducible_rows
from tests.support.program import run_program
from tests.support.several_models import in_turn

MODEL = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 1 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --make-vocab-size-divisible-by 8 --tokenizer-type NullTokenizer "
    "--vocab-size 60 --eval-interval 0 --log-interval 1 --num-workers 0 "
)
FLAGS = f"{MODEL} --seq-length 16 --global-batch-size 6 --train-iters 20 --lr 1e-5 --mock-data "
GOOD = 4  # steps before the damage; here a median takes three

EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
LAYOUTS = {
    "distributed optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "PP2, interleaved": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
    "EP2": f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
}
# Slow: more schemes and precisions of what is run again.
SLOW = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "CP2": "--context-parallel-size 2 --cp-comm-type a2a",  # the only kind with dropout
    "FSDP2, bf16": "--use-torch-fsdp2 --bf16",
    "fp16": "--fp16 --initial-loss-scale 3e8 --hysteresis 1",
    "Megatron-FSDP": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
}


def _run(flags: str) -> Any:
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    config = configure((FLAGS + flags).split()).config
    return build_run(config, device.install("cpu"))


def _losses(steps: int, flags: str) -> tuple[list[str], int]:
    """Loss and norm of each step as hexadecimal floats, and how many batches were run again."""
    from megatron_ext.plugins.silent_errors import spike_check as callback
    from megatron_ext.plugins.silent_errors import spikes
    from megatron_ext.train.trainer import Trainer

    callback._LEAST = 3
    run, judged = _run(flags), []

    def judge(*arguments: Any) -> Any:
        judged.append(spikes.judge(*arguments))
        return judged[-1]

    callback.judge = judge
    threshold = flags_of(run.config.training, SilentErrorFlags).spike_threshold
    trainer = Trainer(run, [callback.SpikeCheck(threshold)] if threshold else [])
    found = []
    for _ in range(steps):
        trainer._call_callbacks("on_step_begin")
        result = trainer.step()
        found.append(f"{result.loss.hex()} {(result.grad_norm or 0.0).hex()} {result.numbers}")
    assert not any(verdict.differing for verdict in judged)
    return found, len(judged)


@pytest.mark.full
@pytest.mark.parametrize(
    "layouts", [pytest.param(LAYOUTS, id="layouts"), pytest.param(SLOW, id="more", marks=pytest.mark.slow)]
)
def test_runs_that_are_repeated_are_the_same_and_change_nothing(layouts: dict[str, str]) -> None:
    """At a learning rate of almost 0 every second loss is above the median."""
    words = [f"{layout} --global-batch-size 4 --seed 4" for layout in layouts.values()]
    cases = [flags for layout in words for flags in (layout, f"{layout} --spike-threshold 1")]
    results = run_ranks(2, in_turn, partial(_losses, 6), cases)
    for ranks in results:
        for name, without, checked in zip(layouts, ranks[::2], ranks[1::2], strict=True):
            assert without[1] == 0
            assert checked[1] > 0, f"{name}: no batch was run again"
            assert checked[0] == without[0], name


def _damage(flags: str, wrong: tuple[int, ...], calls: int) -> str:
    """Train; from a step on, these ranks compute a tenfold loss for so many microbatches. Returns what ends it."""
    from megatron_ext.errors import NumericError
    from megatron_ext.plugins.silent_errors import spike_check
    from megatron_ext.train.trainer import Trainer

    spike_check._LEAST = 3
    run = _run(flags)
    trainer = Trainer(run, [spike_check.SpikeCheck(2.0)])
    left = [calls]

    def tenfold(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        left[0] -= 1
        return 10 * output if left[0] >= 0 else None

    for _ in range(GOOD):
        trainer._call_callbacks("on_step_begin")
        trainer.step()
    if run.rank in wrong:
        run.chunks[-1].module.register_forward_hook(tenfold)
    try:
        trainer._call_callbacks("on_step_begin")
        trainer.step()
    except NumericError as error:
        assert run.state.iteration == GOOD, "no update"
        return str(error)
    return "no error"


def _in_turn(cases: list[tuple[Any, ...]]) -> list[str]:
    return in_turn(lambda case: _damage(*case), cases)


def _suspects(ranks: int, cases: list[tuple[Any, ...]]) -> list[str]:
    found = run_ranks(ranks, _in_turn, cases)
    assert found == [found[0]] * ranks, "ranks tell different stories"
    return [
        error.partition("Suspect: ")[2].partition(" (machine")[0] if "Suspect" in error else error for error in found[0]
    ]


FOR_EVER = 10**6


def test_a_wrong_rank_is_named() -> None:
    assert _suspects(3, [("", (1,), FOR_EVER), ("", (2,), 2)]) == ["rank 1", "rank 2"]
    assert _suspects(2, [("", (0,), FOR_EVER), ("", (1,), 3)]) == ["rank 0", "rank 1"]
    # Alone it cannot contradict another one, but itself.
    assert _suspects(1, [("", (0,), FOR_EVER), ("", (0,), 5)]) == ["no error", "rank 0"]


def test_a_wrong_replica_of_two_stages_is_named_with_both_ranks() -> None:
    [error] = set(run_ranks(4, _damage, "--pipeline-model-parallel-size 2", (3,), FOR_EVER))
    assert "microbatch" in error
    assert "Suspect: ranks 1, 3 (machine" in error
    assert error.startswith(f"the loss of iteration {GOOD + 1} is ")


def _bad_window(prefix: Path, sample: int) -> int:
    """100 windows of 8 times one token, but for one of two others in turn, which the training has as this sample.
    Returns its number."""
    tokens = np.full(100 * 8 + 1, 7, np.uint16)
    _write(prefix, tokens)
    key = hashlib.sha256(b"sample order:1234:train:0").digest()
    bad = FormulaSource(str(prefix), share_of(str(prefix), (0.0, 1.0)), 8, key).number_at(sample)
    tokens[bad * 8 + 1 : bad * 8 + 8] = [0, 30, 0, 30, 0, 30, 0]  # the window before has its first for a label
    _write(prefix, tokens)
    return bad


def _write(prefix: Path, tokens: np.ndarray) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(tokens.tobytes(), [8] * 99 + [9])


def _ids(path: Path) -> list[list[list[int]]]:
    return [json.loads(line)["samples"] for line in path.read_text().splitlines()]


@pytest.mark.full
def test_bad_data_is_written_down_and_left_out(tmp_path: Path) -> None:
    bad = _bad_window(tmp_path / "data", sample=58)
    flags = (
        f"{MODEL} --seq-length 8 --global-batch-size 4 --train-iters 16 --lr 1e-2 --lr-decay-style constant --split 1 "
        f"--data-path {tmp_path / 'data'} --data-order formula --save-interval 5 --clip-grad 1"
    ).split()

    def words(name: str, *more: str) -> list[str]:
        save = tmp_path / name
        return [*flags, "--save", str(save), "--log-sample-ids", str(save / "ids.jsonl"), *more]

    [(plain, checked)] = {tuple(run_ranks(2, _programs, [words("a"), words("b", "--spike-threshold", "1.5")])[0])}
    assert (plain[0], checked[0]) == (0, 0), checked
    assert reproducible_rows(tmp_path / "a" / "metrics.jsonl") == reproducible_rows(tmp_path / "b" / "metrics.jsonl")

    [folder] = (tmp_path / "b").glob("spike-*")
    iteration = int(folder.name.removeprefix("spike-"))
    assert f"the loss of iteration {iteration} is " in checked[1]
    [sample] = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    ids = _ids(tmp_path / "b" / "ids.jsonl")
    in_order = [window for step in ids for window in step]
    position = in_order.index([0, bad])
    assert sample["sample"] == position == 58
    assert sample["text"] == "7 0 30 0 30 0 30 0"
    batch = [json.loads(line) for line in (folder / "batch.jsonl").read_text().splitlines()]
    assert sorted(one for row in batch for one in row["samples"]) == list(range(4 * iteration - 4, 4 * iteration))
    assert all(row["data_parallel_ranks"] in ([0, 1], [1, 0]) for row in batch)

    load = ["--load", str(tmp_path / "a"), "--ckpt-step", str((iteration - 1) // 5 * 5)]
    skipped = words("c", *load, "--skip-samples", str(folder / "samples.jsonl"))
    [(again,)] = {tuple(run_ranks(2, _programs, [skipped])[0])}
    assert again[0] == 0
    before = {row["iteration"]: row for row in reproducible_rows(tmp_path / "a" / "metrics.jsonl")}
    after = {row["iteration"]: row for row in reproducible_rows(tmp_path / "c" / "metrics.jsonl")}
    assert after[iteration]["lm_loss"] < before[iteration]["lm_loss"] / 2
    assert after[iteration]["consumed_samples"] == before[iteration]["consumed_samples"]
    assert after[iteration]["consumed_tokens"] == before[iteration]["consumed_tokens"] - 8
    left = {number: [one for one in used if one != [0, bad]] for number, used in enumerate(ids, 1)}
    found = dict(enumerate(_ids(tmp_path / "c" / "ids.jsonl"), min(after)))
    assert found == {number: left[number] for number in after}, "no other sample moves"


def test_a_step_without_a_sample_updates_nothing() -> None:
    cases = ["", "--skip-samples 12-23", "--skip-samples 12-16"]
    [(plain, skipped, partly)] = {tuple(map(tuple, found)) for found in run_ranks(2, in_turn, _updates, cases)}
    assert plain[:2] == skipped[:2], "until there"
    assert (skipped[2], skipped[3]) == (((0.0).hex(), False, 12), ((0.0).hex(), False, 12))
    assert skipped[4][1]
    assert math.isfinite(float.fromhex(skipped[4][0]))
    # Of the third batch five samples are left out: the others are trained on.
    assert partly[:2] == plain[:2]
    assert partly[2][1]
    assert partly[2][0] != plain[2][0]


def _updates(flags: str) -> list[tuple[str, bool, int]]:
    from megatron_ext.train.trainer import Trainer

    run = _run(flags)
    trainer = Trainer(run, [])
    results = [trainer.step() for _ in range(5)]
    return [
        (result.loss.hex(), result.updated, run.state.scheduled_samples - 6 if not result.updated else 0)
        for result in results
    ]


def _programs(launches: list[list[str]]) -> list[tuple[int, str]]:
    ended: Callable[[list[str]], Any] = run_program
    return [(end.code, end.errors) for end in in_turn(ended, launches)]
