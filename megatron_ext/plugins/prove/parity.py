"""Any layout has one loss curve: runs are compared here with one process.

    experiment = Experiment(write_corpus(folder))
    case = CASES["TP2 SP, tied"]
    print(compare(experiment.reference(case.model), experiment.train(case)).problems())     # [] when they agree

Recipe and tolerances are the ones in the project's promise of one loss curve, in fp32 with dropout 0.

Writes a small corpus whose loss masks differ from sample to sample, for comparing runs on real .bin/.idx files.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.plugins.prove.cases import Case
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.recorded_training import RunRecord, record
from megatron_ext.tokenizer.simple import ByteTokenizer

STEPS = 20
FIRST_LOSS_TOLERANCE = 1e-6
"""Tolerance of the loss at the first step, in nats per token."""

GRADIENT_TOLERANCE = 1e-5
"""Tolerance of gradients: L2 norm of the difference of a tensor's first gradient over the norm of that gradient."""

CURVE_TOLERANCE = 1e-5
"""Tolerance over all steps: losses in nats per token, gradient norms, and the validation loss after them."""

BF16_FACTOR = 2.0
"""Tolerance of a bf16 curve, in units of one process's own distance between bf16 and fp32."""


class Experiment:
    """Trains cases and the single processes that they are compared with, each of these once.

    Args:
        data: flags of the data, from `verify.corpus.write_corpus`.
        steps: optimizer steps of every run.
    """

    def __init__(self, data: Sequence[str], steps: int = STEPS):
        self._data = list(data)
        self._steps = steps
        self.reference = functools.cache(self._reference)

    def train(self, case: Case, *, bf16: bool = False, sabotage: Callable[[], None] | None = None) -> RunRecord:
        """Return the record of a case; `sabotage` plants a fault on every rank before the run is built."""
        return record([*self._flags(case.model, bf16), *case.flags], case.world_size, self._steps, sabotage)

    def _reference(self, model: str, *, bf16: bool = False) -> RunRecord:
        """Return the record of one process."""
        return record(self._flags(model, bf16), 1, self._steps)

    def _flags(self, model: str, bf16: bool) -> list[str]:
        return [*RECIPE.split(), *MODELS[model].split(), *self._data, *(["--bf16"] if bf16 else [])]


@dataclass(frozen=True)
class Differences:
    """Reports how far a run is from its reference. NaN, which nothing may be, is beyond every tolerance."""

    weights: tuple[str, ...]
    """Names of tensors whose initial values are not equal bit for bit."""

    flaws: tuple[str, ...]
    """Flaws of the run by itself: see `RunRecord.flaws`."""

    gradients: dict[str, float]
    """Distance of the first gradients over the norm of the reference's, by tensor."""

    first_loss: float
    loss: float
    """Largest difference of the losses over the steps."""
    grad_norm: float
    """Largest difference of the gradient norms over the steps."""
    validation_loss: float

    @property
    def worst_gradient(self) -> str:
        """Name of the tensor whose gradient is farthest off."""
        return max(self.gradients, key=lambda name: np.nan_to_num(self.gradients[name], nan=np.inf))

    @property
    def none(self) -> bool:
        """Whether the runs are equal bit for bit."""
        distances = (self.first_loss, self.loss, self.grad_norm, self.validation_loss, *self.gradients.values())
        return not self.weights and not self.flaws and all(distance == 0.0 for distance in distances)

    def problems(self) -> list[str]:
        """Return the differences beyond the tolerances of fp32, in words; empty when the runs agree."""
        texts = [f"initial weights differ: {name}" for name in self.weights]
        texts += self.flaws
        texts += [
            f"first gradient of {name} is {distance:.1e} of its norm off (tolerance {GRADIENT_TOLERANCE:.0e})"
            for name, distance in self.gradients.items()
            if not distance <= GRADIENT_TOLERANCE
        ]
        for what, distance, tolerance in (
            ("first loss", self.first_loss, FIRST_LOSS_TOLERANCE),
            ("loss", self.loss, CURVE_TOLERANCE),
            ("gradient norm", self.grad_norm, CURVE_TOLERANCE),
            ("validation loss", self.validation_loss, CURVE_TOLERANCE),
        ):
            if not distance <= tolerance:
                texts.append(f"{what} is {distance:.1e} off (tolerance {tolerance:.0e})")
        return texts


def compare(reference: RunRecord, other: RunRecord) -> Differences:
    """Return the distance of `other` from `reference`, two runs of one model on the same data."""
    assert reference.weights.keys() == other.weights.keys(), "two different models"
    assert reference.gradients.keys() == other.gradients.keys() == reference.weights.keys()
    return Differences(
        weights=tuple(n for n in reference.weights if not np.array_equal(reference.weights[n], other.weights[n])),
        flaws=other.flaws,
        gradients={name: _relative(other.gradients[name], known) for name, known in reference.gradients.items()},
        first_loss=abs(other.losses[0] - reference.losses[0]),
        loss=farthest(other.losses, reference.losses),
        grad_norm=farthest(other.grad_norms, reference.grad_norms),
        validation_loss=farthest([other.validation_loss], [reference.validation_loss]),
    )


def farthest(curve: Sequence[float | None], other: Sequence[float | None]) -> float:
    """Return the largest distance of two curves of the same length; NaN where one of them has no number."""
    assert len(curve) == len(other)
    return float(np.max(np.abs(np.array(curve, np.float64) - np.array(other, np.float64))))


def _relative(gradient: np.ndarray, reference: np.ndarray) -> float:
    distance = float(np.linalg.norm(gradient.astype(np.float64) - reference))
    norm = float(np.linalg.norm(reference))
    if norm == 0.0:  # to be met exactly
        return 0.0 if distance == 0.0 else math.inf
    return distance / norm


def bf16_distance(fp32: RunRecord, bf16: RunRecord, other: RunRecord) -> tuple[float, float]:
    """Return how far a layout's bf16 curve is from one process, training losses and validation loss together.

    Args:
        fp32: record of one process.
        bf16: record of one process in bf16.
        other: record of the layout in bf16.
    Returns:
        The larger of its distances from the two, and one process's own distance between bf16 and fp32.
    """
    own = farthest(_curve(bf16), _curve(fp32))
    return max(farthest(_curve(other), _curve(known)) for known in (fp32, bf16)), own


def _curve(run: RunRecord) -> list[float | None]:
    return [*run.losses, run.validation_loss]


SEQ_LENGTH = 32
TRAINING_SAMPLES = 128
VALIDATION_SAMPLES = 13
"""Number of samples, no multiple of any batch: the last global batch of an evaluation is a remainder."""

_LONGEST_DOCUMENT = 3 * SEQ_LENGTH


def write_corpus(folder: Path, validation_samples: int = VALIDATION_SAMPLES) -> list[str]:
    """Write training and validation data below `folder`.

    Documents have 1 to 96 tokens, a third of them at most 2. With --eod-mask-loss some samples therefore have many
    more tokens that count than others, and so have the data-parallel ranks.

    Args:
        folder: where the files are written.
        validation_samples: what an evaluation of one pass reads.
    Returns:
        The flags that train on it: sample length, paths, tokenizer, the loss mask, and an evaluation of one pass.
    """
    _write(folder / "train", TRAINING_SAMPLES, split=0)
    _write(folder / "valid", validation_samples, split=1)
    paths = f"--train-data-path {folder}/train --valid-data-path {folder}/valid --data-cache-path {folder}/cache"
    return f"--seq-length {SEQ_LENGTH} {paths} --tokenizer-type ByteTokenizer --eod-mask-loss --full-validation".split()


def _write(prefix: Path, samples: int, split: int) -> None:
    """Write exactly `samples` samples of SEQ_LENGTH tokens and their labels."""
    left = samples * SEQ_LENGTH + 1
    random = np.random.default_rng(split)
    text = MockDataset(
        vocab_size=ByteTokenizer.eod, seq_length=_LONGEST_DOCUMENT, num_samples=left, seed=0, split=split
    )
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(left):
            longest = 2 if random.random() < 1 / 3 else _LONGEST_DOCUMENT
            words = text[number]["tokens"][: random.integers(1, longest + 1)]
            document = np.append(words, ByteTokenizer.eod)[:left].astype(np.uint16)
            writer.add_tokens(document.tobytes(), [len(document)])
            left -= len(document)
            if left == 0:
                break
