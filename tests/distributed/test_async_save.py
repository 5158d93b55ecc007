"""--async-save: what is written is the step of the save, whatever the training does meanwhile."""

import contextlib
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_state_dict, save
from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, saved_iterations
from megatron_ext.errors import NumericError
from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors, differences
from megatron_ext.train.callbacks.checkpointing import Checkpointing
from megatron_ext.train.trainer import Callback, Trainer
from tests.support import checkpoints
from tests.support.checkpoints import build, file_hashes, load, save_at
from tests.support.selection import marked

FLAGS = [*checkpoints.FLAGS, "--num-layers", "1"]
LAYOUTS = {
    "fp32": [*FLAGS, "--hidden-dropout", "0.1"],
    "bf16, distributed optimizer": [*FLAGS, "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"],
    "bf16, FSDP2": [*FLAGS, "--bf16", "--use-torch-fsdp2"],
}


class LateCopies:
    """Copies as late as a GPU may: the training thread's when it waits or is about to change the weights, before which
    a thread that waits gets none."""

    def __init__(self) -> None:
        self._asked: list[tuple[Any, Any]] = []
        self._there = threading.Event()

    def copy(self, to: Any, tensor: Any) -> None:
        to.fill_(77)
        self._asked.append((to, tensor))

    def hold(self) -> None:
        while self._asked:
            to, tensor = self._asked.pop()
            to.copy_(tensor)
        self._there.set()

    def wait(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.hold()
        assert self._there.wait(60), "nobody holds the update"


def _save_while_training(folder: str, flags: list[str]) -> list[str]:
    """Begin a save at step 2 and hold its thread until step 5. Returns what lay there meanwhile.

    A save at step 1 came before, so that the thread of this one plans and exchanges shards as well.
    """

    class Held(Callback):
        def before_update(self, trainer: Trainer) -> None:
            if pending is not None:
                pending.hold_update()

    pending: Any = None
    trained = threading.Event()
    genuine = checkpoint_state_dict.to_save

    def held(*arguments: Any) -> Any:
        in_the_loop.append(threading.current_thread() is threading.main_thread())
        assert trained.wait(60)
        return genuine(*arguments)

    in_the_loop: list[bool] = []
    bound: list[threading.Thread] = []
    checkpoint_state_dict.to_save = held
    run, kept = build(flags), save.Kept()
    run.device.copies = LateCopies
    run.device.bind_thread = lambda: bound.append(threading.current_thread())
    synchronize = torch.cuda.synchronize  # the engine's writer calls it, for the current device of its thread

    def synchronized() -> None:
        assert threading.current_thread() in (*bound, threading.main_thread()), "a new thread begins with GPU 0"
        synchronize()

    torch.cuda.synchronize = synchronized
    trainer = Trainer(run, [Held()])
    trainer.step()
    trained.set()
    save.Save(run, folder, background=True, kept=kept).finish()
    trained.clear()
    trainer.step()
    size = kept.memory.bytes
    pending = save.Save(run, folder, background=True, kept=kept)
    for _ in range(3):
        trainer.step()
    assert not pending.written()
    there = sorted(path.name for path in Path(folder).iterdir())
    trained.set()
    assert pending.finish() == Path(folder) / "iter_0000002"
    assert in_the_loop == [True, False]
    assert len(bound) == 2
    assert threading.main_thread() not in bound
    assert kept.memory.bytes == size, "the second save uses the memory of the first"
    _one_rank_is_waited_for(run)
    assert save._sum_over_ranks(3 << 30, run.device) == 6 << 30, "more than 32 bits count"
    return there


def _one_rank_is_waited_for(run: Any) -> None:
    """A save is written when the slower rank has written, too."""
    ends = threading.Event()
    pending = object.__new__(save.Save)
    pending.run, pending._thread = run, threading.Thread(target=ends.wait) if run.rank == 1 else None
    if pending._thread is not None:
        pending._thread.start()
    assert not pending.written()
    ends.set()
    pending.join()
    assert pending.written()


# Slow: fp32 copies less, and FSDP2 copies rows as other layouts copy shards.
@pytest.mark.parametrize("layout", marked(LAYOUTS, slow={"fp32", "bf16, FSDP2"}))
def test_the_snapshot_is_exact(layout: str, tmp_path: Path) -> None:
    flags = LAYOUTS[layout]
    meanwhile, synchronous = tmp_path / "background", tmp_path / "synchronous"
    meanwhile.mkdir()
    assert run_ranks(2, _save_while_training, str(meanwhile), flags)[0] == [
        ".iter_0000002.partial",
        "iter_0000001",
        TRACKER,
    ]
    run_ranks(2, save_at, str(synchronous), [1, 2], flags)
    for step in ("iter_0000001", "iter_0000002"):
        one, other = (Tensors(folder / step) for folder in (meanwhile, synchronous))
        assert list(differences(one, other)) == []
        assert one.common() == other.common()
    assert (meanwhile / TRACKER).read_text() == "2"
    assert run_ranks(2, load, str(meanwhile), flags) == [(2, 2), (2, 2)]


def _train(flags: list[str], broken: bool) -> None:
    genuine = save.write_shards

    def failing(request: Any, buckets: Any) -> None:
        if run.rank == 1 and broken and run.state.iteration >= 4:
            raise OSError(28, "No space left on device", "shard")
        genuine(request, buckets)

    save.write_shards = failing
    run = build(flags)
    checkpoint = run.config.checkpoint
    assert checkpoint.save is not None
    Trainer(run, [Checkpointing(checkpoint.save, checkpoint.save_interval, background=checkpoint.async_save)]).fit()


def _flags(folder: Path, *more: str) -> list[str]:
    return [*FLAGS, "--save", str(folder), "--save-interval", "2", "--train-iters", "7", *more]


def test_a_run_saves_the_same_in_the_background(tmp_path: Path) -> None:
    run_ranks(2, _train, _flags(tmp_path / "a", "--async-save", "--keep-last-checkpoints", "3"), False)
    run_ranks(2, _train, _flags(tmp_path / "b", "--keep-last-checkpoints", "3"), False)
    assert saved_iterations(tmp_path / "a") == [4, 6, 7], "the last one is waited for"
    assert not list((tmp_path / "a").glob(".iter*"))
    shards = [{name: sum_ for name, sum_ in file_hashes(tmp_path / run).items() if "distcp" in name} for run in "ab"]
    assert shards[0].keys() == shards[1].keys()
    for iteration in (4, 6, 7):
        one, other = (Tensors(tmp_path / run / f"iter_{iteration:07d}") for run in "ab")
        assert list(differences(one, other)) == []


def test_a_failed_background_save_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _train, _flags(tmp_path, "--async-save"), True)
    assert len(caught.value.tracebacks) == 2
    assert all("SaveFailedError: cannot save a checkpoint to" in text for _, text in caught.value.tracebacks)
    assert saved_iterations(tmp_path) == [2]
    assert not list(tmp_path.glob(".iter*"))


def _fail_with_a_save_in_progress(flags: list[str], kind: str) -> tuple[str, str]:
    """Step 5 fails while what was saved at step 4 is still being written; returns the error and what was said."""
    failed = threading.Event()
    genuine = save.write_shards

    def held(request: Any, buckets: Any) -> None:
        assert run.state.iteration < 4 or failed.wait(60)
        genuine(request, buckets)

    class Failing(Callback):
        def on_step_end(self, trainer: Trainer, result: Any) -> None:
            if trainer.run.state.iteration == 5:
                failed.set()
                raise {"NaN": NumericError, "other": RuntimeError}[kind]("step 5")

    save.write_shards = held
    run = build(flags)
    checkpoint = run.config.checkpoint
    assert checkpoint.save is not None
    callbacks = [Failing(), Checkpointing(checkpoint.save, checkpoint.save_interval, background=True)]
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises((NumericError, RuntimeError)) as caught:
        Trainer(run, callbacks).fit()
    return type(caught.value).__name__, said.getvalue()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "saved"), [("NaN", [2, 4]), ("other", [2])])
def test_a_failing_run_does_not_lose_a_save_in_silence(kind: str, saved: list[int], tmp_path: Path) -> None:
    """Where every rank fails alike, the save is finished; where ranks may be gone, it is given up aloud."""
    flags = _flags(tmp_path, "--async-save")
    (name, said), (_, other) = run_ranks(2, _fail_with_a_save_in_progress, flags, kind)
    assert name == {"NaN": "NumericError", "other": "RuntimeError"}[kind]
    assert saved_iterations(tmp_path) == saved
    assert ("background save of iteration 4 was not finished and is no checkpoint" in said) == (kind == "other")
    assert other == ""
    assert run_ranks(2, load, str(tmp_path), flags)[0][0] == saved[-1]
