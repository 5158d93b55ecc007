"""Computes the factors by which a weight's learning rate, weight decay and Adam's epsilon differ from the flags'
values.

    factors(config, parameter).rate         # 0.25 for a matrix of a layer four times as wide as its base

A factor is the one of --use-mup for the weight's kind, times the last of --lr-group or --weight-decay-group that names
the weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import Config
from megatron_ext.parts.parameter import Parameter


@dataclass(frozen=True)
class Factors:
    """Factors of learning rate, weight decay and epsilon of one parameter."""

    rate: float = 1.0
    weight_decay: float = 1.0
    epsilon: float = 1.0


def factors(config: Config, parameter: Parameter) -> Factors:
    """Return the factors of a parameter of a configuration that the rules have passed."""
    optimizer, scaled = config.optimizer, _mup(config, parameter)
    decays = parameter.decay or (optimizer.apply_wd_to_qk_layernorm and parameter.is_query_or_key_norm)
    return Factors(
        scaled.rate * _of_group(optimizer.lr_group or (), parameter.name),
        scaled.weight_decay * decays * _of_group(optimizer.weight_decay_group or (), parameter.name),
        scaled.epsilon,
    )


def read_group(text: str) -> tuple[str, float]:
    """Return the pattern and the factor of `PATTERN=FACTOR`.

    Raises:
        ValueError: it is none.
    """
    pattern, _, factor = text.rpartition("=")
    if not pattern or not 0 <= float(factor) < math.inf:
        raise ValueError(text)
    return pattern, float(factor)


def _of_group(groups: Sequence[str], name: str) -> float:
    found = [factor for pattern, factor in map(read_group, groups) if fnmatchcase(name, pattern)]
    return found[-1] if found else 1.0


def _mup(config: Config, parameter: Parameter) -> Factors:
    """Return the factors of the maximal update parametrization, as Megatron-LM groups weights.

    Source: Yang et al. 2022 (arXiv:2203.03466), table 8, where matrices of layers alone have an infinite fan-in, and
    appendix B.3 (epsilon). With --mup-base-num-layers, Dey et al. 2025 (arXiv:2505.01618), table 1 with alpha 1: then
    epsilon follows the size of gradients everywhere, and weight decay makes up for the rate. Muon's updates of matrices
    have a size of their own (--muon-scale-mode).
    """
    model, traits = config.model, traits_of(config.optimizer).updating(parameter.update)
    width, base_layers = model.mup_width_mult, model.mup_base_num_layers
    is_hidden = len(parameter.shape) > 1 and isinstance(parameter.stage, int)
    if not model.use_mup or traits.needs_whole_matrices:
        return Factors()
    if traits.follows_gradients:
        return Factors() if is_hidden else Factors(rate=width)
    rate, depth = 1.0 / width if is_hidden else 1.0, 1.0
    if base_layers is None:
        return Factors(rate, epsilon=rate)
    if isinstance(parameter.stage, int):
        depth = model.num_layers / base_layers
    return Factors(rate, 1.0 / rate, 1.0 / (width * depth))
