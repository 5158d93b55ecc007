"""A user's own layers against the catalogue: what is marked for the engine, what is refused, and where each rank's part
of a divided parameter lies in a checkpoint."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.model import own_layers
from megatron_ext.model.own_layers import divided, mark_own_parameters
from megatron_ext.parts.catalogue import Parameter
from megatron_ext.parts.own_parameters import with_own_parameters
from megatron_ext.parts.stack import Layer
from tests.support.small_models import small_config

SIZES = {"world_size": 2, "tensor_model_parallel_size": 2}


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def _own(*found: Parameter) -> Callable[[Config, Layer], Iterable[Parameter]]:
    return lambda _config, _layer: found


MIX = Parameter("mix", (6, 5), 0, "zeros", tp_dim=0, sequence_parallel=True)
GATE = Parameter("gate", (5,), 0, "ones")


def _held(monkeypatch: pytest.MonkeyPatch, *weights: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    """What this rank's chunks have."""
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in weights]
    monkeypatch.setattr(own_layers, "global_named_parameters", lambda _chunks: iter(named))
    return dict(named)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_own_parameters_have_the_marks_of_the_catalogue(
    sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stage that holds two of four layers; what the engine has marked keeps its marks."""
    names = [f"decoder.layers.{number}.{own}" for number in (2, 3) for own in ("mix", "gate")]
    held = _held(monkeypatch, *((name, (3, 5) if name.endswith("mix") else (5,)) for name in names))
    of_the_engine = held["decoder.layers.3.mix"]
    of_the_engine.tensor_model_parallel, of_the_engine.partition_dim = True, 7
    config = small_config(layout={**SIZES, "sequence_parallel": sequence_parallel})
    mark_own_parameters([], with_own_parameters(config, _own(MIX, GATE)))
    marks = ("tensor_model_parallel", "partition_dim", "sequence_parallel", "own_layers_divided_dim")
    found = {name: tuple(getattr(weight, mark) for mark in marks) for name, weight in held.items()}
    assert found == {
        "decoder.layers.2.mix": (True, 0, sequence_parallel, 0),
        "decoder.layers.2.gate": (False, -1, False, None),
        "decoder.layers.3.mix": (True, 7, sequence_parallel, 0),
        "decoder.layers.3.gate": (False, -1, False, None),
    }


@pytest.mark.parametrize(
    ("weights", "problems"),
    [
        (
            [("decoder.layers.1.mix", (3, 5)), ("decoder.layers.1.other.weight", (4, 2))],
            [
                "the own layer has a parameter decoder.layers.1.other.weight of shape [4, 2], which nobody would "
                "initialize, divide or save; let layer_parameters=, or the mixer's Part, name it: "
                "Parameter('other.weight', shape, layer.number, 'zeros') (docs/own_mixer.md)"
            ],
        ),
        (
            [("decoder.layers.1.mlp.linear_fc2.bias", (64,))],
            [
                "layer_parameters=, or the mixer's Part, names decoder.layers.1.mix, which the own layer does not "
                "have; give the layer that parameter (docs/own_mixer.md)"
            ],
        ),
        (
            [("decoder.layers.1.mix", (6, 5)), ("decoder.layers.3.mix", (3, 4))],
            [
                f"decoder.layers.{number}.mix has shape {shape} on this rank, and layer_parameters=, or the mixer's "
                "Part, says [3, 5]; let both say the same (docs/own_mixer.md)"
                for number, shape in ((1, [6, 5]), (3, [3, 4]))
            ],
        ),
        ([("decoder.layers.1.mix", (3, 5))], []),
        ([("embedding.word_embeddings.weight", (128, 64))], []),
    ],
)
def test_own_layers_and_the_catalogue_say_the_same(
    weights: list[tuple[str, tuple[int, ...]]], problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the layers that this stage holds; the others are another stage's to compare."""
    _held(monkeypatch, *weights)
    config = with_own_parameters(small_config(layout=SIZES), _own(MIX))
    if not problems:
        mark_own_parameters([], config)
        return
    with pytest.raises(ConfigurationError) as error:
        mark_own_parameters([], config)
    assert "\n".join(error.value.problems) == "\n".join(problems)


def _sharded(dim: int | None, **engine: Any) -> ShardedTensor:
    """A [2, 3] parameter of layer 3 of 5, as the engine takes it: whole on every tensor-parallel rank."""
    data: Any = torch.zeros(2, 3)
    data.own_layers_divided_dim = dim
    return ShardedTensor.from_rank_offsets("mix", data, (0, 3, 5), replica_id=(4, 1, 2), prepend_axis_num=1, **engine)


@pytest.mark.parametrize(
    ("dim", "shape", "offset", "fragments"),
    [(0, (5, 8, 3), (3, 6, 0), (5, 4, 1)), (1, (5, 2, 12), (3, 0, 9), (5, 1, 4))],
)
def test_a_ranks_part_of_a_divided_parameter_lies_after_those_before_it(
    dim: int, shape: tuple[int, ...], offset: tuple[int, ...], fragments: tuple[int, ...]
) -> None:
    """It is no replica of another tensor-parallel rank's; data-parallel ranks have replicas of it."""
    whole = _sharded(dim)
    found = divided(whole, _group(3, 4))
    assert (found.global_shape, found.global_offset, found.axis_fragmentations) == (shape, offset, fragments)
    assert (found.replica_id, found.local_shape, found.key) == ((0, 0, 2), (2, 3), "mix")
    assert divided(found, _group(3, 4)) is found, "the engine has divided it"


@pytest.mark.parametrize(("dim", "ranks"), [(None, 4), (0, 1), (1, 1)])
def test_what_every_rank_has_whole_stays_so(dim: int | None, ranks: int) -> None:
    whole = _sharded(dim)
    assert divided(whole, _group(0, ranks)) is whole
