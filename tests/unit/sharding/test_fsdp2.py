"""Under torch's FSDP: what is gathered at a time, and which rows a rank keeps. Ranks train in tests/distributed."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer

from benchmarks.rehearsed_world import played
from megatron_ext import device
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.parallel import groups
from megatron_ext.sharding import fsdp2
from tests.support.small_models import LLAMA, build_small_model, small_config


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_are_in_no_unit_of_their_own(tied: bool) -> None:
    """They are needed at both ends of a forward pass. Inner modules come first, the model last."""
    config = small_config({"num_layers": 2, **LLAMA, "untie_embeddings_and_output_weights": not tied})
    [model], _ = build_small_model(config)
    *parts, last = fsdp2._units(model, shared=tied)
    kinds = (TransformerLayer, LanguageModelEmbedding)
    assert [sum(isinstance(part, kind) for part in parts) for kind in kinds] == [2, 0 if tied else 1]
    assert len(parts) == (2 if tied else 3)
    assert last is model


class Shard:
    """In the place of a DTensor of seven rows: what a rank holds of it."""

    shape, _local_tensor = (7, 3), torch.zeros(1, 3)

    def size(self, axis: int) -> int:
        return self.shape[axis]


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_rows_are_those_that_torch_cuts(copies: int) -> None:
    """Of as many copies, each rank has the rows that `torch.chunk` gives it, and knows which copy it holds."""
    whole: Any = Shard()
    parts = torch.arange(7).chunk(8 // copies)
    for rank in range(8):
        with played(rank, 8):
            layout = LayoutConfig(world_size=8, num_distributed_optimizer_instances=copies)
            found = fsdp2._rows(whole, groups.initialize(layout, device.install("cpu")))
        number = rank % (8 // copies)
        assert found.first == (int(parts[number][0]) if number < len(parts) else 7)
        assert (found.replica, found.shape) == (rank // (8 // copies), (7, 3))


def test_an_action_of_the_first_forward_pass_is_done_once() -> None:
    done: list[Any] = []
    module = torch.nn.Linear(1, 1)
    fsdp2._at_first_forward(module, done.append)
    for _ in range(3):
        module(torch.zeros(1, 1))
    assert done == [module]
