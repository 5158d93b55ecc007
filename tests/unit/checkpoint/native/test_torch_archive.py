"""Shards without torch: the bytes are those of torch.save, the metadata is what torch reads, and dtypes round alike."""

import io
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_ext.checkpoint import dtypes as bits
from megatron_ext.checkpoint.dtypes import DTYPES
from megatron_ext.checkpoint.native import torch_dist
from megatron_ext.checkpoint.native.torch_archive import archive, place_of_elements, tensor_pickle
from megatron_ext.checkpoint.native.torch_dist import Chunk, Tensor
from megatron_ext.plugins.checkpoint_tools import copying

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def _without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (1, 3), (1, 10, 20), (1, 2, 3, 70_000), (3, 2, 1), (1, 300, 700)])
@pytest.mark.usefixtures("_without_checksums")
def test_tensors_as_torch_saves_them(shape: tuple[int, ...], code: str, tmp_path: Path) -> None:
    tensor = torch.randn(shape).to(getattr(torch, DTYPES[code]))
    elements = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    expected = _saved(tensor)
    head, tail = archive(tensor_pickle(shape, code), len(elements))
    assert head + elements + tail == expected
    path = tmp_path / "shard"
    path.write_bytes(b"before" + expected + b"behind")
    with path.open("rb") as file:
        assert place_of_elements(file, 6, len(expected), shape, code) == 6 + len(head)
        assert place_of_elements(file, 6, len(expected), (*shape, 1), code) is None
        assert place_of_elements(file, 6, len(expected) - 1, shape, code) is None


@pytest.mark.parametrize("value", [[None], [{"iteration": 0, "content": {"a": True, "b": "text"}}], [2.5, -1]])
@pytest.mark.usefixtures("_without_checksums")
def test_objects_as_torch_saves_them(value: Any) -> None:
    assert archive(pickle.dumps(value, protocol=2), None) == (_saved(value), b"")


def test_elements_with_checksums_or_in_another_order(tmp_path: Path) -> None:
    tensor = torch.randn(6, 4)
    path = tmp_path / "shard"
    for saved, found in ((tensor, True), (tensor.t(), False), (tensor[1:], False), (tensor.t()[:, :4], False)):
        path.write_bytes(_saved(saved))
        with path.open("rb") as file:
            place = place_of_elements(file, 0, path.stat().st_size, tuple(saved.shape), "F32")
        assert (place is not None) == found
        if place is not None:
            assert path.read_bytes()[place:].startswith(saved.numpy().tobytes())


def test_metadata_is_what_torch_reads() -> None:
    chunks = tuple(Chunk((layer, 0, 0), (1, 3, 70_000), "__0_0.distcp", layer << 33, 5) for layer in range(3))
    tensors = {"layers.weight": Tensor("BF16", (3, 3, 70_000), chunks)}
    written = torch_dist.write(tensors, {"state/shard_0_1": Chunk((), (), "__0_0.distcp", 7, 9)})
    assert torch_dist.read(io.BytesIO(written)) == tensors
    content = pickle.loads(written)
    weight = content.state_dict_metadata["layers.weight"]
    assert (weight.properties.dtype, weight.size) == (torch.bfloat16, torch.Size((3, 3, 70_000)))
    assert [(chunk.offsets, chunk.sizes) for chunk in weight.chunks] == [(c.offsets, c.sizes) for c in chunks]
    place = content.storage_data[MetadataIndex("layers.weight", torch.Size((2, 0, 0)))]
    assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", 2 << 33, 5)
    assert content.storage_data[MetadataIndex("state/shard_0_1")].offset == 7


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_dtypes_round_as_torch_does(source: str, target: str) -> None:
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65519.9, 65520.0, 1e-8, 3.39e38]
    generator = torch.Generator().manual_seed(1)
    anything = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32).view(torch.float32)
    values = torch.cat([anything, torch.tensor(special)]).to(getattr(torch, DTYPES[source]))
    expected = values.to(getattr(torch, DTYPES[target]))
    found = bits.converted(values.view(torch.uint8).numpy().view(bits.ARRAYS[source]), source, target)
    ours = torch.from_numpy(np.ascontiguousarray(found).view(np.uint8)).view(expected.dtype)
    numbers = ~expected.isnan()
    assert torch.equal(ours.isnan(), ~numbers)
    assert torch.equal(ours[numbers].view(torch.uint8), expected[numbers].view(torch.uint8))


def test_a_file_from_parts_and_back(tmp_path: Path) -> None:
    source, whole, back = tmp_path / "source", tmp_path / "whole", tmp_path / "back"
    content = np.random.default_rng(1).integers(0, 256, 5_000_000, np.uint8).tobytes()
    source.write_bytes(content)
    back.write_bytes(bytes(len(content)))

    def made(target: memoryview) -> None:
        target[:] = b"m" * len(target)

    with copying.Files(0) as files:
        ranges = [copying.FileRange(2_500_000, files, source, 3), copying.FileRange(3, files, source, 0)]
        last = copying.FileRange(2_499_997, files, source, 2_500_003)
        parts = [
            copying.Literal(1000, content[:1000]),
            *ranges,
            copying.Zeros(70),
            *(copying.ComputedBytes(700_000, made),) * 3,
            last,
        ]
        size, checksum = copying.gather(whole, parts)
    expected = content[:1000] + content[3:2_500_003] + content[:3] + bytes(70) + b"m" * 2_100_000 + content[2_500_003:]
    assert whole.read_bytes() == expected
    assert (size, checksum) == (len(expected), zlib.crc32(expected))
    seen = []
    with copying.Files(1) as files:
        taken = copying.ComputedBytes(700_000, lambda bits: seen.append(bytes(bits)))
        targets = [copying.FileRange(part.length, files, back, part.offset) for part in (*ranges, last)]
        parts = [copying.SkippedBytes(1000), *targets[:2], copying.SkippedBytes(70), *(taken,) * 3, targets[2]]
        assert copying.scatter(whole, parts, checksum=True) == (size, checksum)
        assert seen == [b"m" * 700_000] * 3
        with pytest.raises(EOFError, match="too early"):
            copying.scatter(whole, [*parts, copying.SkippedBytes(1)], checksum=True)
    assert back.read_bytes() == content


def test_converting_imports_neither_torch_nor_the_engine() -> None:
    """They take longer than the conversion of a gigabyte."""
    check = (
        "import sys, megatron_ext.plugins.huggingface.exporter, megatron_ext.plugins.huggingface.importer\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron.core', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0
