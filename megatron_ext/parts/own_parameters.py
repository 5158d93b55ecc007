"""Parameters that a user's own layers have besides ours; the catalogue lists them, too.

    config = with_own_parameters(
        config, lambda config, layer: [Parameter("mix", (config.model.hidden_size,), layer.number, "zeros")]
    )
    parameters(config)   # has decoder.layers.0.mix, decoder.layers.1.mix, ...

The catalogue (`parts/catalogue.py`) is a function of the configuration. Flags name no code: a configuration that was
read from flags or a file has no own parameters, and no file holds them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast, get_args

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, listed
from megatron_ext.parts.parameter import Init, Parameter
from megatron_ext.parts.stack import Layer, layers, stack

OwnParameters = Callable[[Config, Layer], Iterable[Parameter]]
"""From the configuration and the description of a layer, the parameters that the layer has besides ours. Their names
begin in the layer: `mix` stands for `decoder.layers.17.mix`."""


@dataclass(frozen=True)
class OwnConfig(Config):
    """A configuration of layers that have parameters of a user's own. What keeps counts of the catalogue must tell it
    from others."""

    own_parameters: OwnParameters | None = None


def with_own_parameters(config: Config, own: OwnParameters | None) -> Config:
    """Return the configuration with own parameters in every layer, or as it is where `own` is None."""
    return config if own is None else OwnConfig(**{**vars(config), "own_parameters": own})


def of_layer(config: Config, layer: Layer) -> Iterator[Parameter]:
    """Yield the own parameters of one layer, by the names of the catalogue.

    Raises:
        ConfigurationError: one of them cannot be initialized or divided as it says.
    """
    for parameter in _listed(config, layer):
        _check(parameter, config.layout.tensor_model_parallel_size)
        yield replace(parameter, name=f"{layer.name}.{parameter.name}", stage=layer.number)


def names(config: Config) -> list[str]:
    """Return the names of own parameters, as they begin in a layer, sorted."""
    return sorted({parameter.name for layer in layers(config) for parameter in _listed(config, layer)})


def layers_differ(config: Config) -> bool:
    """Return whether layers differ in their parameters, own ones among them: a checkpoint then holds each layer by
    itself."""
    if stack(config).has_mixed_parameters or not isinstance(config, OwnConfig):
        return stack(config).has_mixed_parameters
    return len({frozenset((one.name, one.shape) for one in _listed(config, layer)) for layer in layers(config)}) > 1


def _listed(config: Config, layer: Layer) -> list[Parameter]:
    """Return the parameters that the user's function lists for a layer.

    Raises:
        ConfigurationError: it lists something else than parameters.
    """
    if not isinstance(config, OwnConfig) or config.own_parameters is None:
        return []
    listed: object = config.own_parameters(config, layer)
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
    dim, shape, known = parameter.tp_dim, parameter.shape, get_args(Init.__value__)
    if parameter.init not in known:
        raise ConfigurationError(f"{what} cannot begin by init={parameter.init!r}; use {listed(known)}")
    if parameter.init in ("normal", "uniform") and not parameter.std > 0:
        raise ConfigurationError(
            f"{what} cannot be drawn with std={parameter.std:g}; give a positive one, as --init-method-std does: "
            "std=config.model.init_method_std, or use init='zeros'"
        )
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
