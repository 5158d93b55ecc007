"""A run goes on from one checkpoint: its flags, the order of its data and its weights are those of the same folder.

Two runs with other flags have saved into one folder. Where the newer checkpoint is damaged, all must be the older's.
"""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native import resume
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.checkpoints import flip
from tests.support.corpora import write_windows
from tests.support.program import Ended, run_program

# Of the second tier: tests/distributed/test_resume.py resumes.
pytestmark = pytest.mark.full

BASE = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --position-embedding-type rope
    --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 16 --eval-interval 0
    --micro-batch-size 2 --global-batch-size 8 --data-order shuffled --log-interval 1
"""
OLDER = "--rotary-base 5000 --lr 1e-3 --train-iters 6 --exit-interval 2"
NEWER = "--rotary-base 20000 --lr 5e-2 --train-iters 20 --exit-interval 4"
# What is not typed is taken; data that is not the checkpoint's would be trained on without an error.
RESUMED = """
    --use-checkpoint-args --use-checkpoint-opt-param-scheduler --accept-changed-data --train-iters 6
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iteration 2, of one run, and of iteration 4, of another; two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    # The samples of both runs go through the file more than once: their orders differ.
    write_windows(folder / "a", 29, seed=0)
    for flags in (OLDER, NEWER):
        ended = run_ranks(2, run_program, shlex.split(f"{_data(folder)} {flags} --save {folder}/save"))
        assert ended[0].code == 0, ended[0].errors
    return folder


def _data(folder: Path) -> str:
    return f"{BASE} --train-data-path {folder}/a --data-cache-path {folder}/cache"


def _resume(saved: Path, load: Path, to: Path, flags: str = "", program=run_program) -> list[Ended]:
    log = f"--save {to} --log-sample-ids {to}.ids --metrics-file {to}.metrics"
    ended = run_ranks(2, program, shlex.split(f"{_data(saved)} {RESUMED} --load {load} {log} {flags}"))
    assert [end.code for end in ended] == [0, 0], ended[0].errors
    return ended


def _assert_equal(one: Path, other: Path) -> None:
    """The same samples, losses and learning rates, and the same last checkpoint, to the bit."""
    assert Path(f"{one}.ids").read_bytes() == Path(f"{other}.ids").read_bytes()
    rows, others = (
        [(row["iteration"], row["lm_loss"], row["learning_rate"]) for row in read_rows(Path(f"{path}.metrics"))]
        for path in (one, other)
    )
    assert rows == others
    names = ["data.json", *(path.name for path in (other / "iter_0000006").glob("*.distcp"))]
    assert len(names) >= 3
    for name in names:
        assert (one / "iter_0000006" / name).read_bytes() == (other / "iter_0000006" / name).read_bytes(), name


@pytest.fixture(scope="module")
def from_older(saved: Path) -> tuple[Path, list[Ended]]:
    """What goes on from the older checkpoint by name."""
    to = saved / "from_older"
    return to, _resume(saved, saved / "save", to, "--ckpt-step 2")


@pytest.mark.parametrize("name", ["__0_0.distcp", "config.yaml"])
def test_all_is_of_the_older_where_the_newest_is_damaged(
    name: str, saved: Path, from_older: tuple[Path, list[Ended]], tmp_path: Path
) -> None:
    load = Path(shutil.copytree(saved / "save", tmp_path / "load"))
    flip(load / "iter_0000004" / name)
    reference, expected = from_older
    ended = _resume(saved, load, tmp_path / "resumed")
    assert f"iter_0000004 is damaged ({name} " in ended[0].errors
    assert ended[0].errors.count(f"using the next whole checkpoint, {load}/iter_0000002") == 1
    assert "warning: " not in ended[1].errors
    assert "checkpoint: resuming at iteration 2 of" in ended[0].output
    assert "the data is not that of the checkpoint" not in ended[0].output
    flags = read_saved(tmp_path / "resumed/iter_0000006/config.yaml")
    assert flags is not None
    assert (flags["rotary_base"], flags["lr"]) == (5000, 1e-3)
    assert [end.samples for end in ended] == [end.samples for end in expected]
    _assert_equal(tmp_path / "resumed", reference)


def test_flags_that_do_not_fit_the_older_are_refused(saved: Path, tmp_path: Path) -> None:
    """They fit the newest, which is not the one that would be loaded."""
    load = Path(shutil.copytree(saved / "save", tmp_path / "load"))
    flip(load / "iter_0000004/__0_0.distcp")
    flags = f"{_data(saved)} {NEWER} --load {load}"
    for ended in run_ranks(2, run_program, shlex.split(flags)):
        assert ended.code == 64
        assert "--rotary-base 20000.0, but the checkpoint in --load was saved with 5000.0" in ended.errors


def _run_with_an_old_view(argv: list[str]) -> Ended:
    """As `run_program`; the second rank does not see the newest checkpoint yet, as on a network file system."""
    find = resume.find_to_load
    if os.environ["RANK"] == "1":
        resume.find_to_load = lambda load, step=None: find(load, 2)
    return run_program(argv)


def test_the_first_rank_decides_for_all(saved: Path, tmp_path: Path) -> None:
    for name, program in (("same", run_program), ("old", _run_with_an_old_view)):
        ended = _resume(saved, saved / "save", tmp_path / name, program=program)
        assert "checkpoint: resuming at iteration 4 of" in ended[0].output
    for name in ("same", "old"):
        flags = read_saved(tmp_path / name / "iter_0000006/config.yaml")
        assert flags is not None
        assert (flags["rotary_base"], flags["lr"]) == (20000, 5e-2)
    _assert_equal(tmp_path / "old", tmp_path / "same")
