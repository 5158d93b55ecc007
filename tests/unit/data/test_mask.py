"""The mask of a pair, which says what is trained on; tests/unit/data/test_indexed.py writes it."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.mask import Mask
from megatron_ext.errors import DataError


def test_a_mask_that_becomes_shorter_is_named(tmp_path: Path):
    with IndexedWriter(tmp_path / "a", np.uint16, packed_to=0) as writer:
        writer.add_tokens(bytes(8), [4], np.array([2, 1, 0, 1], np.uint8))
    mask = Mask(str(tmp_path / "a"), 4)
    os.truncate(tmp_path / "a.mask", 16 + 2)
    assert (mask.read(0, 2).tolist(), mask.read(1, 0).tolist()) == ([2, 1], [])
    with pytest.raises(DataError, match=r"a\.mask ends before token 4: it was truncated during the run"):
        mask.read(1, 3)
