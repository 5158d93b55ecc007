"""Tries draws (`draws.py`): trains each in its layouts and says where it differs from one process.

    trials = Trials(folder, data)
    trials.differences(draw)      # [] where the draw trains, resumes and exports as one process does

Two steps are taken in the first layout, which saves; the second layout resumes from that checkpoint, evaluates, and
exports where a family of Hugging Face has the model's shape. Gathers are poisoned: weights that have not been gathered
are NaN. A draw with a moment to kill at is trained by the program itself, killed, and started again.
"""

import dataclasses
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import ModelConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.plugins.prove.doubles import DISTANCE, UPDATE_DISTANCE, in_doubles
from megatron_ext.plugins.prove.draws import ONE_PROCESS, Draw, Layout
from megatron_ext.plugins.prove.parity import (
    BF16_FACTOR,
    CURVE_TOLERANCE,
    compare,
)
from megatron_ext.plugins.prove.recorded_training import RunRecord, record

BEFORE, AFTER = 2, 2
"""Steps in the first layout, and in the second."""

UPDATE_TOLERANCE = 1e-2
"""Tolerance for the last weights, relative to the distance that the updates have moved them. Elements whose first
gradient is below SIGNIFICANT are left out: Adam divides a gradient by its size, and makes rounding as large as an
update."""

SIGNIFICANT = 1e-3
"""Size of a gradient's element, relative to the root mean square of its tensor."""

NOTHING = 1e-13
"""Norm of a tensor's gradient in fp64, relative to that of the whole gradient, below which it is rounding alone."""

SHORT_FACTOR = 2 * BF16_FACTOR
"""BF16_FACTOR, which is for 20 steps, widened for the few numbers of a draw: the largest of five is less sure."""

TIMEOUT = 300.0
"""Seconds until the ranks of a run are taken for hanging."""


@dataclass(frozen=True)
class Verdict:
    """The result of a draw."""

    problems: tuple[str, ...]
    """Differences from one process, in words; none where it agrees."""

    in_fp64: tuple[str, ...] = ()
    """Differences of the same draw in fp64: none where the others are rounding."""

    exported: bool = False
    """Whether a family of Hugging Face has the model's shape, and the export has been read back."""

    @property
    def fails(self) -> bool:
        """Whether ranks have failed, where the others only have other numbers."""
        return any(" fails: " in problem for problem in self.problems)

    @property
    def is_rounding(self) -> bool:
        """Whether fp64 has none of the differences."""
        return bool(self.problems) and not self.in_fp64


class Trials:
    """Trains draws, and one process of each model once.

    Args:
        folder: where checkpoints and exports are written, and removed.
        data: flags of the data.
        sabotage: plants a fault on the ranks of layouts.
    """

    def __init__(self, folder: Path, data: Sequence[str], sabotage: Callable[[], None] | None = None):
        self._folder, self._data, self._sabotage = folder, list(data), sabotage
        self._alone: dict[tuple[str, ...], RunRecord] = {}

    def with_fault(self, sabotage: Callable[[], None]) -> "Trials":
        """Return trials with a fault on the ranks of layouts, which keep the same single processes."""
        planted = Trials(self._folder, self._data, sabotage)
        planted._alone = self._alone
        return planted

    def verdict(self, draw: Draw) -> Verdict:
        """Return where the draw differs from one process, and which of it is more than rounding."""
        try:
            problems, exported = self._killed(draw) if draw.kill is not None else self._compared(draw)
        except RankError as error:
            text = _last_lines(error)
            return Verdict((text,), (text,))
        if not problems or draw.kill is not None or _in_16_bits(draw) or not all(map(_may_be_rounding, problems)):
            return Verdict(tuple(problems), tuple(problems), exported)
        return Verdict(tuple(problems), tuple(self._in_doubles(draw)), exported)

    def _compared(self, draw: Draw) -> tuple[list[str], bool]:
        """Return where the draw differs from one process, and whether it has been exported."""
        saved, again = self._empty("first"), self._empty("second")
        first = self._train(draw, draw.first, BEFORE, ["--save", str(saved)])
        second = self._train(draw, draw.second, AFTER, ["--load", str(saved), "--save", str(again)])
        changed = [
            f"{name} is not loaded as it was saved"
            for name, weight in first.final_weights.items()
            if not np.array_equal(weight, second.weights[name], equal_nan=True)
        ]
        joined = _joined(first, second)
        alone = self._one_process(draw.model)
        if not _in_16_bits(draw):
            problems = [
                *compare(alone, joined).problems(),
                *_of_numbers(alone, joined),
                *_of_last_weights(alone, joined),
            ]
        else:
            without = tuple(piece for piece in draw.model if not _in_16_bits(replace(draw, model=(piece,))))
            problems = _in_short(self._one_process(without), alone, joined)
        exported, lost = self._exported(draw, again, second)
        return [*changed, *problems, *lost], exported

    def _in_doubles(self, draw: Draw) -> list[str]:
        """Return where the draw differs in fp64, by DISTANCE."""
        try:
            saved = self._empty("first")
            blas = ["--cpu-gemm", "blas"]
            alone = record([*self._flags(draw), *blas], 1, BEFORE + AFTER, in_doubles, timeout=TIMEOUT)
            first, second = (
                record(
                    [*self._flags(draw), *layout.flags, *blas, *more],
                    layout.ranks,
                    steps,
                    self._planted,
                    timeout=TIMEOUT,
                )
                for layout, steps, more in (
                    (draw.first, BEFORE, ["--save", str(saved)]),
                    (draw.second, AFTER, ["--load", str(saved)]),
                )
            )
        except RankError as error:
            return [f"in fp64: {_last_lines(error)}"]
        joined = _joined(first, second)
        # Such a parameter changes no result (the bias of a key's norm moves all scores of a query alike), and an
        # optimizer that divides by the size of its gradient moves it at random.
        silent = _rounded_gradients(alone) & _rounded_gradients(joined)
        joined = replace(
            joined,
            gradients=joined.gradients | {name: alone.gradients[name] for name in silent},
            final_weights=joined.final_weights | {name: alone.final_weights[name] for name in silent},
        )
        found = compare(alone, joined)
        numbers = {"loss": found.loss, "gradient norm": found.grad_norm, "validation loss": found.validation_loss}
        numbers |= {f"first gradient of {name}": distance for name, distance in found.gradients.items()}
        others = [*_of_numbers(alone, joined, DISTANCE), *_of_last_weights(alone, joined, UPDATE_DISTANCE, DISTANCE)]
        return [
            *(f"initial weights differ in fp64: {name}" for name in found.weights),
            *found.flaws,
            *(f"in fp64 {name} is {off:.1e} off" for name, off in numbers.items() if not off <= DISTANCE),
            *(f"in fp64 {problem}" for problem in others),
        ]

    def _planted(self) -> None:
        """Compute in fp64 on a rank, with the fault where there is one."""
        in_doubles()
        if self._sabotage is not None:
            self._sabotage()

    def _train(self, draw: Draw, layout: Layout, steps: int, more: list[str]) -> RunRecord:
        flags = [*self._flags(draw), *layout.flags, *more]
        return record(flags, layout.ranks, steps, self._sabotage, poisons=True, timeout=TIMEOUT)

    def _one_process(self, model: tuple[str, ...]) -> RunRecord:
        """Return the record of one process, of the last two models."""
        if model not in self._alone:
            draw = Draw(model, ONE_PROCESS, ONE_PROCESS)
            while len(self._alone) > 1:
                del self._alone[next(iter(self._alone))]
            self._alone[model] = record(self._flags(draw), 1, BEFORE + AFTER, timeout=TIMEOUT)
        return self._alone[model]

    def _flags(self, draw: Draw) -> list[str]:
        return [*self._data, *draw.flags]

    def _empty(self, name: str) -> Path:
        """Return the path of a folder that does not exist; an old one is deleted."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        return self._folder / name

    def _exported(self, draw: Draw, saved: Path, run: RunRecord) -> tuple[bool, list[str]]:
        """Export a checkpoint, and return whether there is a family for it, and where a run that begins with the export
        in the same layout has other weights, or evaluates otherwise, to the bit."""
        from megatron_ext.plugins.huggingface.exporter import export_huggingface
        from megatron_ext.plugins.huggingface.saved_model import SavedModel

        source = SavedModel(saved)
        try:
            family, config = source.written
        except ConfigurationError:
            return False, []
        folder = export_huggingface(source, self._empty("exported"), with_tokenizer=False).path
        flags = [*self._data, *without_the_model(draw.flags), *draw.second.flags, "--load-hf", str(folder)]
        read = record(flags, draw.second.ranks, 0, timeout=TIMEOUT)
        lost = [
            f"{name} is not exported to {family.model_type} as it was trained"
            for name, known in run.final_weights.items()
            if name in read.weights and not np.array_equal(read.weights[name], known)
        ]
        lost += [
            f"{name} is not exported to {family.model_type}"
            for name in run.final_weights.keys() - read.weights.keys()
            if not name.startswith("mtp.")
        ]
        of_averages = traits_of(config.optimizer).averages or config.optimizer.eval_ema
        if not of_averages and read.validation_loss != run.validation_loss:
            of_export = f"{read.validation_loss} in place of {run.validation_loss}"
            lost.append(f"the export to {family.model_type} has the validation loss {of_export}")
        return True, lost

    def _killed(self, draw: Draw) -> tuple[list[str], bool]:
        """Return where a run that was killed and started again differs from one that nobody has killed."""
        assert draw.kill is not None
        folders = self._empty("first"), self._empty("second")
        steps = (
            f"--train-iters {BEFORE + AFTER} --lr-warmup-iters 2 --save-interval 1 --eval-interval 2 --log-interval 1"
        )
        flags = [
            [*self._flags(draw), *draw.first.flags, *steps.split(), "--save", str(one), "--load", str(one)]
            for one in folders
        ]
        run_ranks(draw.first.ranks, run_program, flags[0], None, timeout=TIMEOUT)
        try:
            run_ranks(draw.first.ranks, run_program, flags[1], draw.kill, timeout=TIMEOUT)
        except RankError as error:
            if "exit code -9" not in str(error):
                raise
        run_ranks(draw.first.ranks, run_program, flags[1], None, timeout=TIMEOUT)
        whole, resumed = map(_rows, folders)
        if whole == resumed:
            return [], False
        return [f"killed at {draw.kill:.2f} of the steps and resumed: {_first_difference(whole, resumed)}"], False


def run_program(flags: list[str], kill: float | None) -> None:
    """Run the program on this rank, and kill the last rank at a moment of its steps.

    Args:
        kill: the moment, as a share of the steps; None: nobody is killed.
    Raises:
        RuntimeError: the program ends with another exit code than 0.
    """
    from megatron_ext.cli.pretrain import main
    from megatron_ext.resilience.process_end import RunStatus, run_guarded
    from megatron_ext.train.trainer import Callback, Trainer

    class Killer(Callback):
        """Starts a clock when the step begins in which the rank dies."""

        def on_step_begin(self, trainer: Trainer) -> None:
            moment = (kill or 0.0) * (BEFORE + AFTER)
            if trainer.run.state.iteration == int(moment):
                threading.Timer(moment % 1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()

    dies = kill is not None and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    status = RunStatus(rank=int(os.environ["RANK"]))
    own: dict[str, Any] = {"callbacks": [Killer()]} if dies else {}
    code = run_guarded(lambda: main([*flags, "--device", "cpu", "--num-workers", "0"], status, **own), status)
    if code != 0:
        raise RuntimeError(f"the program ended with exit code {code}")


def without_the_model(flags: Sequence[str]) -> list[str]:
    """Return the flags, with their values, that say nothing of the model: its data, its optimizer, its precision."""
    # No file says the router's type, nor the padding of the vocabulary, over which the loss's sums go in another order.
    of_model = {one.name for one in dataclasses.fields(ModelConfig)} - {
        "moe_router_dtype",
        "make_vocab_size_divisible_by",
    }
    kept, keeps = list[str](), True
    for word in flags:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            keeps = name not in of_model
        if keeps:
            kept.append(word)
    return kept


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics, without times, rates and memory."""
    from megatron_ext.telemetry.metrics import MEASURED_FIELDS
    from megatron_ext.untrusted.metrics_rows import read_rows

    rows = read_rows(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in MEASURED_FIELDS} for row in rows]


def _first_difference(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    if len(rows) != len(others):
        return f"{len(others)} rows of metrics in place of {len(rows)}"
    row, other = next((one, two) for one, two in zip(rows, others, strict=True) if one != two)
    name = next(name for name in {**row, **other} if row.get(name) != other.get(name))
    return f"{name} of iteration {row.get('iteration')} is {other.get(name)} in place of {row.get(name)}"


def _joined(first: RunRecord, second: RunRecord) -> RunRecord:
    """Return the record of a run that was resumed in the middle."""
    return replace(
        first,
        losses=first.losses + second.losses,
        grad_norms=first.grad_norms + second.grad_norms,
        numbers=first.numbers + second.numbers,
        validation_loss=second.validation_loss,
        flaws=first.flaws + second.flaws,
        final_weights=second.final_weights,
    )


def _of_numbers(alone: RunRecord, other: RunRecord, tolerance: float = CURVE_TOLERANCE) -> list[str]:
    """Return which auxiliary numbers differ by more than the tolerance."""
    problems = []
    for step, (known, numbers) in enumerate(zip(alone.numbers, other.numbers, strict=True), 1):
        if known.keys() != numbers.keys():
            problems.append(f"step {step} has the numbers {sorted(numbers)} in place of {sorted(known)}")
            continue
        distances = {name: abs(numbers[name] - value) / max(1.0, abs(value)) for name, value in known.items()}
        problems += [
            f"{name} of step {step} is {distance:.1e} off (tolerance {tolerance:.0e})"
            for name, distance in distances.items()
            if not distance <= tolerance
        ]
    return problems


def _rounded_gradients(run: RunRecord) -> set[str]:
    """Return the parameters whose first gradient in fp64 is rounding alone: not zero, but next to nothing."""
    norms = {name: float(np.linalg.norm(gradient)) for name, gradient in run.gradients.items()}
    least = NOTHING * math.hypot(*norms.values())
    return {name for name, norm in norms.items() if 0 < norm < least}


def _of_last_weights(
    alone: RunRecord, other: RunRecord, of_updates: float = UPDATE_TOLERANCE, of_weights: float = CURVE_TOLERANCE
) -> list[str]:
    """Return which weights have been updated otherwise, by the sum of two tolerances: see UPDATE_TOLERANCE."""
    problems = []
    for name, known in alone.final_weights.items():
        gradient, begun = alone.gradients[name], alone.weights[name]
        counts = np.abs(gradient) > SIGNIFICANT * np.sqrt(np.mean(np.square(gradient)))
        off = np.linalg.norm((other.final_weights[name] - known)[counts])
        moved = np.linalg.norm((known - begun)[counts])
        if not off <= of_updates * moved + of_weights * np.linalg.norm(known[counts]):
            distance = f"{off / moved:.1e} of its updates off" if moved else "not where it began"
            problems.append(f"the last weight {name} is {distance} (tolerance {of_updates:g})")
    return problems


def _in_short(fp32: RunRecord, alone: RunRecord, other: RunRecord) -> list[str]:
    """Return where a layout in 16 bits is farther off than one process in 16 bits is from fp32."""
    found = compare(alone, other)
    own, far = (_gradient_distance(fp32, one) for one in (alone, other))
    texts = [*(f"initial weights differ: {name}" for name in found.weights), *found.flaws]
    if not far <= BF16_FACTOR * own:
        texts.append(f"first gradients are {far:.1e} off fp32, and {own:.1e} in one process (factor {BF16_FACTOR:g})")
    curves = [[*one.losses, one.validation_loss] for one in (fp32, alone, other)]
    own, far = (float(np.max(np.abs(np.array(one, float) - np.array(curves[0], float)))) for one in curves[1:])
    if not far <= SHORT_FACTOR * own:
        texts.append(f"losses are {far:.1e} off fp32, and {own:.1e} in one process (factor {SHORT_FACTOR:g})")
    return texts


def _gradient_distance(known: RunRecord, other: RunRecord) -> float:
    """Return the root mean square over tensors of their first gradients' relative distance."""
    distances = [min(one, 1.0) for one in compare(known, replace(other, weights=known.weights)).gradients.values()]
    return float(np.sqrt(np.mean(np.square(distances))))


def _in_16_bits(draw: Draw) -> bool:
    return bool({"--bf16", "--fp16"} & {*draw.flags})


def _may_be_rounding(problem: str) -> bool:
    """Return whether rounding could explain the problem."""
    return " off (tolerance" in problem


def _last_lines(error: RankError) -> str:
    """Return the last lines of the traceback of the rank that failed first."""
    rank, text = error.tracebacks[0]
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return f"rank {rank} fails: {' | '.join(lines[-3:])}"[:600]
