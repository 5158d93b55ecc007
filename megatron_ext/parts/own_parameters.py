"""Parameters that a user's own layers have besides ours. They are in the catalogue as long as a run of theirs lasts.

    with in_every_layer(lambda config, layer: [Parameter("mix", (config.model.hidden_size,), layer.number, "zeros")]):
        parameters(config)   # has decoder.layers.0.mix, decoder.layers.1.mix, ...

The catalogue (`parts/catalogue.py`) is a function of the configuration, which holds flags and no code: the layers'
code is known to the process that the user's script starts, and to nobody else.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.stack import Layer, layers

OwnParameters = Callable[[Config, Layer], Iterable[Parameter]]
"""From the configuration and the description of a layer, the parameters that the layer has besides ours. Their names
begin in the layer: `mix` stands for `decoder.layers.17.mix`."""

_current: OwnParameters | None = None


@contextmanager
def in_every_layer(own: OwnParameters | None) -> Iterator[None]:
    """Have the catalogue of this process list own parameters of every layer, or none where `own` is None."""
    global _current
    before, _current = _current, own
    try:
        yield
    finally:
        _current = before


def current() -> OwnParameters | None:
    """Return what lists the own parameters now. What keeps counts of the catalogue must tell them apart by it."""
    return _current


def of_layer(config: Config, layer: Layer) -> Iterator[Parameter]:
    """Yield the own parameters of one layer, by the names of the catalogue.

    Raises:
        ConfigurationError: one of them cannot be initialized or divided as it says.
    """
    for parameter in _listed(config, layer):
        _check(parameter, config.layout.tensor_model_parallel_size)
        yield replace(parameter, name=f"decoder.layers.{layer.number}.{parameter.name}", stage=layer.number)


def names(config: Config) -> list[str]:
    """Return the names of own parameters, as they begin in a layer, sorted."""
    return sorted({parameter.name for layer in layers(config) for parameter in _listed(config, layer)})


def _listed(config: Config, layer: Layer) -> list[Parameter]:
    """Return what the own function lists for a layer.

    Raises:
        ConfigurationError: it lists something else than parameters.
    """
    if _current is None:
        return []
    listed: object = _current(config, layer)
    parameters = list(listed) if isinstance(listed, Iterable) else [listed]
    for parameter in parameters:
        if not isinstance(parameter, Parameter):
            raise ConfigurationError(
                f"layer_parameters= listed {type(parameter).__name__} for layer {layer.number}: it must return a list "
                "of Parameter (megatron_ext.parts.catalogue), which is empty where a layer has none of its own"
            )
    return cast(list[Parameter], parameters)


def _check(parameter: Parameter, ranks: int) -> None:
    what = f"layer_parameters: {parameter.name} of shape {list(parameter.shape)}"
    dim, shape = parameter.tp_dim, parameter.shape
    if parameter.init in ("normal", "uniform") and len(shape) != 2:
        raise ConfigurationError(
            f"{what} cannot begin with random numbers, which matrices alone do; use init='zeros' or 'ones'"
        )
    if parameter.expert is not None or parameter.tp_stride != 1 or parameter.true_rows is not None:
        raise ConfigurationError(
            f"{what}: expert, tp_stride and true_rows belong to experts, SwiGLU and the vocabulary; leave them out"
        )
    if dim is not None and (not 0 <= dim < len(shape) or shape[dim] % ranks):
        raise ConfigurationError(
            f"{what} cannot be divided in its dimension {dim} over {ranks} tensor-parallel ranks; use another tp_dim, "
            "tp_dim=None, which every rank holds whole, or a size that the ranks divide"
        )
