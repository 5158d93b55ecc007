"""A checkpoint from a stranger runs nothing: every pickle in it asks for a folder to be made, and none is.

What else such a pickle may try is in tests/unit/untrusted/test_inert_pickle.py.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_ext.checkpoint.dtypes import DTYPES
from megatron_ext.checkpoint.native import checkpoint_state_dict, torch_dist
from megatron_ext.checkpoint.native.safe_reading import SafeReader
from megatron_ext.verify.ranks import RankError, run_ranks
from tests.support.checkpoints import FLAGS, load, save_at


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
    (checkpoint / "manifest.json").unlink(missing_ok=True)  # a stranger would write one that agrees
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
