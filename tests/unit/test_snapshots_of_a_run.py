"""A snapshot from the moment at which the training stops for it to the restart that goes on from it: what is copied
when, who writes, sends and removes what, and which tensors are held once."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.local import agreement, folder, peers, rank_file, rank_state, writer
from megatron_ext.checkpoint.native import contents
from megatron_ext.checkpoint.native.folder import Found, iteration_folder
from megatron_ext.config.schema import CheckpointConfig
from megatron_ext.errors import DataError
from tests.support.small_models import small_config


class Making:
    """A writer of rank 2, and all that happens around it, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, *, jump: int = 0) -> None:
        self.log: list[Any] = []
        self.made: Any = object.__new__(writer.SnapshotWriter)
        made = self.made
        made.folder, made.problem, made.bytes = path, None, 0
        made._jump, made._group, made._thread = jump, None, None
        made._contents, made._follows = "of this run", (0, None)
        made._memory = SimpleNamespace(copy=self._copy)
        copies = SimpleNamespace(wait=lambda: self.log.append("copied"))
        made.run = SimpleNamespace(
            state=SimpleNamespace(iteration=5),
            rank=2,
            device=SimpleNamespace(copies=lambda: copies, bind_thread=lambda: self.log.append("bound")),
            gathered_parameters=self._gathered,
            config=small_config(),
            data_record={"seed": 7},
        )
        self.tensors, self.random = {"w": torch.ones(3)}, {"rng": torch.zeros(2)}
        monkeypatch.setattr(rank_state, "tensors_of", lambda run: dict(self.tensors))
        monkeypatch.setattr(rank_state, "random_states", lambda run: dict(self.random))
        monkeypatch.setattr(rank_state, "numbers_of", lambda run: {"iteration": run.state.iteration})
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)

    def _copy(self, copies: Any, name: str, tensor: torch.Tensor) -> str:
        self.log.append(("copy", name))
        return f"copy of {name}"

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        self.log.append("gathered")
        yield
        self.log.append("released")


def test_the_training_stops_for_the_copy_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All parameters are up to date for it, and it has ended when the training goes on; a thread does the rest."""
    making = Making(monkeypatch, tmp_path)
    made = making.made
    monkeypatch.setattr(made, "_write", lambda *given: making.log.append(given))
    assert made.take() > 0.0
    made.join()
    whole = {"w": "copy of w", **making.random}
    assert making.log == ["gathered", ("copy", "w"), "released", "copied", (5, whole, {"iteration": 5})]


def test_a_group_is_made_once_and_all_ranks_go_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank that cannot write its own goes on to receive the other's; without copies it takes none any more."""
    for jump in (0, 1):
        making = Making(monkeypatch, tmp_path, jump=jump)
        made = making.made
        monkeypatch.setattr(
            torch.distributed, "new_group", lambda backend, log=making.log: log.append(backend) or "group"
        )
        monkeypatch.setattr(made, "_write", lambda *given, log=making.log: log.append("written"))
        made.take()
        made.problem = "the disk is full"
        stopped = made.take()
        made.join()
        assert making.log.count("gloo") == jump
        assert making.log.count("written") == 1 + jump
        assert (stopped > 0.0) == bool(jump)


def test_snapshots_go_when_all_ranks_have_ended_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    making = Making(monkeypatch, tmp_path)
    making.made._thread = SimpleNamespace(join=lambda seconds: making.log.append("ended"))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: making.log.append("all ranks have"))
    monkeypatch.setattr(writer, "remove_all", lambda path: making.log.append(path))
    making.made.forget()
    assert making.log == ["ended", "all ranks have", tmp_path]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, None),
        (OSError(errno.EIO, "Input/output error", "/dev/shm/x"), "Input/output error: /dev/shm/x"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: {path}"),
    ],
)
@pytest.mark.parametrize("jump", [0, 1])
def test_what_cannot_be_written_is_told_and_the_copy_is_exchanged(
    error: OSError | None, said: str | None, jump: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    making = Making(monkeypatch, tmp_path, jump=jump)

    def write(path: Path, facts: Any, tensors: Any) -> int:
        making.log.append((path, facts, tensors))
        if error is not None:
            raise error
        return 99

    monkeypatch.setattr(rank_file, "write", write)
    monkeypatch.setattr(making.made, "_facts", lambda *given: given)
    monkeypatch.setattr(making.made, "_copy_to_peer", lambda *given: making.log.append(given))
    making.made._write(5, making.tensors, {"n": 1})
    path = folder.file_of(tmp_path, 5, 2)
    assert making.log == ["bound", (path, (5, {"n": 1}), making.tensors), *([(5, path)] if jump else [])]
    assert making.made.problem == (None if said is None else said.format(path=path))
    assert making.made.bytes == (99 if error is None else 0)


@pytest.mark.parametrize("own", [None, "of before"])
@pytest.mark.parametrize("answer", [None, "the disk is full", RuntimeError("connection closed")])
def test_the_copy_goes_to_one_machine_and_comes_from_another(
    own: str | None, answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of four ranks with a distance of 1, rank 2 sends to 3 and gets from 1; what failed before is not forgotten."""
    making = Making(monkeypatch, tmp_path, jump=1)
    made = making.made
    made.problem, made._group = own, "group"

    def exchange(*given: Any) -> Any:
        making.log.append(given)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(writer, "exchange", exchange)
    made._copy_to_peer(5, tmp_path / "own")
    assert making.log == [(tmp_path / "own", 3, folder.file_of(tmp_path, 5, 1, copy=True), 1, "group")]
    failed = "the copy in another machine failed: connection closed" if isinstance(answer, Exception) else answer
    assert made.problem == (failed or own)


def test_room_for_exactly_a_snapshot_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    making = Making(monkeypatch, tmp_path)
    tensors = {"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.int64)}
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=64))
    making.made._check_space(tmp_path, tensors)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=63))
    with pytest.raises(OSError, match="63 are free") as caught:
        making.made._check_space(tmp_path, tensors)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert caught.value.strerror == "64 bytes are needed for a rank, 63 are free"


def test_a_snapshot_names_the_checkpoint_that_it_follows_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also after the second and third checkpoint of a run; the manifest is read once for each."""
    making = Making(monkeypatch, tmp_path)
    saved: list[int] = []
    monkeypatch.setattr(writer, "saved_iterations", lambda save: list(saved))
    read: list[str] = []
    monkeypatch.setattr(writer.manifest, "name_of", lambda path: read.append(path.name) or f"manifest of {path.name}")
    found = []
    for iteration, new in ((1, None), (3, 2), (4, None), (9, 8), (10, None), (13, 12)):
        saved += [] if new is None else [new]
        facts = making.made._facts(iteration, {"n": iteration})
        found.append((facts["checkpoint"], facts["manifest"]))
        assert (facts["iteration"], facts["numbers"], facts["contents"]) == (iteration, {"n": iteration}, "of this run")
        assert json.loads(facts["data.json"]) == {"seed": 7}
    names = {step: f"manifest of iter_{step:07d}" for step in (2, 8, 12)}
    assert found == [(0, None), (2, names[2]), (2, names[2]), (8, names[8]), (8, names[8]), (12, names[12])]
    assert read == ["iter_0000002", "iter_0000008", "iter_0000012"]


@pytest.mark.parametrize("fails", [None, "no numbers", KeyError("state"), TypeError("none")])
def test_all_of_a_snapshot_is_put_back(fails: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors while the parameters are up to date, then numbers, and the random states as they were read."""
    making = Making(monkeypatch, tmp_path)
    log = making.log

    def set_numbers(run: Any, numbers: Any) -> None:
        if isinstance(fails, Exception):
            raise fails
        log.append(numbers)

    def restore(path: Path, into: dict[str, torch.Tensor]) -> None:
        log.append((path, list(into)))
        for tensor in into.values():
            tensor.fill_(77)

    monkeypatch.setattr(writer, "folder_of", lambda config: tmp_path)
    header = None if fails == "no numbers" else {"numbers": {"n": 1}}
    monkeypatch.setattr(rank_file, "read_header", lambda path: header)
    monkeypatch.setattr(rank_file, "restore", restore)
    monkeypatch.setattr(rank_state, "set_numbers", set_numbers)
    monkeypatch.setattr(
        rank_state, "set_random_states", lambda run, states: log.append({n: s.tolist() for n, s in states.items()})
    )
    monkeypatch.setattr(rank_state, "random_states", lambda run: {"rng": torch.zeros(2)})
    read = ["gathered", (folder.file_of(tmp_path, 5, 2), ["w", "rng"]), "released"]
    if fails is None:
        writer.restore_snapshot(making.made.run, 5)
        assert log == [*read, {"n": 1}, {"rng": [77.0, 77.0]}]
        return
    with pytest.raises(DataError, match=r"lacks .*; remove the folder to go on from the checkpoint$"):
        writer.restore_snapshot(making.made.run, 5)
    assert log == read


def test_each_byte_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor inside another is left out; one that shares a part, or lies between another's elements, is not."""
    whole, parts, strided = torch.arange(8.0), torch.arange(8.0), torch.arange(8.0)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    tensors = {
        "inside": whole[2:4],
        "bytes": whole.view(torch.uint8)[:16],  # more elements than the whole has, and fewer bytes
        "whole": whole.requires_grad_(),
        "first": parts[:6],
        "second": parts[4:],
        "even": strided[::2],
        "between": strided[1:3],
        "empty": torch.empty(0),
        "freed": freed,
    }
    monkeypatch.setattr(rank_state, "_all", lambda run: iter(tensors.items()))
    found = rank_state.tensors_of(SimpleNamespace())  # pyright: ignore
    assert list(found) == ["whole", "first", "second", "even", "between"]
    assert not any(tensor.requires_grad for tensor in found.values())
    assert all(tensor.data_ptr() == tensors[name].data_ptr() for name, tensor in found.items())


def test_weights_follow_the_masters_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    parts = [SimpleNamespace(updater=SimpleNamespace(refresh=lambda n=n: log.append(n))) for n in (1, 2)]
    monkeypatch.setattr(contents, "optimizer_parts", lambda run: parts)
    monkeypatch.setattr(contents, "set_grad_scaler", lambda run, state: log.append(state))
    monkeypatch.setattr(rank_state.optimizer_state, "set_step_count", lambda of, config, count: log.append(count))
    state = dataclasses.make_dataclass("State", ["iteration", "tokens"])(0, 0)
    run: Any = SimpleNamespace(state=state, config=small_config())
    numbers = {"state": {"iteration": 5, "tokens": 6}, "optimizer_step": 4, "grad_scaler": {"scale": 2.0}}
    rank_state.set_numbers(run, numbers)
    assert (state.iteration, state.tokens) == (5, 6)
    assert log == [1, 2, 4, {"scale": 2.0}]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rank_file.os, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        rank_file.write(tmp_path / "rank", {}, {"a": torch.ones(2)})
    assert os.listdir(tmp_path) == []


def test_tensors_of_any_form_and_none_at_all(tmp_path: Path) -> None:
    """What is not in order in memory is written in order."""
    for tensors in ({}, {"turned": torch.arange(6.0).view(2, 3).t(), "number": torch.tensor(5)}):
        rank_file.write(tmp_path / "rank", {}, tensors)
        into = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        rank_file.restore(tmp_path / "rank", into)
        assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())


def test_short_writes_and_reads_are_gone_on_with() -> None:
    """A call may write or read less than it is given."""
    written = bytearray()

    def write(piece: memoryview) -> int:
        written.extend(piece[:3])
        return len(piece[:3])

    rank_file._write_all(write, b"0123456789")
    assert bytes(written) == b"0123456789"
    content = bytearray(b"0123456789")

    def read(view: memoryview) -> int:
        count = min(3, len(view), len(content))
        view[:count] = content[:count]
        del content[:count]
        return count

    file = SimpleNamespace(readinto=read)
    assert bytes(peers._read_piece(file, 12).tolist()) == b"0123456789\0\0"


def test_only_a_run_that_goes_on_with_all_of_it_takes_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "link").symlink_to("save")
    same = CheckpointConfig(load=str(tmp_path / "save"), save=str(tmp_path / "save"))
    assert agreement._goes_on(same)
    assert agreement._goes_on(dataclasses.replace(same, load=f"{tmp_path}/link/../save/"))
    assert agreement._goes_on(dataclasses.replace(same, load=str(tmp_path / "link")))
    others: list[dict[str, Any]] = [{"load": None}, {"load": str(tmp_path)}, {"ckpt_step": 0}, {"ckpt_step": 5}]
    others += [{"finetune": True}, {"no_load_optim": True}, {"no_load_rng": True}]
    for other in others:
        assert not agreement._goes_on(dataclasses.replace(same, **other)), other


@pytest.mark.parametrize("rank", [0, 1])
def test_the_newest_usable_snapshot_is_taken_and_why_no_newer_one(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 cannot be brought, 6 is damaged, 5 lacks a rank; the first rank says so. Where the run does not go on, nobody
    is asked."""
    seen = {step: {rank: ""} for step in (4, 5, 6, 8)}
    other = {step: {1 - rank: ""} for step in (4, 6, 8)}
    asked: list[Any] = []

    def gather(told: list[Any], own: Any) -> None:
        told[:] = [own, other] if rank == 0 else [other, own]

    distributed = SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: rank, all_gather_object=gather)
    monkeypatch.setattr(agreement.torch, "distributed", distributed)
    monkeypatch.setattr(agreement, "folder_of", lambda config: tmp_path)
    monkeypatch.setattr(agreement, "told_by_the_first_rank", lambda make: make())
    monkeypatch.setattr(agreement, "contents_of", lambda config: "c")
    monkeypatch.setattr(agreement, "_seen", lambda *given, **more: asked.append(more) or seen)
    monkeypatch.setattr(agreement, "_bring", lambda folder, step, held: "no room" if step == 8 else None)
    monkeypatch.setattr(agreement, "_damaged", lambda folder, step: "it is damaged" if step in (6, 8) else None)
    monkeypatch.setattr(agreement, "_resume", lambda folder, step, config: (folder, step))
    monkeypatch.setattr(agreement, "warn", asked.append)
    search: Any = SimpleNamespace(candidates=(Found(tmp_path, 3), Found(tmp_path, 1)))
    monkeypatch.setattr(agreement, "_goes_on", lambda flags: False)
    assert agreement.newest_snapshot(small_config(), search) is None
    assert asked == []
    monkeypatch.setattr(agreement, "_goes_on", lambda flags: True)
    assert agreement.newest_snapshot(small_config(), search) == (tmp_path, 4)
    reasons = {8: "no room", 6: "it is damaged", 5: f"that of rank {1 - rank} is on no machine"}
    said = [f"the snapshot of iteration {step} in {tmp_path} is not used: {why}" for step, why in reasons.items()]
    assert asked == [{"checkpoint": 3, "contents": "c"}, *(said if rank == 0 else [])]


def test_a_failed_move_is_told_also_when_a_later_one_succeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = iter(["the disk is full", None])
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: "group")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(agreement, "send_file", lambda *_: next(answers))
    monkeypatch.setattr(agreement, "_first", lambda problem: problem)
    assert agreement._bring(tmp_path, 4, [{}, {0: "", 1: "", 2: ""}, {}]) == "the disk is full"


def test_where_a_machine_keeps_a_runs_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real path of --save, however it is written."""
    (tmp_path / "save").mkdir()
    (tmp_path / "link").symlink_to("save")
    monkeypatch.chdir(tmp_path)
    name = hashlib.sha256(os.fsencode(os.path.realpath(tmp_path / "save"))).hexdigest()[:16]
    for save in (str(tmp_path / "save"), "save", "link", "./save/"):
        flags = CheckpointConfig(save=save, non_persistent_local_ckpt_dir="/dev/shm/x")
        config = dataclasses.replace(small_config(), checkpoint=flags)
        assert folder.folder_of(config) == Path("/dev/shm/x") / name
    for flags in (CheckpointConfig(save="save"), CheckpointConfig(non_persistent_local_ckpt_dir="/dev/shm/x")):
        assert folder.folder_of(dataclasses.replace(small_config(), checkpoint=flags)) is None


def test_what_must_be_the_same_reads_back_from_a_header() -> None:
    """Every field of the layout but three, the optimizer and the weights' dtype; tuples as the lists of JSON."""
    config = small_config(training={"bf16": True})
    layout = dataclasses.replace(config.layout, cp_comm_type=("p2p", "a2a"))
    config = dataclasses.replace(config, layout=layout)
    found = folder.layout_of(config)
    free = {"distributed_timeout_minutes", "distributed_backend", "elastic"}
    fields = {field.name for field in dataclasses.fields(config.layout)} - free
    assert found.keys() == fields | {"optimizer", "params_dtype"}
    assert found["params_dtype"] == "bfloat16"
    assert found["cp_comm_type"] == ["p2p", "a2a"]
    assert json.loads(json.dumps(found)) == found


def test_the_newest_two_stay_and_later_ones_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster rank of the machine may have begun the next one."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    for step in (2, 4, 6, 8):
        iteration_folder(tmp_path, step).mkdir()
    folder.remove_old(tmp_path, 6)
    assert folder.iterations(tmp_path) == [4, 6, 8]
    monkeypatch.setenv("LOCAL_RANK", "1")
    folder.remove_old(tmp_path, 8)
    folder.remove_later(tmp_path, 4)
    folder.remove_all(tmp_path)
    assert folder.iterations(tmp_path) == [4, 6, 8], "one rank of the machine removes for all"
    monkeypatch.setenv("LOCAL_RANK", "0")
    folder.remove_later(tmp_path, 6)
    assert folder.iterations(tmp_path) == [4, 6]
    folder.remove_all(tmp_path)
    assert not tmp_path.exists()
