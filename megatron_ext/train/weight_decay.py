"""The optimizer's parameter groups against the catalogue: what decays is what `parts.catalogue` says."""

from collections.abc import Iterator, Sequence

import torch

from megatron_ext.config.schema import Config
from megatron_ext.model.names import by_expert, global_named_parameters
from megatron_ext.parts.catalogue import parameters
from megatron_ext.sharding.parts import OptimizerPart


def check_weight_decay(parts: Sequence[OptimizerPart], chunks: Sequence[torch.nn.Module], config: Config) -> None:
    """Assert that each parameter of the model is in a group that decays as the catalogue says: wholly or not at all.

    Args:
        chunks: with the model's weights in place (`Sharding.weights_in_place`).
    """
    decays = {parameter.name: parameter.decay for parameter in parameters(config)}
    wrong = [
        f"{name} (times {factor:g}, and the catalogue says {'1' if decays.get(name) else '0'})"
        for name, factor in _factors(parts, chunks)
        if name not in decays or factor != float(decays[name])
    ]
    assert not wrong, f"weight decay of parameter groups is not that of the catalogue: {', '.join(wrong)}"


def _factors(parts: Sequence[OptimizerPart], chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, float]]:
    """Yield the catalogue's name of every parameter that is updated, and what its group multiplies weight decay by."""
    names = {id(parameter): name for name, parameter in global_named_parameters(chunks)}
    for part in parts:
        groups = part.core.optimizer.param_groups
        factors = {id(main): group.get("wd_mult", 1.0) for group in groups for main in group["params"]}
        for weight, main in part.main_parameters():
            # A stack of experts has one factor: without values it costs nothing to take it apart.
            shape = torch.empty(weight.shape, device="meta")
            yield from ((name, factors[id(main)]) for name, _ in by_expert(names[id(weight)], shape))
