"""What --load may name, and what of a checkpoint a run takes: --finetune, --no-load-optim, --ckpt-step and others.

Nothing but a folder of checkpoints, or one of them, is a start in silence.
"""

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, checkpoint_at
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.optimizer_state import step_count
from megatron_ext.errors import DataError
from megatron_ext.verify.ranks import run_ranks
from tests.support import checkpoints
from tests.support.checkpoints import build, save_at
from tests.support.program import TINY, Ended, run_program
from tests.support.several_models import in_turn

FLAGS = [
    *TINY,
    *[
        "--num-layers",
        "1",
        "--hidden-size",
        "16",
        "--seq-length",
        "8",
        "--global-batch-size",
        "2",
        "--train-iters",
        "3",
    ],
]


def _run(flags: str, ranks: int = 1) -> Ended:
    return run_ranks(ranks, run_program, [*FLAGS, *shlex.split(flags)])[0]


@pytest.fixture(scope="module")
def of_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert _run(f"--save {folder} --save-interval 1", 2).code == 0
    (folder / "best").symlink_to("iter_0000002")
    (folder / "copied").symlink_to(folder)
    return folder


@pytest.mark.parametrize("named", ["iter_0000002", "iter_0000002/", "best", "copied/iter_0000002"])
def test_one_checkpoint(named: str, of_program: Path) -> None:
    ended = _run(f"--load {of_program}/{named} --ckpt-step 2 --exit-on-missing-checkpoint", 2)
    assert ended.code == 0, ended.errors
    assert ended.output.count("checkpoint: resuming at iteration 2 of") == 1


def test_a_release(of_program: Path, tmp_path: Path) -> None:
    """Also where the tracker names another one."""
    folder = Path(shutil.copytree(of_program, tmp_path / "copy", symlinks=True))
    (folder / "iter_0000001").rename(folder / "release")
    ended = _run(f"--load {folder}/release")
    assert "checkpoint: resuming at iteration 0 of" in ended.output, ended.errors
    assert "checkpoint: resuming at iteration 3 of" in _run(f"--load {folder}").output
    (folder / "release/.metadata").unlink()
    (folder / "release/mp_rank_00").mkdir()
    ended = _run(f"--load {folder}/release")
    assert (ended.code, "Megatron-LM's legacy format" in ended.errors) == (65, True)


def test_one_that_is_missing_is_no_fresh_start(of_program: Path) -> None:
    ended = _run(f"--load {of_program}/iter_0000007", 2)
    assert ended.code == 65
    assert "iter_0000007 is missing or not whole; the whole checkpoints in" in ended.errors
    with pytest.raises(DataError, match="those of: 1, 2, 3"):
        checkpoint_at(of_program / "iter_0000007")


def test_what_cannot_be_meant(of_program: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "good"
    shutil.copytree(of_program / "iter_0000001", renamed)
    for flags, words in (
        (f"--load {of_program}/{TRACKER}", f"is a file, not a folder of checkpoints; use --load {of_program}\n"),
        (f"--load {of_program}/{TRACKER} --exit-on-missing-checkpoint", "is a file, not a folder of checkpoints"),
        (f"--load {of_program}/iter_0000001/.metadata", f"use --load {of_program}/iter_0000001\n"),
        (f"--load {of_program}/iter_0000002 --ckpt-step 1", "and --ckpt-step 1 another; leave --ckpt-step out"),
        (f"--load {renamed}", "rename it to iter_ and the iteration in seven digits"),
    ):
        ended = _run(flags)
        assert ended.code == 64, flags
        assert words in ended.errors
        assert ended.output == ""


@pytest.mark.parametrize("name", ["iter_0000009", "release", "new"])
def test_a_folder_of_any_name_may_be_begun_and_resumed(name: str, tmp_path: Path) -> None:
    """A launch script has --save X --load X from its first start on; a start afresh is said."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "notes.txt").touch()
    if name == "iter_0000009":
        (folder / TRACKER).write_text("1")  # begun before: without a tracker or a checkpoint it would be a checkpoint
        assert _run(f"--load {folder}").code == 65
        (folder / TRACKER).unlink()
        assert _run(f"--save {folder}").code == 0
    else:
        assert f"checkpoint: starting afresh: none in {folder}" in _run(f"--load {folder} --save {folder}").output
    assert f"checkpoint: resuming at iteration 3 of {folder}" in _run(f"--load {folder}").output


def test_another_seed_is_reported(tmp_path: Path) -> None:
    save = str(tmp_path / "save")
    common = "--lr-decay-style constant --lr-decay-iters 2 --seed 5"
    assert _run(f"{common} --train-iters 1 --save {save}").code == 0
    same, other, finetuned = (
        _run(f"{common} --train-iters 2 --load {save} {more}") for more in ("", "--seed 6", "--seed 6 --finetune")
    )
    assert [ended.code for ended in (same, other, finetuned)] == [0, 0, 0], other.errors
    said = f"--seed 6, but the checkpoint in --load {save} was saved with 5"
    assert said in other.errors
    assert "use --seed 5 to go on with that one" in other.errors
    assert "--seed" not in same.errors + finetuned.errors


@dataclass(frozen=True)
class Loaded:
    iteration: int
    samples: int
    scheduled: int
    weights: float
    """Sum of the absolute values."""
    masters: float
    """The same of the fp32 copies, rounded as the weights are."""
    moments: float
    updates: int
    rng: bytes


BF16 = [*checkpoints.FLAGS, "--num-layers", "1", "--bf16"]
WHOLE, BARE = "whole", "bare"
LOADS: dict[str, tuple[str | None, str]] = {
    "afresh": (None, ""),
    "all": (WHOLE, ""),
    "finetuned": (WHOLE, "--finetune"),
    "no optimizer": (WHOLE, "--no-load-optim"),
    "no generators": (WHOLE, "--no-load-rng"),
    "step 1": (WHOLE, "--ckpt-step 1"),
    "step 2": (WHOLE, "--ckpt-step 2"),
    "Lion": (WHOLE, "--optimizer lion"),
    "SGD": (WHOLE, "--optimizer sgd"),
    "SGD, no optimizer": (WHOLE, "--optimizer sgd --no-load-optim"),
    "bare": (BARE, ""),
    "bare, no optimizer": (BARE, "--no-load-optim"),
}
"""The checkpoint that is loaded, and how; BARE is one without optimizer and generators."""


def _look(case: tuple[str | None, list[str]]) -> Loaded | str:
    """Return what a run has that has loaded so, or why it cannot."""
    folder, flags = case
    try:
        run = build(flags)
        if folder is not None:
            load_checkpoint(run, folder)
    except DataError as error:
        return str(error)
    parts = run.sharding.parts(run.optimizer)
    states: list[Any] = [state for part in parts for state in part.core.optimizer.state.values()]
    groups = [group for part in parts for group in part.core.optimizer.param_groups]
    return Loaded(
        iteration=run.state.iteration,
        samples=run.state.consumed_samples,
        scheduled=run.state.scheduled_samples,
        weights=sum(float(weight.double().abs().sum()) for chunk in run.chunks for weight in chunk.parameters()),
        masters=sum(float(main.bfloat16().double().abs().sum()) for group in groups for main in group["params"]),
        moments=sum(float(state["exp_avg"].abs().sum()) for state in states if "exp_avg" in state),
        updates=step_count(parts),
        rng=bytes(torch.get_rng_state().numpy()),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 1 and 3, of 2 samples each, and the third in BARE."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_at, str(folder / WHOLE), [1, 3], BF16)
    run_ranks(1, save_at, str(folder / BARE), [3], [*BF16, "--no-save-optim", "--no-save-rng"])
    return folder


@pytest.fixture(scope="module")
def looks(folder: Path) -> dict[str, Any]:
    cases = []
    for name, flags in LOADS.values():
        place = None if name is None else str(folder / name)
        cases.append((place, [*BF16, *flags.split(), *(["--load", place] if place and "--ckpt-step" in flags else [])]))
    [found] = run_ranks(1, in_turn, _look, cases)
    return dict(zip(LOADS, found, strict=True))


@pytest.mark.parametrize("how", LOADS)
def test_masters_are_those_of_the_weights(how: str, looks: dict[str, Any]) -> None:
    if isinstance(looks[how], Loaded):
        assert looks[how].masters == pytest.approx(looks[how].weights, rel=1e-12)


def test_what_is_taken_of_a_checkpoint(looks: dict[str, Any]) -> None:
    fresh, whole = looks["afresh"], looks["all"]
    assert whole.weights != fresh.weights
    assert whole.rng != fresh.rng
    assert whole.moments > 0
    positions = {
        "all": (3, 6, 6, 3, whole.moments),
        "finetuned": (0, 0, 0, 0, 0),
        "no optimizer": (3, 6, 0, 0, 0),
        "no generators": (3, 6, 6, 3, whole.moments),
        "SGD, no optimizer": (3, 6, 0, 0, 0),
        "bare, no optimizer": (3, 6, 0, 0, 0),
    }
    for how, expected in positions.items():
        found = looks[how]
        assert (found.iteration, found.samples, found.scheduled, found.updates, found.moments) == expected, how
        assert found.weights == whole.weights, how
        from_seed = how in ("finetuned", "no generators", "bare, no optimizer")
        assert found.rng == (fresh if from_seed else whole).rng, how
    assert looks["step 1"].iteration == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("step 2", r"iter_0000002 is missing or not whole; .* are those of: 1, 3"),
        ("bare", "without optimizer state; add --no-load-optim"),
        # It lacks the tensors of SGD, and Lion's is called as one of Adam's: either way it is another state.
        ("Lion", r"has the state of --optimizer adam, .* --optimizer lion cannot go on; use"),
        ("SGD", r"has the state of --optimizer adam, .* --optimizer sgd cannot go on; use"),
    ],
)
def test_what_a_checkpoint_does_not_have_is_named(how: str, said: str, looks: dict[str, Any]) -> None:
    assert re.search(said, looks[how])


def test_a_checkpoint_without_optimizer_is_small(folder: Path) -> None:
    sizes = [(folder / name / "iter_0000003/__0_0.distcp").stat().st_size for name in (BARE, WHOLE)]
    assert sizes[0] < sizes[1] / 2
