"""The catalogue's arithmetic. That it is the built model is shown by tests/distributed/test_catalogue.py."""

import subprocess
import sys

import pytest

from megatron_ext.parts import slices
from megatron_ext.parts.catalogue import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    parameters,
    stages,
)
from tests.support.small_models import LLAMA, small_config


def test_names_are_unique_and_norms_and_biases_do_not_decay() -> None:
    catalogue = parameters(small_config({"qk_layernorm": True}))
    assert len({parameter.name for parameter in catalogue}) == len(catalogue)
    for parameter in catalogue:
        assert parameter.decay == (parameter.name.endswith(".weight") and "norm" not in parameter.name)


def test_padding_is_known_where_there_is_any() -> None:
    by_name = {parameter.name: parameter for parameter in parameters(small_config(LLAMA))}
    assert by_name[WORD_EMBEDDINGS].true_rows == by_name[OUTPUT_LAYER].true_rows == 250
    unpadded = parameters(small_config({"padded_vocab_size": 250}))
    assert [parameter.true_rows for parameter in unpadded] == [None] * len(unpadded)


def test_interleaving_deals_the_layers_out_in_turn() -> None:
    layout = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "world_size": 2}
    config = small_config({"num_layers": 8}, layout)
    held = {parameter.stage: stages(config, parameter) for parameter in parameters(config)}
    assert [held[layer] for layer in range(8)] == [[0], [0], [1], [1], [0], [0], [1], [1]]
    assert held["output"] == [1]


def test_the_catalogue_needs_no_torch() -> None:
    program = "import sys, megatron_ext.parts.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_slices_of_a_stride_of_two() -> None:
    """The picture at the head of parts/slices.py: the second rank has the second half of the gate and of the rest."""
    assert slices.pieces(8, 2, 0, 2) == [(0, 0, 2), (4, 2, 2)]
    assert slices.pieces(8, 2, 1, 2) == [(2, 0, 2), (6, 2, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shards_of_all_ranks_are_the_whole(ranks: int) -> None:
    """Every row and column of every parameter lies in one rank's shard, or whole on all of them."""
    for parameter in parameters(small_config(LLAMA)):
        shape = (*parameter.shape, 1)[:2]
        held = [[0] * shape[1] for _ in range(shape[0])]
        for rank in range(ranks):
            columns = range(shape[1])[slices.columns(parameter, rank, ranks)]
            rows = slices.rows(parameter, rank, ranks)
            local = (*parameter.local_shape(ranks), 1)[:2]
            assert (sum(piece.size for piece in rows), len(columns)) == local
            assert [piece.in_shard for piece in rows] == [sum(p.size for p in rows[:at]) for at in range(len(rows))]
            for piece in rows:
                for row in range(piece.start, piece.start + piece.size):
                    for column in columns:
                        held[row][column] += 1
        assert {count for row in held for count in row} == {1 if parameter.tp_dim is not None else ranks}
