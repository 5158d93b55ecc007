"""What inference changes of a model and puts back."""

import dataclasses
import itertools
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.plugins.tasks.tasks import length_of
from tests.support.scripted_model import scripted_model


class _Layer(torch.nn.Module):
    """A layer that may divide the sequence among tensor-parallel ranks."""

    def __init__(self, divided: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.sequence_parallel, self.scatter_to_sequence_parallel = divided, divided
        self.config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=divided)


def _model(chunks: list[Any]) -> Model:
    return dataclasses.replace(scripted_model(), chunks=chunks)


def test_after_inference_the_model_is_as_it_was_before() -> None:
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
    assert scripted_model(padded_vocab_size=264).whole_vocabulary(torch.zeros(3, 264)).shape == (3, 257)


def test_numbers_of_a_model_by_its_configuration() -> None:
    for kind, length, positions in itertools.product(("learned_absolute", "rope"), (16, 32), (16, 64)):
        model = scripted_model(position_embedding_type=kind, seq_length=length, max_position_embeddings=positions)
        learned = kind == "learned_absolute"
        assert model.longest == (positions if learned else None)
        assert length_of(model) == (min(length, positions) if learned else length)
        assert (model.vocab_size, model.eod) == (257, 256)
    assert dataclasses.replace(scripted_model(), tokenizer=None).eod is None
