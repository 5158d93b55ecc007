"""Compares one process with a layout, from a user's own flags: where the two differ first, and at which tensor.

    proof = prove(["--num-layers", "4", ..., "--tensor-model-parallel-size", "2"], world_size=2, steps=3)
    proof.first_difference()      # None, or the first tensor that differs

They are compared in fp32 with dropout 0, which no two layouts draw alike, from the seed and without a checkpoint.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_ext.config.derived.batch_size import training_steps
from megatron_ext.config.derived.rank_order import axis_sizes
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import flag_of, options, options_by_name
from megatron_ext.config.schema import CheckpointConfig, LoggingConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.parity import GRADIENT_TOLERANCE
from megatron_ext.plugins.prove.recorded_training import RunRecord, record
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import NONE, Extensions

_LEFT_OUT = {field.name for group in (CheckpointConfig, LoggingConfig) for field in dataclasses.fields(group)}
_LEFT_OUT |= {"bf16", "fp16", "world_size", "device", "full_validation", "eval_at_start"}
_SAME_FOR_BOTH = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "eval_iters": 0}


@dataclass(frozen=True)
class Comparison:
    """Holds the flags of both runs."""

    reference: list[str]
    other: list[str]
    world_size: int
    changed: tuple[str, ...]
    """Settings that were changed for the comparison, in words."""

    layout: str
    """Sizes of the layout, `TP 2 x PP 1 x CP 1 x DP 1`."""


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor at which two runs differ."""

    what: str
    """Kind of tensor: "initial weight", "output", "loss", "gradient", "disagreement" or "step"."""
    name: str
    distance: float
    sentence: str


@dataclass(frozen=True)
class Proof:
    """Holds the records of both runs and tells where they differ."""

    reference: RunRecord
    other: RunRecord
    tolerance: float

    @cached_property
    def weights(self) -> dict[str, float]:
        """Distance of every initial weight, in the order of a forward pass; they must be equal bit for bit."""
        return _distances(self.reference.weights, self.other.weights)

    @cached_property
    def outputs(self) -> dict[str, float]:
        """Return the relative distance of every module's output in the first step, in the order of a forward pass."""
        distances = {}
        for name, (known, *_) in self.reference.outputs.items():
            replicas = self.other.outputs.get(name, [])
            if replicas and all(replica.shape == known.shape for replica in replicas):
                # Unlike Python's, numpy's largest of numbers and NaN is NaN.
                distances[name] = float(np.max([relative(replica, known) for replica in replicas]))
        return distances

    @cached_property
    def gradients(self) -> dict[str, float]:
        """Return the relative distance of every first gradient, in the order of a backward pass."""
        distances = _distances(self.reference.gradients, self.other.gradients)
        return dict(reversed(distances.items()))

    def far(self, distances: Mapping[str, float]) -> list[str]:
        """Return the names beyond the tolerance; NaN is beyond every tolerance."""
        return [name for name, distance in distances.items() if not distance <= self.tolerance]

    def first_difference(self) -> FirstDifference | None:
        """Return where the runs differ first: initial weights, forward pass, loss, backward pass, replicas, later
        steps."""
        for name, distance in self.weights.items():
            if distance != 0.0:
                return FirstDifference(
                    "initial weight", name, distance, f"the initial weight {name} is {_off(distance)}"
                )
        for name in self.far(self.outputs):
            distance = self.outputs[name]
            return FirstDifference(
                "output", name, distance, f"in forward order, the output of {name} is {_off(distance)}"
            )
        return self._loss() or self._gradient() or self._disagreement() or self._later_step()

    def _loss(self) -> FirstDifference | None:
        known, loss = self.reference.losses[0], self.other.losses[0]
        if abs(loss - known) <= self.tolerance * max(1.0, abs(known)) / 10:
            return None
        sentence = (
            f"every token's loss agrees, but their mean is {loss:.9g} instead of {known:.9g}: the sum over the ranks, "
            "or the number of tokens that it is divided by"
        )
        return FirstDifference("loss", "loss", abs(loss - known), sentence)

    def _gradient(self) -> FirstDifference | None:
        far = self.far(self.gradients)
        if not far:
            return None
        distance = self.gradients[far[0]]
        sentence = f"in backward order, the gradient of {far[0]} is {_off(distance)}"
        factor = self._common_factor()
        if factor is not None:
            sentence += f"; all gradients are {factor:.6g} times what they should be: a scale or a denominator"
        else:
            rest = f": {', '.join(far[:12])}{', ...' if len(far) > 12 else ''}"
            sentence += f"; {len(far)} of {len(self.gradients)} gradients differ{rest}"
        return FirstDifference("gradient", far[0], distance, sentence)

    def _common_factor(self) -> float | None:
        """Return the factor by which all gradients were multiplied, if that alone is wrong."""
        factors = []
        for name, known in self.reference.gradients.items():
            square = float(np.vdot(known, known))
            factor = float(np.vdot(self.other.gradients[name], known)) / square if square else 1.0
            if not relative(self.other.gradients[name], known * factor) <= self.tolerance:
                return None
            factors.append(factor)
        return factors[0] if max(factors) - min(factors) <= self.tolerance * abs(factors[0]) else None

    def _disagreement(self) -> FirstDifference | None:
        for flaw in self.other.flaws:
            name = flaw.split(": ")[1]
            return FirstDifference(
                "disagreement", name, float("nan"), f"ranks that should hold the same do not: {flaw}"
            )
        return None

    def _later_step(self) -> FirstDifference | None:
        pairs = (
            ("loss", self.reference.losses, self.other.losses),
            ("gradient norm", self.reference.grad_norms, self.other.grad_norms),
        )
        for step in range(len(self.reference.losses)):
            for what, known, values in pairs:
                one, value = (float("nan") if number is None else number for number in (known[step], values[step]))
                distance = abs(value - one) / max(1.0, abs(one))
                if not distance <= self.tolerance:
                    sentence = (
                        f"the first step's gradients agree, but at step {step + 1} the {what} is {value:.9g} instead "
                        f"of {one:.9g}: the update of the weights, or rounding that a large learning rate amplifies"
                    )
                    return FirstDifference("step", f"step {step + 1}", float(distance), sentence)
        return None


def comparison(argv: Sequence[str], world_size: int | None = None, steps: int | None = None) -> Comparison:
    """Return the flags of the one process and of the layout.

    Args:
        argv: flags of `megatron-ext pretrain`.
        world_size: ranks of the layout; default the fewest that it needs, and two where it needs one.
        steps: optimizer steps that both are to take.
    Raises:
        ConfigurationError: the flags cannot work, or train for fewer steps.
    """
    typed = parse(argv).values
    ranks = world_size
    if ranks is None:
        # Experts lie on data-parallel ranks: as many as are needed, whatever their own tensor parallelism is.
        sizes = [typed.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline", "expert")]
        fewest = math.prod(sizes) * typed.get("context_parallel_size", 1)
        ranks = max(int(typed.get("world_size") or fewest), 2)
    values = {name: value for name, value in typed.items() if name not in _LEFT_OUT} | _SAME_FOR_BOTH
    trial = configure([*to_flags(values), "--world-size", str(ranks), "--dry-run", "--device", "cpu"]).config
    if steps is not None and steps > (most := training_steps(trial)):
        raise ConfigurationError(
            f"--steps {steps}: the flags train for {most}; use --steps {most}, or more --train-iters"
        )
    values["global_batch_size"] = trial.training.global_batch_size
    # The one process does without the layout, and without the ways to save memory.
    not_alone = {option.name for option in options() if option.group == "layout" or option.saves_memory}
    alone = {name: value for name, value in values.items() if name not in not_alone}
    changed = [f"without --{name}" for name in ("bf16", "fp16") if typed.get(name)]
    changed += [f"{flag_of(name)} 0" for name in _SAME_FOR_BOTH if typed.get(name) != 0]
    sizes = axis_sizes(trial.layout)
    layout = f"TP {sizes.tp} x PP {sizes.pp} x CP {sizes.cp} x DP {sizes.dp}"
    return Comparison(to_flags(alone), to_flags(values), ranks, tuple(changed), layout)


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return typed values, by field name, as a command line."""
    words: list[str] = []
    for name, value in values.items():
        option = options_by_name()[name]
        if option.is_switch:
            words.append(f"{option.flag}={'true' if value else 'false'}")
        elif option.many:
            words += [option.flag, *(str(item) for item in value)]
        else:
            words += [option.flag, str(value)]
    return words


def prove(
    argv: Sequence[str],
    world_size: int | None = None,
    *,
    steps: int = 3,
    tolerance: float = GRADIENT_TOLERANCE,
    device: str = "cpu",
    sabotage: Callable[[], None] | None = None,
    extensions: Extensions | Callable[[], Extensions] = NONE,
) -> Proof:
    """Train both runs and compare them.

    Args:
        argv: flags of `megatron-ext pretrain`, the layout's among them.
        world_size: see `comparison`.
        steps: optimizer steps of each.
        tolerance: tolerance of outputs and gradients, relative to their norm; a tenth of it for the first loss.
        device: "cpu" or "cuda".
        sabotage: plants a fault in the layout's ranks alone.
        extensions: a user's own parts of both runs, as `record` takes them.
    Raises:
        ConfigurationError: the flags cannot work.
    """
    both = comparison(argv, world_size, steps)
    common: dict[str, Any] = {"outputs": True, "device": device, "extensions": extensions}
    reference = record(both.reference, 1, steps, **common)
    other = record(both.other, both.world_size, steps, sabotage, **common)
    return Proof(reference, other, tolerance)


def relative(values: np.ndarray, reference: np.ndarray) -> float:
    """Return the L2 norm of the difference over the L2 norm of the reference; infinite where only the reference is
    zero."""
    distance = float(np.linalg.norm((values.astype(np.float64) - reference).ravel()))
    norm = float(np.linalg.norm(reference.ravel()))
    if norm == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / norm


def _distances(known: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: relative(values[name], known[name]) for name in known}


def _off(distance: float) -> str:
    return f"{distance:.1e} of its norm off"
