"""Folders of checkpoints of every shape, against rules that are written here once more: what counts as a checkpoint,
which one is taken, which may go, and what of a manifest is said."""

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.local import folder as snapshots
from megatron_ext.checkpoint.native import agreement, extra_files, manifest, resume, retention
from megatron_ext.checkpoint.native import folder as places
from megatron_ext.checkpoint.native.folder import TRACKER, Found, find_all, find_to_load, iteration_folder
from megatron_ext.checkpoint.native.resume import Resume, Search
from megatron_ext.errors import DataError, StorageError

# Numbers whose names begin alike, whose order as text is another one, and the first that needs eight digits.
STEPS = (0, 1, 10, 200000, 10000000)
# None of these is a checkpoint of ours, whatever lies in it.
OTHERS = ("iter_00000003", "iter_3", "iter_0000010.old", ".iter_0000020.partial", "xiter_0000030", "iter_0000040x")


def _subsets(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(values) + 1):
        yield from itertools.combinations(values, size)


def _fill(path: Path, *names: str) -> None:
    path.mkdir(parents=True)
    for name in names:
        (path / name).touch()


def _half_ones(folder: Path) -> None:
    """Make what looks like a checkpoint and is none."""
    for name in OTHERS:
        _fill(folder / name, ".metadata", "metadata.json")
    _fill(folder / "iter_0000050", ".metadata")
    _fill(folder / "iter_0000060", "metadata.json")
    _fill(folder / "iter_0000070", "mp_rank_00")
    (folder / "iter_0000080").touch()


def _expected(whole: tuple[int, ...], said: str | None, *, release: bool) -> list[int] | str:
    """Return which iterations are tried in which order, or the beginning of what is warned of before the newest."""
    newest_first = sorted(whole, reverse=True)
    if said == "release" and release:
        return [0]
    if said is not None and said.strip().isdigit() and int(said) in whole:
        return [int(said), *(step for step in newest_first if step != int(said))]
    if said is None:
        return "is missing" if whole else []
    if not said.strip().isdigit():
        return f"holds {said.strip()!r} instead of an iteration"
    return f"names iteration {said.strip()}, which is missing or not whole" + (
        " (it is in Megatron-LM's legacy format: a free pickle, which is not read)" if int(said) == 70 else ""
    )


@pytest.mark.parametrize("release", [False, True])
def test_which_checkpoints_are_tried_in_which_order(release: bool, tmp_path: Path) -> None:
    trackers = (None, "", "0", "1", "10\n", "2", "20", "50", "70", "200000", "10000000", "release", "iter_0000001")
    for number, whole in enumerate(one for one in _subsets(STEPS) if len(one) in (0, 1, 2, 5)):
        folder = tmp_path / str(number)
        _half_ones(folder)
        for step in whole:
            _fill(iteration_folder(folder, step), ".metadata", "metadata.json")
        if release:
            _fill(folder / "release", ".metadata", "metadata.json")
        assert places.saved_iterations(folder) == sorted(whole)
        for said in trackers:
            if said is not None:
                (folder / TRACKER).write_text(said)
            expected = _expected(whole, said, release=release)
            if isinstance(expected, str) and not whole:
                with pytest.raises(DataError) as caught:
                    find_all(folder)
                assert str(caught.value) == (
                    f"{folder / TRACKER} {expected}, and there is no whole checkpoint in {folder}. Give the right "
                    "folder with --load, or remove the file to start afresh."
                )
                continue
            found = find_all(folder)
            warning = None
            if isinstance(expected, str):
                newest = iteration_folder(folder, max(whole))
                warning = f"{folder / TRACKER} {expected}; using the newest whole checkpoint, {newest}"
                expected = sorted(whole, reverse=True)
            if said == "release" and release:
                assert found == [Found(folder / "release", 0)]
                continue
            assert found == [
                Found(iteration_folder(folder, step), step, None if place else warning)
                for place, step in enumerate(expected)
            ]
            assert places.find_latest(folder) == (found[0] if found else None)


def test_a_link_to_a_checkpoint_is_that_checkpoint(tmp_path: Path) -> None:
    path = iteration_folder(tmp_path / "saved", 7)
    _fill(path, ".metadata", "metadata.json")
    (tmp_path / "best").symlink_to(path)
    assert find_to_load(tmp_path / "best") == [Found(path, 7)]
    assert places.load_problem(str(tmp_path / "best"), None) is None


def test_the_step_that_is_asked_for_is_the_only_one(tmp_path: Path) -> None:
    """Zero is a step, and so is one that begins as another does."""
    _half_ones(tmp_path)
    for step in STEPS:
        _fill(iteration_folder(tmp_path, step), ".metadata", "metadata.json")
    (tmp_path / TRACKER).write_text("10")
    for step in (*STEPS, 2, 3, 20, 50, 60, 70, 80):
        path = iteration_folder(tmp_path, step)
        for load, asked in ((tmp_path, step), (path, None), (path, step)):
            if step in STEPS:
                assert find_to_load(load, asked) == [Found(path, step)], (load, asked)
                continue
            with pytest.raises(DataError) as caught:
                find_to_load(load, asked)
            assert str(caught.value) == (
                f"{path} is missing or not whole; the whole checkpoints in {tmp_path} are those of: "
                "0, 1, 10, 200000, 10000000."
            )
    assert [found.iteration for found in find_to_load(tmp_path)] == [10, 10000000, 200000, 1, 0]
    for step, other in itertools.product(STEPS, repeat=2):
        named = str(iteration_folder(tmp_path, step))
        said = f"--load {named} names one checkpoint and --ckpt-step {other} another; leave --ckpt-step out"
        assert places.load_problem(named, other) == (None if step == other else said)
        assert places.load_problem(named, None) is places.load_problem(str(tmp_path), other) is None


def test_which_checkpoints_may_go_of_all_that_there_could_be() -> None:
    steps = (0, 1, 9, 10, 11, 100)
    for saved, newest, keep_last, interval in itertools.product(
        _subsets(steps), steps, (None, 1, 2, 9), (None, 1, 10, 100)
    ):
        gone = []
        for step in saved:
            later = [other for other in saved if step < other <= newest]
            kept = len(later) < (keep_last if keep_last is not None else 1)
            if interval is not None and step in range(0, 1000, interval):
                kept = True
            if step <= newest and not kept and (keep_last, interval) != (None, None):
                gone.append(step)
        mixed = sorted(saved, key=str, reverse=True)
        assert retention.expired(mixed, newest, keep_last, interval) == gone, (saved, newest, keep_last, interval)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("problems", [[], None, ["__0_0.distcp is missing", "b is missing"]])
def test_what_is_left_of_a_folder(
    rank: int, problems: list[str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first rank decides and removes; all of them read the newest back; what cannot be removed is named."""
    _half_ones(tmp_path)
    for step in (1, 10, 100, 1000):
        _fill(iteration_folder(tmp_path, step), ".metadata", "metadata.json")
    (tmp_path / "elsewhere").mkdir()
    for name in (".metadata", "metadata.json"):
        (tmp_path / "elsewhere" / name).touch()
    iteration_folder(tmp_path, 2).symlink_to(tmp_path / "elsewhere")
    told: list[Any] = []
    read: list[Path] = []
    said: list[str] = []

    def tell(answer: list[Any], src: int) -> None:
        told.append((list(answer), src))
        answer[:] = [[1, 10]]

    def remove(folder: Path, step: int) -> None:
        if step == 1:
            raise OSError(13, "Permission denied")
        places.remove(folder, step)

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", tell)
    monkeypatch.setattr(retention, "damage", lambda path: read.append(path) or problems)
    monkeypatch.setattr(retention, "warn", said.append)
    monkeypatch.setattr(retention, "remove", remove)
    flags = SimpleNamespace(keep_last_checkpoints=1, save_retain_interval=None)
    run: Any = SimpleNamespace(rank=rank, config=SimpleNamespace(checkpoint=flags))
    before = sorted(os.listdir(tmp_path))
    retention.remove_expired(run, tmp_path, 100)
    newest = iteration_folder(tmp_path, 100)
    assert told == [([[1, 10] if rank == 0 else []], 0)]
    assert read == [newest]
    goes = rank == 0 and problems == []
    assert sorted(os.listdir(tmp_path)) == [name for name in before if not (goes and name == "iter_0000010")]
    text = "no manifest" if problems is None else ", ".join(problems)
    if rank == 1:
        assert said == []
    elif goes:
        assert said == [f"{iteration_folder(tmp_path, 1)} cannot be removed: Permission denied"]
    else:
        assert said == [f"{newest} is not whole ({text}): earlier checkpoints are kept. Check the disk"]


# Files of a checkpoint whose names begin alike, in folders too, and all of one size.
FILES = ("__0_0.distcp", "__0_1.distcp", "__10_0.distcp", "config.yaml", "config.yaml.old", "data.json", "data.json2")
FILES += ("tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer.json", "tokenizers/vocab.json", "versions.json")
OF_THE_FLAGS = ("config.yaml", "data.json", "tokenizer/vocab.json", "tokenizer/merges.txt")


def _with_manifest(path: Path) -> manifest.Files:
    for number, name in enumerate(FILES):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(bytes([number] * 9))
    manifest.write(path, manifest.describe(path, manifest.all_files(path)))
    files = manifest.read(path)
    assert files is not None
    assert sorted(files) == sorted(FILES)
    assert list(files.values()) == [{"bytes": 9, "crc32": manifest.checksum(path / name)} for name in files]
    return files


@pytest.mark.parametrize("name", FILES)
def test_damage_of_every_file_is_said_of_it_alone(name: str, tmp_path: Path) -> None:
    """And flags are taken from a checkpoint unless one of the files that they follow from is damaged."""
    files = _with_manifest(tmp_path)
    path, content = tmp_path / name, (tmp_path / name).read_bytes()
    assert manifest.problems(tmp_path, files) == []
    assert resume._flags_are_intact(tmp_path)
    for now, said in (
        (content[:-1], "has 8 bytes instead of 9"),
        (content + b"x", "has 10 bytes instead of 9"),
        (content[:-1] + b"x", f"has another checksum than {files[name]['crc32']}"),
        (b"x" + content[1:], f"has another checksum than {files[name]['crc32']}"),
        (b"", "has 0 bytes instead of 9"),
    ):
        path.write_bytes(now)
        assert manifest.problems(tmp_path, files) == [f"{name} {said}"]
        assert resume._flags_are_intact(tmp_path) == (name not in OF_THE_FLAGS)
    path.unlink()
    assert manifest.problems(tmp_path, files) == [f"{name} is missing"]
    assert resume._flags_are_intact(tmp_path) == (name not in OF_THE_FLAGS)


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    _with_manifest(tmp_path)
    path, before = tmp_path / manifest.MANIFEST, manifest.name_of(tmp_path)
    content = path.read_bytes()
    assert before == hashlib.sha256(content).hexdigest()[:16], "as snapshots have noted it since"
    for place in range(0, len(content), 11):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert manifest.name_of(tmp_path) != before
        assert not resume._flags_are_intact(tmp_path)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            manifest.read(tmp_path)
    path.unlink()
    assert manifest.name_of(tmp_path) is None
    assert manifest.read(tmp_path) is None
    assert resume._flags_are_intact(tmp_path), "Megatron-LM writes none"


@pytest.mark.parametrize("step", [None, 0, 7])
@pytest.mark.parametrize("no_fallback", [False, True])
@pytest.mark.parametrize("use_checkpoint_args", [False, True])
def test_what_is_typed_reaches_the_look_into_a_folder(
    step: int | None, no_fallback: bool, use_checkpoint_args: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (Found(Path("first"), 3, "its warning"), Found(Path("second"), 2))
    asked: list[Any] = []
    monkeypatch.setattr(resume, "find_to_load", lambda *words: asked.append(words) or list(found))
    monkeypatch.setattr(resume, "_flags_are_intact", lambda path: path.name == "second")
    monkeypatch.setattr(resume, "read_resume", lambda *words, **named: (*words, named))
    values = {"load": "here", "save": "there", "no_fallback": no_fallback, "use_checkpoint_args": use_checkpoint_args}
    expected = (found[0] if no_fallback else found[1], {"use_checkpoint_args": use_checkpoint_args})
    assert resume.look({**values, "ckpt_step": step}) == Search("here", found, None, expected)  # pyright: ignore
    assert asked == [("here", step)]
    assert resume.look({**values, "load": None}) is None


def test_all_that_a_run_takes_from_a_checkpoint_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megatron_ext.checkpoint.megatron_lm import arguments

    monkeypatch.setattr(resume, "read_saved", lambda path: {"saved": str(path)})
    monkeypatch.setattr("megatron_ext.data.record.read_record", lambda path: {"record": str(path)})
    monkeypatch.setattr(arguments, "read_args", lambda path: SimpleNamespace(of=path))
    monkeypatch.setattr(arguments, "saved_model", lambda args: {"args": str(args.of)})
    found, data = Found(tmp_path, 7, "a warning"), {"record": str(tmp_path / "data.json")}
    for there, asked, saved in (
        (False, False, None),
        (False, True, {"args": str(tmp_path)}),
        (True, False, {"saved": str(tmp_path / "config.yaml")}),
        (True, True, {"saved": str(tmp_path / "config.yaml")}),
    ):
        if there:
            (tmp_path / "config.yaml").touch()
        made = resume.read_resume(found, use_checkpoint_args=asked, damaged=["one", "two"])
        assert made == Resume(tmp_path, 7, "a warning", saved, data, ("one", "two"), is_snapshot=False)
    same = Resume(tmp_path, 8, None, {"a": 1}, None, ("x",))
    assert same.gives_the_flags_of(Resume(tmp_path, 7, "a warning", {"a": 1}))
    assert not same.gives_the_flags_of(None)
    assert not same.gives_the_flags_of(Resume(tmp_path, 8, None, {"a": 2}))
    assert not same.gives_the_flags_of(Resume(tmp_path / "x", 8, None, {"a": 1}))


WHOLE: list[str] = []


@pytest.mark.parametrize("no_fallback", [False, True])
def test_the_first_whole_one_is_gone_on_from(no_fallback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every three of: whole, without a manifest, damaged."""
    said: list[str] = []
    monkeypatch.setattr(agreement, "_warn", said.append)
    monkeypatch.setattr(agreement, "told_by_the_first_rank", lambda make: make())
    flags: Any = SimpleNamespace(no_fallback=no_fallback, use_checkpoint_args="its flag")
    monkeypatch.setattr(agreement, "read_resume", lambda found, **named: (found, named))
    states = (WHOLE, None, [f"f{number} is missing" for number in range(7)])
    found = tuple(Found(Path(f"iter_{step}"), step, f"warning {step}" if step != 2 else None) for step in (3, 2, 1))
    for kinds in itertools.product(states, repeat=3):
        of_path = dict(zip([one.path for one in found], kinds, strict=True))
        monkeypatch.setattr(agreement, "damage", lambda path, of_path=of_path: of_path[path])
        bad = [f"the checkpoint {one.path} is damaged (f0 is missing, f1 is missing, f2 is missing, f3 is missing, "
               "f4 is missing)" for one in found]  # fmt: skip
        good = next((place for place, kind in enumerate(kinds) if not kind), None)
        said.clear()
        if good is None or (no_fallback and good):
            expected = f"{bad[0]}; leave --no-fallback out to use another: 2, 1."
            if not no_fallback:
                expected = f"{'; '.join(bad)}; there is no whole checkpoint in here. Give another folder with --load."
            with pytest.raises(DataError) as caught:
                agreement.agree(Search("here", found), flags)
            assert str(caught.value) == expected
            continue
        chosen: Any = agreement.agree(Search("here", found), flags)
        assert chosen == (found[good], {"use_checkpoint_args": "its flag", "damaged": bad[:good]})
        assert said == [
            *[one.warning for one in found[: good + 1] if one.warning],
            *([f"iter_{3 - good} has no manifest: whether it is damaged is not known"] if kinds[good] is None else []),
            *([f"{'; '.join(bad[:good])}; using the next whole checkpoint, iter_{3 - good}"] if good else []),
        ]
    assert agreement.agree(Search("here"), flags) is None
    with pytest.raises(DataError, match=r"^none there$"):
        agreement.agree(Search("here", found, DataError("none there")), flags)
    with pytest.raises(StorageError) as denied:
        agreement.agree(Search("here", found, PermissionError(13, "Permission denied")), flags)
    assert str(denied.value) == "--load here: Permission denied. Fix the folder, or give another one."


def test_files_of_every_kind_of_tokenizer(tmp_path: Path) -> None:
    """What is kept in a checkpoint is found there by the flag that named it."""
    flags = {"tokenizer_model": "model", "vocab_file": "vocab", "merge_file": "merges"}
    names = {
        "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
        "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
        "TikTokenizer": {"tokenizer_model": "tiktoken.json"},
        "HuggingFaceTokenizer": {"tokenizer_model": ""},
        "NullTokenizer": {},
        None: {},
    }
    for kind, kept in names.items():
        checkpoint = tmp_path / f"of {kind}"
        data: Any = SimpleNamespace(tokenizer_type=kind, **{flag: str(tmp_path / flags[flag]) for flag in flags})
        if kind == "HuggingFaceTokenizer":
            data.tokenizer_model = str(checkpoint / "tokenizer")
            expected = {"tokenizer.json": checkpoint / "tokenizer" / "tokenizer.json"}
        else:
            expected = {name: tmp_path / flags[flag] for flag, name in kept.items()}
        assert extra_files.tokenizer_files(data) == expected
        assert extra_files.kept_tokenizer({"tokenizer_type": kind}, checkpoint) == {}
        _fill(
            checkpoint / "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.json"
        )
        assert extra_files.kept_tokenizer({"tokenizer_type": kind}, checkpoint) == {
            flag: str(checkpoint / "tokenizer" / name) for flag, name in kept.items()
        }


def test_snapshots_of_every_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By number, by the ranks of this machine and of others; the first rank of a machine removes for all."""
    for local, newest in itertools.product((0, 1), (0, 1, 10, 5, 200000, 10000000)):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        folder = tmp_path / f"{local} {newest}"
        for step in STEPS:
            _fill(iteration_folder(folder, step))
        for name in ("iter_3", "iter_0000003x", "xiter_0000003", ".iter_0000004.partial"):
            (folder / name).mkdir()
        assert snapshots.iterations(folder) == sorted(STEPS)
        snapshots.remove_later(folder, newest)
        left = [step for step in STEPS if step <= newest or local]
        assert snapshots.iterations(folder) == left
        snapshots.remove_old(folder, newest)
        old = [step for step in left if step <= newest]
        assert snapshots.iterations(folder) == (left if local else old[max(0, len(old) - snapshots.KEPT) :])
        snapshots.remove_all(folder)
        assert folder.exists() == (local == 1)
    assert snapshots.iterations(tmp_path / "none") == []
    there = iteration_folder(tmp_path, 10)
    names = ("rank_00001", "rank_00010", "rank_00010.copy", "rank_00002.copy", "rank_100000")
    _fill(there, *names, "rank_1", "rank_00003.partial", "rank_00004.copy.partial", "xrank_00005")
    found = {rank: path.name for rank, path in snapshots.ranks_at(tmp_path, 10).items()}
    assert found == {1: "rank_00001", 2: "rank_00002.copy", 10: "rank_00010", 100000: "rank_100000"}
    assert {snapshots.file_of(tmp_path, 10, rank, copy=rank == 2).name for rank in found} == set(found.values())
    assert snapshots.ranks_at(tmp_path, 1) == {}
