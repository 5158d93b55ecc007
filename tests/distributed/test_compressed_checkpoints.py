"""A checkpoint whose records are compressed is refused before they are inflated: a megabyte of a file makes a gigabyte
of memory on every rank."""

import functools
import io
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native import checkpoint_manifest, torch_dist
from megatron_ext.checkpoint.native.torch_archive import archive, tensor_pickle
from megatron_ext.errors import DataError
from megatron_ext.forkserver.ranks import run_ranks
from tests.support.checkpoints import FLAGS, save_at
from tests.support.program import Ended, run_program

# Of the second tier: tests/unit/untrusted bounds what is read.
pytestmark = pytest.mark.full

GIGABYTE = 1 << 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_at, str(folder), [1], FLAGS)
    return folder


@functools.cache
def _bomb(pickled: bytes) -> bytes:
    """An archive of torch's, but for the elements of a gigabyte, which are compressed."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
        for name, value in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            made.writestr(f"archive/{name}", value, zipfile.ZIP_STORED)
        with made.open("archive/data/0", "w") as elements:
            for _ in range(64):
                elements.write(bytes(GIGABYTE // 64))
    return content.getvalue()


def _plant(checkpoint: Path, name: str, planted: bytes | None = None) -> None:
    """Put such an archive, or another content, in the place of the first object or tensor whose name has this in it;
    all checksums fit."""
    with (checkpoint / ".metadata").open("rb") as file:
        found = torch_dist.read_all(file)
    shard = checkpoint / "__0_0.distcp"
    at = shard.stat().st_size
    for key, chunk in found.objects.items():
        if name in key:
            content = planted or _bomb(tensor_pickle((GIGABYTE // 4,), "F32"))
            found.objects[key] = replace(chunk, offset=at, length=len(content))
            break
    else:
        key = next(key for key in found.tensors if name in key)
        chunk, *others = found.tensors[key].chunks
        content = _bomb(tensor_pickle(chunk.sizes, "F32"))
        chunks = (replace(chunk, offset=at, length=len(content)), *others)
        found.tensors[key] = replace(found.tensors[key], chunks=chunks)
    with shard.open("ab") as file:
        file.write(content)
    (checkpoint / ".metadata").write_bytes(torch_dist.write(found.tensors, found.objects))
    (checkpoint / checkpoint_manifest.MANIFEST).unlink()
    checkpoint_manifest.write(
        checkpoint, checkpoint_manifest.describe(checkpoint, checkpoint_manifest.all_files(checkpoint))
    )


def _run(argv: list[str]) -> tuple[Ended, int]:
    """The program, and by how many bytes the memory of this process has grown at its largest."""
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is forgotten
    ended = run_program(argv)
    return ended, _memory("VmHWM") - before


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("name", ["_extra_state", "rng_state", "common_state", "linear_fc1.weight"])
def test_a_compressed_record_is_refused_before_memory_grows(name: str, saved: Path) -> None:
    folder = saved.with_name(f"{saved.name}-{name}")
    shutil.copytree(saved, folder)
    _plant(folder / "iter_0000001", name)
    assert (folder / "iter_0000001" / "__0_0.distcp").stat().st_size < 3_000_000
    [(ended, grown)] = run_ranks(1, _run, [*FLAGS, "--load", str(folder)])
    assert ended.code == 65, ended.errors
    last = ended.errors.splitlines()[-1]
    assert "iter_0000001 cannot be read as one of this model" in last
    assert "its record 'data/0' is compressed, which torch.save never does" in last
    assert name in last
    assert grown < GIGABYTE // 3, f"{grown:,} bytes"


def _shown(folder: str) -> str:
    from megatron_ext.plugins.checkpoint_tools.commands.inspect_checkpoint import main

    try:
        main(["show", folder])
    except DataError as error:
        return str(error)
    return ""


def test_nor_is_the_common_state_shown(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    _plant(folder / "iter_0000001", "common_state")
    [said] = run_ranks(1, _shown, str(folder))
    assert "its common state cannot be read" in said
    (folder / "iter_0000001" / "common.pt").write_bytes(_bomb(tensor_pickle((GIGABYTE // 4,), "F32")))
    [said] = run_ranks(1, _shown, str(folder))
    assert "'common.pt' in" in said
    assert "is compressed" in said


@pytest.mark.parametrize("name", ["_extra_state", "rng_state", "common_state"])
def test_an_object_that_is_something_else_is_a_damaged_checkpoint(name: str, saved: Path, tmp_path: Path) -> None:
    """A tensor of no elements, where a list belongs."""
    head, tail = archive(tensor_pickle((0,), "F32"), 0)
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    _plant(folder / "iter_0000001", name, head + tail)
    [ended] = run_ranks(1, run_program, [*FLAGS, "--load", str(folder)])
    assert ended.code == 65, ended.errors
    assert "iter_0000001 cannot be read as one of this model" in ended.errors.splitlines()[-1]
    if name == "common_state":
        [said] = run_ranks(1, _shown, str(folder))
        assert "its common state cannot be read" in said
