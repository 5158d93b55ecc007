"""What --load may name: a folder of checkpoints, or one of them; nothing else makes a run start afresh in silence.
Another seed than the checkpoint's is told, and another optimizer's state refused."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, checkpoint_at
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.optimizer_state import step_count
from megatron_ext.errors import DataError
from megatron_ext.forkserver.ranks import run_ranks
from tests.support import checkpoints
from tests.support.checkpoints import build, save_at
from tests.support.program import Ended, run_program, tiny
from tests.support.several_models import in_turn

FLAGS = tiny("--num-layers 1 --hidden-size 16 --seq-length 8 --global-batch-size 2 --train-iters 3")


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


BF16 = [*checkpoints.FLAGS, "--num-layers", "1", "--bf16"]
LOADS = {
    "all": "",
    "finetuned": "--finetune",
    "no optimizer": "--no-load-optim",
    "Lion": "--optimizer lion",
    "SGD": "--optimizer sgd",
    "SGD, no optimizer": "--optimizer sgd --no-load-optim",
}


def _loaded(case: tuple[str, list[str]]) -> tuple[float, float, int] | str:
    """Return the sums of the weights' sizes and of those of their fp32 copies, rounded as these, and how many updates
    the optimizer has counted; or why nothing is loaded."""
    folder, flags = case
    run = build(flags)
    try:
        load_checkpoint(run, folder)
    except DataError as error:
        return str(error)
    parts = run.sharding.parts(run.optimizer)
    weights = sum(float(weight.double().abs().sum()) for chunk in run.chunks for weight in chunk.parameters())
    mains = [main for part in parts for group in part.core.optimizer.param_groups for main in group["params"]]
    return weights, sum(float(main.bfloat16().double().abs().sum()) for main in mains), step_count(parts)


def test_masters_are_those_of_the_weights_and_another_optimizers_state_is_refused(tmp_path: Path) -> None:
    run_ranks(1, save_at, str(tmp_path), [3], BF16)
    cases = [(str(tmp_path), [*BF16, *flags.split()]) for flags in LOADS.values()]
    found = dict(zip(LOADS, run_ranks(1, in_turn, _loaded, cases)[0], strict=True))
    # A checkpoint lacks the tensors of SGD, and Lion's is called as one of Adam's: either way it is another state.
    for name in ("Lion", "SGD"):
        said = rf"has the state of --optimizer adam, .* --optimizer {name.lower()} cannot go on; use"
        assert re.search(said, found.pop(name))
    assert [updates for *_, updates in found.values()] == [3, 0, 0, 0]
    assert len({weights for weights, *_ in found.values()}) == 1
    for weights, masters, _ in found.values():
        assert masters == pytest.approx(weights, rel=1e-12)
