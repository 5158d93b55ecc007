"""Snapshots that move between ranks, locks of folders, what Megatron-LM and Hugging Face call the same things: who
sends which file where, and under which name everything arrives."""

import itertools
import json
import os
import queue
import socket
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.huggingface import exporter
from megatron_ext.checkpoint.local import agreement, peers
from megatron_ext.checkpoint.local.folder import file_of, layout_of
from megatron_ext.checkpoint.megatron_lm import state as megatron_lm
from megatron_ext.checkpoint.native import lock
from megatron_ext.errors import ConfigurationError
from tests.support.small_models import small_config

YES_NO = (False, True)


def test_what_lies_on_a_machine_and_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every rank's file by itself: newer than the checkpoint, of this layout, this folder and this course."""
    config = small_config()
    layout = layout_of(config)
    headers: dict[str, Any] = {}
    monkeypatch.setattr(agreement.rank_file, "read_header", lambda path: headers[f"{path.parent.name}/{path.name}"])
    monkeypatch.setattr(agreement.manifest, "name_of", lambda path: f"manifest of {path.name}")
    whole = {"layout": layout, "checkpoint": 9, "contents": "c", "manifest": "manifest of iter_0000009"}
    other = {**layout, "world_size": 77, "pipeline_model_parallel_size": 78}
    wrong = {
        "": whole,
        "it has a file that is not whole": None,
        f"it is of another layout (--world-size 77, now {layout['world_size']}, --pipeline-model-parallel-size 78, now "
        f"{layout['pipeline_model_parallel_size']})": {**whole, "layout": other},
        "it follows on the checkpoint of iteration 11, which --load does not begin with (but with 10)": {
            **whole, "checkpoint": 11
        },
        "it is of a run that was in --save  before it was emptied": {**whole, "contents": "d"},
        "it follows on another checkpoint than iter_0000009, which was saved in its place": {
            **whole, "manifest": "manifest of iter_0000010"
        },
    }  # fmt: skip
    for step in (9, 10, 11, 100):
        for rank, header in enumerate(wrong.values()):
            path = file_of(tmp_path, step, rank)
            path.parent.mkdir(exist_ok=True)
            path.touch()
            headers[f"{path.parent.name}/{path.name}"] = header
    reasons = dict(enumerate(wrong))
    assert agreement._seen(tmp_path, config, checkpoint=10, contents="c") == {11: reasons, 100: reasons}
    for name in layout:
        changed = {**whole, "layout": {**layout, name: "another"}}
        said = f"it is of another layout (--{name.replace('_', '-')} another, now {layout[name]})"
        assert agreement._why_not(changed, layout, 10) == said
    for name in ("layout", "checkpoint"):
        lacking = {key: value for key, value in whole.items() if key != name}
        assert agreement._why_not(lacking, layout, 10) == "it has a file that is not whole"
    assert agreement._why_not({**whole, "checkpoint": True}, layout, 10) == "it has a file that is not whole"


@pytest.mark.parametrize("fails", [None, "the disk is full"])
def test_who_sends_a_file_to_whom(fails: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 has files of 0 and 1, rank 2 its own, rank 3 that of 2: 0 and 3 get theirs, from the first that can."""
    held: list[dict[int, str]] = [{}, {0: "", 1: ""}, {2: "", 3: ""}, {2: "", 3: ""}, {1: "", 0: ""}]
    for rank in range(4):
        path = file_of(tmp_path, 12, rank, copy=rank == 0)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    asked: list[Any] = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: f"group over {backend}")
    monkeypatch.setattr(agreement, "send_file", lambda *given: asked.append(given) or fails)
    monkeypatch.setattr(agreement, "_first", lambda problem: ("first", problem))
    held[3] = {2: ""}
    held[4] = {4: ""}
    for me in range(5):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda me=me: me)
        found = agreement._bring(tmp_path, 12, held)
        sent = {
            0: [(None, file_of(tmp_path, 12, 0), 1, 0, "group over gloo")],
            1: [(file_of(tmp_path, 12, 0, copy=True), None, 1, 0, "group over gloo")],
            2: [(file_of(tmp_path, 12, 3), None, 2, 3, "group over gloo")],
            3: [(None, file_of(tmp_path, 12, 3), 2, 3, "group over gloo")],
        }
        assert asked == sent.get(me, [])
        assert found == ("first", fails if me in sent else None)
        asked.clear()
    assert agreement._bring(tmp_path, 12, [{0: ""}, {1: ""}]) is None


def test_a_good_copy_takes_the_place_of_a_bad_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agreement, "_first", lambda problem: problem)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(agreement.rank_file, "is_intact", lambda path: path.exists() and "good" in path.read_text())
    own, copy = file_of(tmp_path, 12, 3), file_of(tmp_path, 12, 3, copy=True)
    own.parent.mkdir()
    for is_own, is_copy in itertools.product(("good own", "bad own", None), ("good copy", "bad copy", None)):
        for path, content in ((own, is_own), (copy, is_copy)):
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_text(content)
        problem = agreement._damaged(tmp_path, 12)
        if is_own == "good own":
            assert (problem, own.read_text()) == (None, "good own")
        elif is_copy == "good copy":
            assert (problem, own.read_text(), copy.exists()) == (None, "good copy", False)
        else:
            assert problem == f"{own} is damaged"


class Wire:
    """Carries tensors between threads, each of which stands for a rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        self._waiting: dict[tuple[int, ...], queue.Queue[torch.Tensor]] = {
            pair: queue.Queue() for pair in itertools.product(range(4), repeat=2)
        }
        for name, action in (("send", self.send), ("recv", self.receive)):
            monkeypatch.setattr(torch.distributed, name, action)
        monkeypatch.setattr(torch.distributed, "isend", self._later(self.send))
        monkeypatch.setattr(torch.distributed, "irecv", self._later(self.receive))
        monkeypatch.setattr(peers, "_PIECE", 7)

    def send(self, tensor: torch.Tensor, to: int, group: Any) -> None:
        assert group == "gloo"
        self._waiting[self.here.rank, to].put(tensor.clone())

    def receive(self, tensor: torch.Tensor, origin: int, group: Any) -> None:
        assert group == "gloo"
        tensor.copy_(self._waiting[origin, self.here.rank].get(timeout=20))

    @staticmethod
    def _later(action: Any) -> Any:
        # What is sent goes at once, what is received when it is waited for.
        def begin(*given: Any) -> Any:
            if action.__name__ == "send":
                action(*given)
                return SimpleNamespace(wait=lambda: None)
            return SimpleNamespace(wait=lambda: action(*given))

        return begin

    def of_ranks(self, count: int, action: Any) -> dict[int, Any]:
        """Return what the action returns on every rank."""
        found: dict[int, Any] = {}

        def run(rank: int) -> None:
            self.here.rank = rank
            found[rank] = action(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found


@pytest.mark.parametrize("sizes", [(5, 7, 8), (20, 0, 1), (14, 3, 28), (0, 0, 21)])
def test_files_of_unequal_sizes_go_round(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In pieces of 7 bytes. Who has no file sends none, and what stands in its place stays."""
    wire = Wire(monkeypatch)
    contents = [bytes(range(100 * rank % 256, 100 * rank % 256 + size)) for rank, size in enumerate(sizes)]
    for rank, content in enumerate(contents):
        if content:
            (tmp_path / f"own{rank}").write_bytes(content)
        (tmp_path / f"to{rank}").mkdir()
        (tmp_path / f"to{rank}" / "copy").write_text("of before")

    def exchange(rank: int) -> str | None:
        to, origin = (rank + 1) % 3, (rank - 1) % 3
        return peers.exchange(tmp_path / f"own{rank}", to, tmp_path / f"to{rank}" / "copy", origin, "gloo")

    assert wire.of_ranks(3, exchange) == {0: None, 1: None, 2: None}
    for rank in range(3):
        there = contents[(rank - 1) % 3] or b"of before"
        assert (tmp_path / f"to{rank}" / "copy").read_bytes() == there
        assert os.listdir(tmp_path / f"to{rank}") == ["copy"]


def test_what_cannot_be_written_is_received_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wire = Wire(monkeypatch)
    (tmp_path / "own0").write_bytes(b"0" * 20)
    (tmp_path / "own1").write_bytes(b"1" * 9)
    (tmp_path / "file").touch()
    targets = (tmp_path / "file" / "copy", tmp_path / "new" / "copy")
    found = wire.of_ranks(
        2, lambda rank: peers.exchange(tmp_path / f"own{rank}", 1 - rank, targets[rank], 1 - rank, "gloo")
    )
    assert found == {0: f"File exists: {tmp_path / 'file'}", 1: None}
    assert targets[1].read_bytes() == b"0" * 20
    # One that is sent alone, before a run goes on from it: the sender is not left waiting, nor does the receiver end.
    found = wire.of_ranks(
        2, lambda rank: peers.send_file(*((tmp_path / "own1", None) if rank else (None, targets[0])), 1, 0, "gloo")
    )
    assert found == {0: f"File exists: {tmp_path / 'file'}", 1: None}
    targets[1].unlink()
    targets[1].mkdir()
    found = wire.of_ranks(
        2, lambda rank: peers.send_file(*((None, targets[1]) if rank else (tmp_path / "own0", None)), 0, 1, "gloo")
    )
    assert found == {0: None, 1: f"Is a directory: {targets[1]}.partial"}


@pytest.mark.parametrize("size", [0, 6, 7, 8, 30])
def test_a_file_is_sent_as_it_is(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wire, source, target = Wire(monkeypatch), tmp_path / "source", tmp_path / "new" / "target"
    source.write_bytes(bytes(range(size)))

    def send(rank: int) -> str | None:
        here = (source, None) if rank == 2 else (None, target)
        return None if rank == 1 else peers.send_file(*here, 2, 0, "gloo")

    assert wire.of_ranks(3, send) == {0: None, 1: None, 2: None}
    assert target.read_bytes() == bytes(range(size))
    assert os.listdir(target.parent) == ["target"]


@pytest.fixture
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Locks of a test end with it."""
    for name, empty in (("_open", []), ("_held", {}), ("_contents", {})):
        monkeypatch.setattr(lock, name, empty)
    monkeypatch.setattr(lock, "_now", lambda: "2026-01-02T03:04:05+00:00")
    yield
    for file in lock._open:
        file.close()


@pytest.mark.usefixtures("_no_locks")
@pytest.mark.parametrize(("attempt", "file", "earlier"), itertools.product((0, 1), YES_NO, (None, "name", "damaged")))
def test_a_folder_keeps_its_name_until_it_is_emptied(
    attempt: int, file: bool, earlier: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What begins with a dot is no content; and a folder whose name begins alike is another one."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    save = tmp_path / "save"
    save.mkdir()
    (save / ".hidden").touch()
    if file:
        (save / "iter_0000001").mkdir()
    if earlier is not None:
        (save / ".lock").write_text('{"contents": "as before"}\n' if earlier == "name" else '{"contents"')
    lock.hold_until_exit(save)
    name = lock.name_of_contents(str(save))
    assert (name == "as before") == (earlier == "name" and (file or attempt > 0))
    assert json.loads((save / ".lock").read_text()) == {
        "host": socket.gethostname(), "pid": os.getpid(), "since": "2026-01-02T03:04:05+00:00", "contents": name
    }  # fmt: skip
    assert lock.name_of_contents(tmp_path / "save2") is None
    lock.hold_until_exit(tmp_path / "save2")
    assert lock.name_of_contents(tmp_path / "save2") not in (None, name)
    (tmp_path / "link").symlink_to(save)
    assert lock.name_of_contents(tmp_path / "link") == name


@pytest.mark.usefixtures("_no_locks")
def test_who_holds_a_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(lock, "warn", said.append)

    def refuse(number: int) -> Any:
        def lockf(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        return SimpleNamespace(lockf=lockf, LOCK_EX=0, LOCK_NB=0)

    holder = '{"host": "node3", "pid": 77, "since": "then", "contents": "x"}'
    starting = "one that is just starting"
    for content, who in ((holder, "process 77 on node3, since then"), ("", starting), ("{", starting)):
        (tmp_path / ".lock").write_text(content)
        for number in lock._TAKEN:
            monkeypatch.setattr(lock, "fcntl", refuse(number))
            with pytest.raises(ConfigurationError) as caught:
                lock.hold_until_exit(tmp_path)
            assert str(caught.value) == (
                f"--save {tmp_path} is in use by another job: {who}; give another folder with --save, or end that job "
                "first (its lock ends with it)"
            )
            assert lock.is_held(tmp_path)
            assert (tmp_path / ".lock").read_text() == content
    monkeypatch.setattr(lock, "fcntl", refuse(95))
    lock.hold_until_exit(tmp_path)
    assert said == [f"{tmp_path} cannot be locked (Operation not supported): start no second job there"]
    assert not lock.is_held(tmp_path)
    assert not lock.is_held(tmp_path / "none")


@pytest.mark.usefixtures("_no_locks")
@pytest.mark.parametrize("lost", [None, "lock", "folder", "another's"])
def test_a_folder_that_was_removed_is_locked_again(
    lost: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(lock, "warn", said.append)
    save = tmp_path / "save"
    lock.hold_again(save)
    assert not save.exists(), "it was never locked"
    lock.hold_until_exit(save)
    before = lock.name_of_contents(save)
    if lost:
        (save / ".lock").rename(tmp_path / "lost")
    if lost == "folder":
        save.rmdir()
    if lost == "another's":
        (save / ".lock").touch()
    lock.hold_again(save)
    assert (lock.name_of_contents(save) == before) == (lost is None)
    text = f"--save {save} or its .lock was removed while this job is at work there: earlier files may be gone"
    assert said == ([text] if lost else [])
    assert (save / ".lock").exists()
    lock.hold_again(save)
    assert len(said) == (1 if lost else 0)


def test_megatron_lms_numbers_become_ours() -> None:
    """No two of them are equal, and what is missing has its own stand-in."""
    for consumed, scheduler, optimizer in itertools.product(YES_NO, YES_NO, (None, "one", "several", "none")):
        args = Namespace(seq_length=16, **({"consumed_train_samples": 40} if consumed else {}))
        common: dict[str, Any] = {"args": args, "iteration": 9}
        if scheduler:
            common["opt_param_scheduler"] = {"num_steps": 24}
        scaler = {"scale": torch.tensor([8.0]), "growth_tracker": 3}
        kinds = {
            "one": {"optimizer": {"state": {"common_step": 6}}, "grad_scaler": scaler},
            "several": [{"param_groups": [{"step": 5}, {"step": torch.tensor(6)}], "grad_scaler": scaler}, {"step": 4}],
            "none": {},
        }
        if optimizer:
            common["optimizer"] = kinds[optimizer]
        read = 40 if consumed else 0
        expected: dict[str, Any] = {
            "iteration": 9,
            "train_state": {
                "iteration": 9,
                "consumed_samples": read,
                "consumed_tokens": 16 * read,
                "scheduled_samples": 24 if scheduler else read,
            },
        }
        if optimizer:
            empty = optimizer == "none"
            expected["optimizer_step"] = 0 if empty else 6
            expected["grad_scaler"] = {} if empty else {"scale": 8.0, "growth_tracker": 3, "of_mean": True}
        assert megatron_lm.as_ours(common) == expected
    for kinds, readable in (
        ((), True), (("fully_reshardable",), True), (("dp_reshardable",), False),
        (("fully_reshardable", "fully_sharded_model_space"), False),
    ):  # fmt: skip
        optimizer = [{"param_state": {"param_state_sharding_type": kind}} for kind in kinds]
        assert megatron_lm.optimizer_is_readable({"optimizer": optimizer}) == readable
    assert megatron_lm.optimizer_is_readable({})


@pytest.mark.parametrize("eod", [None, 256])
def test_what_ends_a_text_is_in_both_files_of_an_export(
    eod: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Zero is an id; an id that the tokenizer's folder names stays, and so does everything else of its file."""
    monkeypatch.setattr(exporter, "hf_config", lambda *given: {"of": [*given]})
    monkeypatch.setattr(exporter, "_model_card", lambda *given: str(given))
    source: Any = SimpleNamespace(config="config")
    tokenizer: Any = None if eod is None else SimpleNamespace(eod=eod)
    for number, generation in enumerate(
        (None, {}, {"eos_token_id": None}, {"eos_token_id": 0}, {"eos_token_id": [7, 8], "bos_token_id": 0, "top_k": 5},
         {"bos_token_id": 3, "top_k": 5}, {"bos_token_id": 3, "eos_token_id": None})
    ):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "generation_config.json"
        if generation is not None:
            path.write_text(json.dumps(generation))
        exporter._write_companions(folder, source, "family", "BF16", tokenizer)  # pyright: ignore
        expected = dict(generation or {})
        if expected.get("eos_token_id") is None:
            expected["eos_token_id"] = eod
            expected.setdefault("bos_token_id", None)
        assert json.loads(path.read_text()) == expected
        assert json.loads((folder / "config.json").read_text()) == {
            "of": ["config", "family", "bfloat16"],
            "bos_token_id": expected.get("bos_token_id"),
            "eos_token_id": expected["eos_token_id"],
        }
        assert (folder / "README.md").read_text() == str((source, "family", "BF16"))
