"""While a checkpoint is loaded, its metadata is parsed once, however often it is read; a changed one is parsed anew."""

import io
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import torch_dist
from megatron_ext.checkpoint.native.safe_reading import no_code_from_files, read_metadata
from megatron_ext.checkpoint.native.torch_dist import Chunk


def test_metadata_is_parsed_once_in_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = torch_dist.read_inert

    def noted(content: bytes, allowed: Any) -> Any:
        parsed.append(content)
        return parse(content, allowed)

    monkeypatch.setattr(torch_dist, "read_inert", noted)
    one, other = (torch_dist.write({}, {"o": Chunk((), (), "x", 0, length)}) for length in (7, 8))

    def lengths(*contents: bytes) -> list[int]:
        """What is read of each, by torch's own objects, which are made anew."""
        found = [read_metadata(io.BytesIO(content)).storage_data for content in contents]
        assert len({id(places) for places in found}) == len(contents)
        return [place.length for places in found for place in places.values()]

    with no_code_from_files(tmp_path):
        assert lengths(one, one, one, other, other, one) == [7, 7, 7, 8, 8, 7]
        assert parsed == [one, other, one]
    assert lengths(one, one) == [7, 7]
    assert len(parsed) == 5, "nothing is kept afterwards"
