"""What inference changes of a model and puts back, and how sequences are laid into batches to be scored."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.inference.model import Model
from megatron_ext.inference.scoring import Scorable, _batch, _batches

CPU = torch.device("cpu")


class _Layer(torch.nn.Module):
    def __init__(self, divided: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.sequence_parallel, self.scatter_to_sequence_parallel = divided, divided
        self.config: Any = SimpleNamespace(sequence_parallel=divided)


def _model(chunks: list[Any]) -> Model:
    config: Any = SimpleNamespace(
        training=SimpleNamespace(torch_compile=False),
        data=SimpleNamespace(vocab_size=5),
        model=SimpleNamespace(padded_vocab_size=8),
    )
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    return Model(config, SimpleNamespace(), groups, SimpleNamespace(), chunks, None)  # pyright: ignore


def test_everything_is_as_it_was_before() -> None:
    """What was divided is so again, what was not stays whole; who trained trains, and who did not does not."""
    chunks = [_Layer(True), _Layer(False), _Layer(True).eval()]
    flags = [chunk.sequence_parallel for chunk in chunks]
    with _model(chunks).at_work():
        assert not any(chunk.training for chunk in chunks)
        assert not any(chunk.sequence_parallel or chunk.scatter_to_sequence_parallel for chunk in chunks)
        assert not any(chunk.config.sequence_parallel for chunk in chunks)
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled(), "the weights are trained"
    assert [chunk.training for chunk in chunks] == [True, True, False]
    assert [chunk.sequence_parallel for chunk in chunks] == flags
    assert [chunk.scatter_to_sequence_parallel for chunk in chunks] == flags
    assert [chunk.config.sequence_parallel for chunk in chunks] == flags
    for frozen in chunks[:2]:
        frozen.requires_grad_(False)
    with _model(chunks).at_work():
        assert not torch.is_inference_mode_enabled(), "some of the weights are trained"
    with _model([chunk.requires_grad_(False) for chunk in chunks]).at_work():
        assert torch.is_inference_mode_enabled()


def test_padding_of_the_vocabulary_is_no_token() -> None:
    assert _model([]).whole_vocabulary(torch.zeros(3, 8)).shape == (3, 5)


SEQUENCES = [
    Scorable([1, 2, 3], 1),
    Scorable([4, 5, 6, 7, 8], 2),
    Scorable([9, 1], 1),
    Scorable([2, 3, 4, 5], 3),
    Scorable([6, 7, 8], 2),
]


def test_a_batch_says_which_position_predicts_which_token() -> None:
    """Position s of row b is number s x B + b; the last token is predicted by the one before it, and is no input."""
    found = _batch(SEQUENCES, [1, 0], 2, 4, 5, CPU)
    assert found.tokens_BS.tolist() == [[4, 5, 6, 7], [1, 2, 0, 0]]
    assert found.wanted_N.tolist() == [2 * 2, 3 * 2, 1 * 2 + 1, 0, 0]
    assert found.targets_N.tolist() == [7, 8, 3, 0, 0]
    assert found.owners_N.tolist() == [1, 1, 0, -1, -1]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_sequence_is_scored_once_in_batches_of_one_shape(replicas: int) -> None:
    rounds = list(zip(*(_batches(SEQUENCES, 2, replica, replicas, CPU) for replica in range(replicas)), strict=True))
    owners: list[int] = []
    for batches in rounds:
        assert len({(one.tokens_BS.shape, one.wanted_N.shape) for one in batches}) == 1
        longest = max(len(SEQUENCES[number].tokens) for one in batches for number in one.members)
        assert batches[0].tokens_BS.size(1) == longest - 1
        for one in batches:
            owners += [number for number in one.owners_N.tolist() if number >= 0]
    assert sorted(owners) == [number for number, one in enumerate(SEQUENCES) for _ in range(one.scored)]
