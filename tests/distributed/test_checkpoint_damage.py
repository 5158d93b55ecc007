"""A checkpoint with a single wrong byte is refused, with the file named, and the one before it is used.

Bytes flipped at random, truncated and missing shards: none is ever loaded.
"""

import contextlib
import io
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.verify.ranks import RankError, run_ranks
from tests.support.checkpoints import FLAGS, build, flip, load, save_at
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


def test_one_without_a_manifest_is_loaded_with_a_warning(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    (folder / "iter_0000002" / checkpoint_manifest.MANIFEST).unlink()
    [(iteration, said)] = run_ranks(1, _load_and_listen, str(folder))
    assert iteration == 2
    assert "has no manifest" in said


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


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"content")
    checkpoint_manifest.write(tmp_path, checkpoint_manifest.describe(tmp_path, [tmp_path / "shard"]))
    path = tmp_path / checkpoint_manifest.MANIFEST
    for offset in range(path.stat().st_size):
        flip(path, offset)
        with pytest.raises(ValueError, match="damaged"):
            checkpoint_manifest.read(tmp_path)
        flip(path, offset)
    assert checkpoint_manifest.read(tmp_path) is not None
