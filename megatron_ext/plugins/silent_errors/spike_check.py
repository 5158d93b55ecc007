"""--spike-threshold runs the batch of a loss spike again before its update, and says whether data or hardware made it.

What it writes into <save>/spike-<iteration>/ when the losses are the same once more:

    batch.jsonl     every microbatch: its samples, who computed it, and its loss in each run
    samples.jsonl   the samples of the microbatches whose loss is above the threshold, with their text; --skip-samples
                    takes this file
"""

import json
import math
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from megatron_ext.config.schema import flags_of
from megatron_ext.data.sampler import microbatch_sample_ids
from megatron_ext.data.samples import describe_sample
from megatron_ext.durable import replacing
from megatron_ext.errors import NumericError, StorageError
from megatron_ext.plugins.silent_errors.flags import SilentErrorFlags
from megatron_ext.plugins.silent_errors.replicas import (
    ReplicaCheck,
    check_data_parallel_replicas,
    check_model_parallel_copies,
)
from megatron_ext.plugins.silent_errors.spikes import Place, Verdict, judge, who
from megatron_ext.terminal import warn
from megatron_ext.train.datasets import tokenizer_of_run
from megatron_ext.train.random_state import RandomState, random_state
from megatron_ext.train.run import Run
from megatron_ext.train.step import BatchLoss
from megatron_ext.train.trainer import Callback, Trainer

_WINDOW, _LEAST = 100, 10
"""Steps whose losses make the median, and how many there must be."""
_TEXTS = 64
"""Samples whose text is written, of one spike."""


class SpikeCheck(Callback):
    """Looks at the loss of every step before its update.

    The median begins anew with each start of the program; a spike changes no bit of the training, unless it ends it.

    Args:
        threshold: how many times the median a loss must be.
    """

    phase = "a loss spike's second run"

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._before: RandomState = None

    def on_step_begin(self, trainer: Trainer) -> None:
        self._before = random_state(trainer.run)

    def on_loss(self, trainer: Trainer, loss: BatchLoss) -> None:
        """Judge the loss.

        Raises:
            NumericError: another run of the same samples has another loss, on every rank; it names the suspect ranks.
        """
        usual = median(self._losses) if len(self._losses) >= _LEAST else None
        if math.isfinite(loss.mean):
            self._losses.append(loss.mean)
        if math.isfinite(loss.mean) and (usual is None or loss.mean <= self._threshold * usual):
            return
        run = trainer.run
        verdict = judge(run, loss.of_microbatches, loss.samples, self._before)
        what = f"the loss of iteration {run.state.iteration + 1} is {loss.mean:.6g}"
        if usual is not None:
            what += f", {loss.mean / usual:.3g} times the median of the last {min(len(self._losses), _WINDOW)} steps"
        if verdict.differing:
            raise _hardware(run, what, verdict)
        _data(run, what, verdict, loss, self._threshold * usual if usual is not None else math.inf)


def _hardware(run: Run, what: str, verdict: Verdict) -> NumericError:
    """Return the error that names who is wrong. Collective."""
    names, last_good = who(run), run.state.iteration
    position = verdict.differing[0]
    told = ", ".join(f"{one.loss:.6g} on {names[one.replica]}" for one in verdict.results[position])
    weights = ""
    try:  # weights that differ explain it, and name the parameter
        # The interval is set where there are replicas.
        if flags_of(run.config.training, SilentErrorFlags).check_weight_hash_across_dp_replicas_interval:
            check_data_parallel_replicas(run, last_good + 1, last_good)
        check_model_parallel_copies(run, last_good + 1, last_good)
    except NumericError as error:
        weights = f" Their weights differ: {str(error).partition('; found at')[0]}."
    return NumericError(
        f"{what}, and the same samples and weights give another loss when they are computed again: microbatch "
        f"{position.microbatch} of data-parallel rank {position.replica} has {told}. Suspect: "
        f"{', then '.join(names[suspect] for suspect in verdict.suspects)}.{weights} This iteration changed no weight. "
        "Next: take that machine out and resume from the last checkpoint"
    )


def _data(run: Run, what: str, verdict: Verdict, loss: BatchLoss, limit: float) -> None:
    """Write down which samples it was. Rank 0 does."""
    if run.rank != 0:
        return
    alone = run.groups.dp.size() == 1
    where = "the same ranks, which says nothing of a fault that repeats itself" if alone else "other ranks"
    told = f"{what}; the same samples again, on {where}, have the same loss: it is the data, or the weights"
    if run.config.checkpoint.save is None:
        warn(f"{told}. Samples {loss.samples.start}-{loss.samples[-1]}; with --save they are written down")
        return
    folder = Path(run.config.checkpoint.save) / f"spike-{run.state.iteration + 1}"
    rows = [_row(run, loss, position, verdict) for position in sorted(verdict.results)]
    rows = [row for row in rows if any(sample not in run.loaders.skipped for sample in row["samples"])]
    worst = max(rows, key=lambda row: _order(row["losses"][0]))
    guilty = [row for row in rows if row is worst or _order(row["losses"][0]) > limit]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "batch.jsonl", rows)
        _write(folder / "samples.jsonl", _samples(run, guilty))
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}. Free space there") from error
    warn(
        f"{told}. Its samples are in {folder}; to leave them out, resume from a checkpoint of before with "
        f"--skip-samples {folder / 'samples.jsonl'}"
    )


def _row(run: Run, loss: BatchLoss, position: Place, verdict: Verdict) -> dict[str, Any]:
    samples = microbatch_sample_ids(
        loss.samples.start,
        position.microbatch,
        micro_batch_size=run.config.training.micro_batch_size,
        dp_rank=position.replica,
        dp_size=run.groups.dp.size(),
    )
    runs = verdict.results[position]
    return {
        "iteration": run.state.iteration + 1,
        "microbatch": position.microbatch,
        "samples": samples,
        "data_parallel_ranks": [one.replica for one in runs],
        "losses": [one.loss for one in runs],
    }


def _order(loss: float) -> float:
    """Return a loss for a comparison: NaN is the worst."""
    return math.inf if math.isnan(loss) else loss


def _samples(run: Run, guilty: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples of some microbatches, the worst microbatch first, with the text of the first of them."""
    tokenizer, train = tokenizer_of_run(run.config), run.loaders.samples
    rows = []
    for row in sorted(guilty, key=lambda row: -_order(row["losses"][0])):
        for sample in row["samples"]:
            if sample in run.loaders.skipped:
                continue
            entry = {"sample": sample, "loss_of_microbatch": row["losses"][0], "from": describe_sample(train, sample)}
            if len(rows) < _TEXTS:
                entry["text"] = tokenizer.decode([int(token) for token in train[sample]["tokens"]])
            rows.append(entry)
    return rows


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with replacing(path) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def callbacks(run: Run) -> list[Callback]:
    """Return the check of replicas, and that of losses where --spike-threshold asks for it."""
    flags = flags_of(run.config.training, SilentErrorFlags)
    intervals = flags.check_weight_hash_across_dp_replicas_interval, flags.check_replicated_weights_interval
    spikes = [] if flags.spike_threshold is None else [SpikeCheck(flags.spike_threshold)]
    return [ReplicaCheck(*intervals), *spikes]


CALLBACKS = (callbacks,)
