"""A save by itself, on a run made by hand: what waits for the copies, what is planned once, what finishes in which
order."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import optimizer_state, save
from megatron_ext.checkpoint.native.save import Kept, Save
from megatron_ext.checkpoint.native.snapshot import as_it_is
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.errors import StorageError
from megatron_ext.sharding.parts import IN_PLACE
from tests.support.small_models import small_config

NOTHING: Any = None


class _Copies:
    """Begins copies that are there when somebody waits for them."""

    def __init__(self, heard: list[str]):
        self.heard = heard

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        self.heard.append("copy")
        to.copy_(tensor)

    def hold(self) -> None:
        self.heard.append("hold")

    def wait(self) -> None:
        self.heard.append("wait" if threading.current_thread() is threading.main_thread() else "wait aside")


class Made:
    """A run of one rank among two whose saves write nothing, and what is done in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = 10**6) -> None:
        self.heard: list[str] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.request = SimpleNamespace(finalize_fns=[lambda: self.heard.append("finalize")])
        here = SimpleNamespace(
            copies=lambda: _Copies(self.heard),
            bind_thread=lambda: self.heard.append("bind"),
            torch_device=torch.device("cpu"),
            reads_wait=False,
            read_later=lambda numbers: numbers.tolist,
        )
        self.run: Any = SimpleNamespace(
            state=SimpleNamespace(iteration=7),
            rank=0,
            device=here,
            config=small_config(),
            gathered_parameters=self._gathered,
            data_record=None,
        )
        watched = SimpleNamespace(files=lambda: {"__0_0.distcp": {"bytes": 3, "sha256": "00"}})
        for name, value in {
            "_on_first_rank": lambda run, folder, action: action(),
            "make_partial": self._make_partial,
            "_sum_over_ranks": self._summed,
            "_request": self._request,
            "write_shards": self._write,
            "_on_host": lambda request: None,
            "_gather_files": lambda folder, own: self.heard.append("gather files") or own,
            "remove_expired": lambda run, folder, newest: self.heard.append(f"remove before {newest}"),
        }.items():
            monkeypatch.setattr(save, name, value)
        monkeypatch.setattr(save.checksums, "watch", lambda request: watched)
        monkeypatch.setattr(save.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
        monkeypatch.setattr(save.contents, "take", self._take)
        monkeypatch.setattr(save.contents, "to_save", self._to_save)
        monkeypatch.setattr(save.contents, "size", lambda state_dict: 40)
        monkeypatch.setattr(Save, "_write_companions", lambda made: self.heard.append("companions"))
        monkeypatch.setattr(Save, "_publish", lambda made, files: self.heard.append(f"publish {sorted(files)}"))
        monkeypatch.setattr(torch.distributed, "barrier", lambda: self.heard.append("barrier"))

        monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda told, src: None)

    def _make_partial(self, folder: Path, iteration: int) -> None:
        self.heard.append("folder")
        save.partial_folder(folder, iteration).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        self.heard.append("gathered")
        yield
        self.heard.append("as before")

    def _summed(self, number: int, device: Any) -> int:
        self.heard.append("sum of ranks")
        return 2 * number

    def _take(self, run: Any, copy: Any, models: Any) -> Any:
        how = "as they are" if copy is as_it_is else "copies"
        self.heard.append(f"take {how}, {'planned' if models is not None else 'new'}")
        copy("weight", torch.ones(2))
        return SimpleNamespace(models="the models")

    def _to_save(self, taken: Any, exchange: Any) -> dict[str, Any]:
        self.heard.append("in place" if exchange is IN_PLACE else "by host")
        return {}

    def _request(self, state_dict: Any, folder: Path, strategy: Any, *, validate: bool) -> Any:
        self.heard.append("plan, validated" if validate else "plan")
        return self.request

    def _write(self, request: Any, buckets: Any) -> None:
        assert self.may_write.wait(20)
        self.heard.append("write")

    def taken(self) -> list[str]:
        """What was done since the last call."""
        found, self.heard[:] = list(self.heard), []
        return found


END = ["gather files", "finalize", "publish ['__0_0.distcp']", "remove before 7"]


def test_a_first_background_save_plans_before_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Later ones begin a copy, and all else is the thread's: it waits for the copies before it reads one."""
    made, kept = Made(monkeypatch), Kept()
    made.may_write.clear()
    begun = Save(made.run, tmp_path, background=True, kept=kept)
    made.may_write.set()
    begun.join()
    there = ["folder", "gathered", "take copies, new", "copy"]
    plan = ["by host", "sum of ranks", "plan, validated", "as before"]
    written = ["bind", "wait aside", "write", "companions"]
    assert made.taken() == [*there, "wait", *plan, *written]
    assert (kept.size, kept.models) == (80, "the models")
    begun.hold_update()
    assert made.taken() == ["hold"], "the device waits, and no thread"
    assert begun.finish() == tmp_path / "iter_0000007"
    assert made.taken() == ["barrier", *END]
    made.may_write.clear()
    begun = Save(made.run, tmp_path, background=True, kept=kept)
    made.may_write.set()
    begun.finish()
    there = ["folder", "gathered", "take copies, planned", "copy", "as before"]
    written = ["bind", "wait aside", "by host", "plan", "write", "companions"]
    assert made.taken() == [*there, *written, "barrier", *END]


def test_a_save_that_the_training_waits_for_copies_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, kept = Made(monkeypatch), Kept()
    for validated in ("plan, validated", "plan"):
        Save(made.run, tmp_path, background=False, kept=kept).finish()
        found = [word for word in made.taken() if word not in ("sum of ranks", "bind")]
        there = ["folder", "gathered", "take as they are, new", "wait", "in place", validated, "wait"]
        assert found == [*there, "write", "companions", "as before", "barrier", *END]
    assert kept.models is None, "the run's own tensors may change"


def test_a_thread_is_waited_for_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Made(monkeypatch)
    made.may_write.clear()
    begun = Save(made.run, tmp_path, background=True)
    made.taken()
    asked: list[Any] = []

    def all_reduce(waiting: torch.Tensor, op: Any) -> None:
        asked.append((int(waiting), op))
        waiting.fill_(max(int(waiting), others))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    others = 0
    assert not begun.written()
    threading.Timer(0.02, made.may_write.set).start()
    begun.finish()
    found = made.taken()
    assert found.index("write") < found.index("barrier")
    assert begun.written()
    others = 1
    assert not begun.written(), "another rank writes"
    most = torch.distributed.ReduceOp.MAX
    assert asked == [(1, most), (0, most), (0, most)]


def test_what_does_not_fit_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first save knows it when it is planned, the next before anything is copied."""
    for free, fits in ((80, True), (79, False)):
        made, kept = Made(monkeypatch, free=free), Kept()
        if fits:
            Save(made.run, tmp_path, background=False, kept=kept).finish()
            continue
        with pytest.raises(StorageError, match=r"80 bytes are needed, 79 are free"):
            Save(made.run, tmp_path, background=False, kept=kept)
        assert "write" not in made.taken()
        kept.size = 80
        with pytest.raises(StorageError, match=r"80 bytes are needed, 79 are free"):
            Save(made.run, tmp_path, background=True, kept=kept)
        assert made.taken() == ["folder"]


def test_a_write_that_fails_is_told_when_it_is_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Made(monkeypatch)

    def fails(request: Any, buckets: Any) -> None:
        raise OSError(5, "Input/output error", "shard")

    def gather(folder: Any, own: Any) -> Any:
        raise StorageError(own)

    monkeypatch.setattr(save, "write_shards", fails)
    monkeypatch.setattr(save, "_gather_files", gather)
    partial = save.partial_folder(tmp_path, 7)
    begun = Save(made.run, tmp_path, background=True)
    begun.join()
    with pytest.raises(StorageError, match="Input/output error: shard"):
        begun.finish()
    assert not partial.exists()
    assert "publish" not in " ".join(made.taken())


def test_sizes_of_a_large_model_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks with 5 GB each are more than 32 bits hold."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(3))
    here: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    assert save._sum_over_ranks(5 * 10**9, here) == 15 * 10**9


def test_a_manifest_has_every_file_before_the_checkpoint_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shards as their writers saw them, and all others as they are."""
    made: Any = object.__new__(Save)
    made.folder, made.iteration, made._partial = tmp_path, 7, tmp_path
    for name in ("__0_0.distcp", "metadata.json", "common.pt", "config.yaml"):
        (tmp_path / name).write_text(name)
    heard: list[Any] = []
    monkeypatch.setattr(
        save.manifest, "write", lambda folder, files: heard.append({name: files[name] for name in files})
    )
    monkeypatch.setattr(save, "publish", lambda folder, iteration: heard.append((folder, iteration)))
    shards: Any = {"__0_0.distcp": "of the writer"}
    made._publish(shards)
    files, named = heard
    assert sorted(files) == ["__0_0.distcp", "common.pt", "config.yaml", "metadata.json"]
    assert files["__0_0.distcp"] == "of the writer"
    assert named == (tmp_path, 7)


def test_a_tokenizer_is_kept_from_the_newest_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: Any = object.__new__(Save)
    made.folder, made._partial = tmp_path, tmp_path
    made.run = SimpleNamespace(config=small_config(), data_record=None)
    found: list[str] = []
    monkeypatch.setattr(save, "to_yaml", lambda config: "a: 1\n")
    monkeypatch.setattr(save, "saved_iterations", lambda folder: [10, 20, 30])
    monkeypatch.setattr(
        save, "keep_tokenizer", lambda data, folder, earlier: found.extend(path.name for path in earlier)
    )
    monkeypatch.setattr(save, "write_versions", lambda folder: None)
    made._write_companions()
    assert found == ["iter_0000030", "iter_0000020", "iter_0000010"]
    assert (tmp_path / save.CONFIG).read_text() == "a: 1\n"
    assert not (tmp_path / save.DATA).exists()


def test_what_the_system_says_of_a_failure_is_said_as_far_as_it_goes() -> None:
    assert save._text(OSError(28, "No space left on device")) == "No space left on device"
    assert save._text(OSError(28, "No space left on device", "/a")) == "No space left on device: /a"
    assert save._text(OSError("unknown")) == "unknown"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no such tensor"), "ValueError: no such tensor"),
        (OSError(28, "No space left on device", "a"), "No space left on device: a"),
    ],
)
def test_what_fails_in_the_thread_is_told_by_the_end_of_the_save(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the files that were written until then: the checkpoint would pass for whole."""

    def fail(request: Any) -> None:
        raise error

    made: Any = object.__new__(Save)
    made._copies, made._request = SimpleNamespace(wait=lambda: None), "request"
    monkeypatch.setattr(save.checksums, "watch", fail)
    made._write(None)
    assert made._files == told


def test_copies_of_several_optimizers_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights of one shape, too: the optimizer of the experts comes after that of all others."""
    parts: Any = [SimpleNamespace(divides_state=True), SimpleNamespace(divides_state=True)]
    weights = {id(part): torch.nn.Parameter(torch.zeros(3)) for part in parts}
    monkeypatch.setattr(optimizer_state, "initialize_state", lambda part, config: None)
    monkeypatch.setattr(
        optimizer_state, "own_state", lambda part, config: [(weights[id(part)], {"exp_avg": torch.ones(3)})]
    )
    names: list[Any] = []
    optimizer_state.take(parts, OptimizerConfig(), lambda name, tensor: names.append(name) or tensor, written=())
    assert len(names) == len(set(names)) == 2
