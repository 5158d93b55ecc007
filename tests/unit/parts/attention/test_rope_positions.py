"""Angles of rotary positions are those of the tokens that a rank holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.model.config import transformer_config
from megatron_ext.parts.attention.describe import Scaling
from megatron_ext.parts.attention.rope import RotaryTable, scaled_inverse_frequencies
from megatron_ext.parts.stack import stack
from tests.support.small_models import LLAMA, small_config


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_angles_are_those_of_a_ranks_positions(rank: int, expected: list[int]) -> None:
    """Chunk after chunk, as a rank holds its tokens; scaled where the model is."""
    scaling = {"use_rope_scaling": True, "rope_scaling_factor": 4.0}
    config = small_config({**LLAMA, **scaling, "seq_length": 8}, layout={"context_parallel_size": 2, "world_size": 2})
    groups: Any = SimpleNamespace(cp=_group(rank, 2))
    [(kind, _)] = stack(config).kinds
    assert kind.attention.rotary is not None
    assert isinstance(kind.attention.rotary.scaling, Scaling)
    table = RotaryTable(kind.attention, transformer_config(config, "cpu"), groups)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16.0)
    scaled = scaled_inverse_frequencies(frequencies, kind.attention.rotary.scaling, 10000.0)
    assert not torch.equal(scaled, frequencies / 4.0)
    known = torch.tensor(expected)[:, None] * scaled
    torch.testing.assert_close(table.get_emb(8), torch.stack((known.cos(), known.sin())), rtol=1e-5, atol=1e-6)
    assert table.get_emb(1).tolist() == [[[1.0] * 8], [[0.0] * 8]], "one token is divided among no ranks"
