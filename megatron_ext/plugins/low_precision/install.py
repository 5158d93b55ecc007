"""Has the layers of a model multiply in few bits while they are trained."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.config.schema import Config
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parts.experts.compute import ExpertMatrices, Mixture
from megatron_ext.parts.linear.compute import ColumnLinear, RowLinear
from megatron_ext.plugins.low_precision.experts import trained_product
from megatron_ext.plugins.low_precision.formats import asked, chosen_layers, gathers_in_eight_bits, recipe_of
from megatron_ext.plugins.low_precision.gathers import EightBits
from megatron_ext.plugins.low_precision.linear import Multiplication, linear, settings
from megatron_ext.plugins.low_precision.quantize import compile_for_all_sizes
from megatron_ext.plugins.low_precision.random_numbers import CLOCK
from megatron_ext.train.run import Run
from megatron_ext.train.trainer import Callback, Trainer


def install(chunk: torch.nn.Module, config: Config, groups: ProcessGroupCollection) -> None:
    """Have the linear layers and experts of the chosen layers multiply as the flags say; routers, projections to
    latents, embeddings and the output layer stay as they are."""
    names = {id(weight): name for name, weight in global_named_parameters([chunk])}
    compile_for_all_sizes()
    for layer in _chosen(chunk, config):
        for module in layer.modules():
            if isinstance(module, ColumnLinear | RowLinear):
                weight: Any = module.weight
                stride = getattr(weight, "partition_stride", 1)
                divides = "outputs" if isinstance(module, ColumnLinear) else "inputs"
                how = settings(config, groups.tp, groups.cp, divides=divides, name=names[id(weight)], stride=stride)
                how = replace(how, gathered=_gathered(weight, config, how))
                module.trained_product = partial(linear, how=how)
            elif isinstance(module, Mixture):
                _install_experts(module, config, groups, names)


def _chosen(chunk: Any, config: Config) -> Iterator[torch.nn.Module]:
    """Yield the chosen layers of a chunk, and the layers of its depths of multi-token prediction."""
    numbers = chosen_layers(config)
    for name, module in chunk.named_modules() if numbers else ():
        if isinstance(module, TransformerLayer) and (name.startswith("mtp.") or module.layer_number - 1 in numbers):
            yield module


def _install_experts(mixture: Any, config: Config, groups: Any, names: dict[int, str]) -> None:
    for matrices in (module for module in mixture.modules() if isinstance(module, ExpertMatrices)):
        divides = "outputs" if matrices.divided == 0 else "inputs"
        how = settings(config, groups.expt_tp, None, divides=divides, stride=2 if matrices.gated else 1)
        # The dispatcher gathers tokens and adds up outputs, and gradients are returned to autograd.
        how = replace(how, gathers_over=None, sums_over=None, adds_to_main_gradient=False)
        how = replace(how, gathered=_gathered(matrices.weight, config, how))
        name = names[id(matrices.weight)].replace(f".{matrices.experts.start}:{matrices.experts.stop}.", ".{}.")
        each = [
            replace(how, matrix=index, draw=None if how.draw is None else replace(how.draw, name=name.format(expert)))
            for index, expert in enumerate(matrices.experts)
        ]
        matrices.trained_product = partial(trained_product, mixture.token_dispatcher, config.layout, each)


def _gathered(weight: torch.Tensor, config: Config, how: Multiplication) -> EightBits | None:
    """Return the weight as it is gathered, and mark it, where that is in eight bits."""
    if not gathers_in_eight_bits(config, weight.shape):
        return None
    format = how.recipe.forward.right
    over = [group for extent, cut in zip(format.block, how.of_weights, strict=True) if extent is None for group in cut]
    vars(weight)["narrow"] = EightBits(format, weight.shape, over)
    return vars(weight)["narrow"]


class _Steps(Callback):
    """Tells the random numbers the step that is under way."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Set the step from which random numbers follow."""
        CLOCK.step = trainer.position.iteration


def callbacks(run: Run) -> list[Callback]:
    """Return the callback that counts steps, where a recipe draws random numbers."""
    draws = asked(run.config) is not None and recipe_of(run.config).is_random
    return [_Steps()] if draws else []


CALLBACKS = (callbacks,)
