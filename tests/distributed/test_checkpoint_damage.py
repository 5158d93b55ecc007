"""A checkpoint with a single wrong byte is refused, with the file named, and the one before it is used.

Bytes flipped at random, truncated and missing shards: none is ever loaded. Nor is anything run that a stranger wrote
into one: what else a pickle may try is in tests/unit/untrusted/test_inert_pickle.py.
"""

import contextlib
import io
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_ext.checkpoint.dtypes import DTYPES
from megatron_ext.checkpoint.native import checkpoint_manifest, checkpoint_state_dict, torch_dist
from megatron_ext.checkpoint.native.extra_files import VERSIONS
from megatron_ext.checkpoint.native.safe_reading import SafeReader
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.forkserver.ranks import RankError, run_ranks
from tests.support.checkpoints import FLAGS, build, flip, load, save_at
from tests.support.program import run_program
from tests.support.several_models import in_turn


def _damage(checkpoint: Path, kind: str) -> str:
    """Damage a file of the checkpoint; returns its name."""
    name, _, what = kind.partition(" ")
    path = checkpoint / name
    match what:
        case "flipped":
            flip(path)
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
    return name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1 and 2, by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_at, str(folder), [1, 2], FLAGS)
    return folder


def _load_and_listen(folder: str) -> tuple[int | None, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        iteration, _ = load(folder, FLAGS)
    return iteration, said.getvalue()


DAMAGES = [
    "__0_0.distcp flipped",
    "__1_0.distcp truncated",
    "__0_0.distcp empty",
    "__1_0.distcp missing",
    ".metadata flipped",
    "metadata.json flipped",
    "config.yaml flipped",
    "manifest.json flipped",
    "manifest.json missing",
]


@pytest.fixture(scope="module")
def loaded(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str, Any]]:
    """By damage: the folder with it, the file that has it, and what two ranks loaded from there and said."""
    folders = [Path(shutil.copytree(saved, tmp_path_factory.mktemp("damaged") / "copy")) for _ in DAMAGES]
    names = [_damage(folder / "iter_0000002", kind) for folder, kind in zip(folders, DAMAGES, strict=True)]
    by_rank = run_ranks(2, in_turn, _load_and_listen, list(map(str, folders)))
    return dict(zip(DAMAGES, zip(folders, names, zip(*by_rank, strict=True), strict=True), strict=True))


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_one_before_is_used(kind: str, loaded: dict[str, tuple[Path, str, Any]]) -> None:
    folder, name, [(iteration, said), other] = loaded[kind]
    assert (iteration, other) == (1, (1, ""))
    assert f"{folder}/iter_0000002 is damaged ({name} " in said
    assert f"using the next whole checkpoint, {folder}/iter_0000001" in said


def test_no_fallback_refuses_and_names_the_other(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    name = _damage(folder / "iter_0000002", "__0_0.distcp flipped")
    with pytest.raises(RankError, match=rf"DataError: .*iter_0000002 is damaged \({name} .*--no-fallback out .*: 1\."):
        run_ranks(2, load, str(folder), [*FLAGS, "--no-fallback"])


def test_nothing_whole_is_left(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    for iteration in (1, 2):
        _damage(folder / f"iter_000000{iteration}", "__0_0.distcp flipped")
    with pytest.raises(RankError, match=r"DataError: .*iter_0000002 is damaged.*iter_0000001 is damaged"):
        run_ranks(1, load, str(folder), FLAGS)


def test_one_that_another_program_wrote_without_a_manifest_is_loaded_with_a_warning(
    saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    for name in (checkpoint_manifest.MANIFEST, VERSIONS):
        (folder / "iter_0000002" / name).unlink()
    [(iteration, said)] = run_ranks(1, _load_and_listen, str(folder))
    assert iteration == 2
    assert "has no manifest" in said


def test_folders_that_changed_their_names_are_told_from_the_state_in_them(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    for was, now in ((1, 2), (2, 1)):
        shutil.copytree(saved / f"iter_000000{was}", folder / f"iter_000000{now}")
    [(iteration, said)] = run_ranks(1, _load_and_listen, str(folder))
    assert iteration == 1
    assert f"{folder}/iter_0000002 holds the state of iteration 1: folders were renamed or swapped" in said
    asked = (
        rf"DataError: --ckpt-step 1: {folder}/iter_0000001 holds the state of iteration 2.* Rename it to iter_0000002"
    )
    with pytest.raises(RankError, match=asked):
        run_ranks(1, load, str(folder), [*FLAGS, "--load", str(folder), "--ckpt-step", "1"])
    go_on = [*FLAGS, "--load", str(folder), "--save", str(tmp_path / "save"), "--exit-interval", "2"]
    [ended] = run_ranks(1, run_program, go_on)
    assert "checkpoint: resuming at iteration 1 of" in ended.output
    assert (tmp_path / "save/iter_0000002").exists()


@pytest.mark.full
def test_200_flipped_bits(saved: Path) -> None:
    """Anywhere in any file, chosen by size. Each is found by what `load_checkpoint` asks before it reads anything."""
    checkpoint = saved / "iter_0000002"
    files = checkpoint_manifest.read(checkpoint)
    assert files is not None
    paths = sorted(checkpoint.iterdir())
    assert {path.name for path in paths} == {*files, checkpoint_manifest.MANIFEST}
    chance = random.Random(0)
    for path in chance.choices(paths, [path.stat().st_size for path in paths], k=200):
        offset, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        flip(path, offset, bit)
        if path.name == checkpoint_manifest.MANIFEST:
            with pytest.raises(ValueError, match=checkpoint_manifest.MANIFEST):
                checkpoint_manifest.read(checkpoint)
        else:
            [problem] = checkpoint_manifest.problems(checkpoint, files)
            assert problem.startswith(f"{path.name} has another checksum")
        flip(path, offset, bit)
    assert checkpoint_manifest.problems(checkpoint, files) == []


def _bytes_read_by_a_save(folder: str) -> int:
    """Of the second one: the first still imports modules."""

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar: asked for, from the disk or the page cache

    run = build([*FLAGS, "--hidden-size", "128"])
    save_checkpoint(run, folder)
    run.state.iteration = 1
    before = read()
    save_checkpoint(run, folder)
    return read() - before


def test_checksums_are_taken_while_writing(tmp_path: Path) -> None:
    [read] = run_ranks(1, _bytes_read_by_a_save, str(tmp_path))
    shards = list((tmp_path / "iter_0000001").glob("*.distcp"))
    assert read < sum(shard.stat().st_size for shard in shards) / 10
    files = checkpoint_manifest.read(tmp_path / "iter_0000001")
    assert files is not None
    assert files == checkpoint_manifest.describe(
        tmp_path / "iter_0000001", [tmp_path / "iter_0000001" / name for name in files]
    )


class _Canary:
    """Unpickled freely, it makes a folder."""

    def __init__(self, folder: str):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def _save_with_canary(folder: str, canary: str) -> None:
    """Save; the state of the random generators is the canary."""
    genuine = checkpoint_state_dict._rng_state

    def planted(run: Any) -> Any:
        entry = genuine(run)
        entry.data = _Canary(canary)
        return entry

    checkpoint_state_dict._rng_state = planted
    save_at(folder, [1], FLAGS)


def _lay(folder: Path, place: str, canary: Path) -> None:
    if place == "generators":
        run_ranks(1, _save_with_canary, str(folder), str(canary))
        return
    run_ranks(1, save_at, str(folder), [1], FLAGS)
    checkpoint = folder / "iter_0000001"
    for name in ("manifest.json", "versions.json"):  # a stranger would write what agrees
        (checkpoint / name).unlink(missing_ok=True)
    if place == "common.pt":
        torch.save({"state": _Canary(str(canary))}, checkpoint / "common.pt")
    else:
        (checkpoint / ".metadata").write_bytes(pickle.dumps(_Canary(str(canary))))


@pytest.mark.parametrize(
    ("place", "refusal"),
    [
        (".metadata", r"\.metadata asks for posix\.mkdir, which no checkpoint needs"),
        ("common.pt", r"Trying to load unsupported GLOBAL posix\.mkdir"),
        ("generators", r"Trying to load unsupported GLOBAL posix\.mkdir"),
    ],
)
def test_nothing_in_a_checkpoint_is_run(place: str, refusal: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    _lay(tmp_path / "save", place, canary)
    with pytest.raises(RankError, match=rf"DataError: the checkpoint \S*iter_0000001 cannot be read .*{refusal}"):
        run_ranks(1, load, str(tmp_path / "save"), FLAGS)
    assert not canary.exists()


def test_what_torch_and_the_engine_write_is_read_alike(tmp_path: Path) -> None:
    run_ranks(2, save_at, str(tmp_path), [1], [*FLAGS, "--bf16", "--use-distributed-optimizer"])
    folder = tmp_path / "iter_0000001"
    ours, torchs = SafeReader(folder).read_metadata(), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.storage_data == torchs.storage_data
    every = torchs.state_dict_metadata.items()
    tensors = {key: entry for key, entry in every if isinstance(entry, TensorStorageMetadata)}
    with (folder / ".metadata").open("rb") as file:
        plain = torch_dist.read(file)
    assert plain.keys() == tensors.keys()
    for key, entry in tensors.items():
        assert (DTYPES[plain[key].dtype], plain[key].size) == (str(entry.properties.dtype)[6:], entry.size)
        for chunk, expected in zip(plain[key].chunks, entry.chunks, strict=True):
            place = torchs.storage_data[MetadataIndex(key, expected.offsets)]
            assert (chunk.offsets, chunk.sizes) == (expected.offsets, expected.sizes)
            assert (chunk.file, chunk.offset, chunk.length) == (place.relative_path, place.offset, place.length)
