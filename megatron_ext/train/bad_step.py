"""Says why the numbers of a step end the run: whose gradient it was, or that no token counts."""

import math
from collections.abc import Sequence

import torch

from megatron_ext.errors import DataError, NumericError
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parallel.rows import local_part
from megatron_ext.resilience.numeric import first_bad
from megatron_ext.sharding.gradients import gradients_of_update
from megatron_ext.train.gradient_watch import Evidence, Finding
from megatron_ext.train.run import Run
from megatron_ext.train.step_allreduce import Summed


def check_numbers(run: Run, summed: Summed, global_batch: int, evidence: Evidence) -> None:
    """Raise where the step must not have changed a weight. Collective where it raises.

    Args:
        summed: of all ranks.
        global_batch: samples of the step, which `run.state` does not count.
        evidence: this rank's, of the step.
    Raises:
        NumericError: the loss or a gradient is NaN or infinite on some rank.
        DataError: no token counts in the loss.
    """
    if run.config.training.no_check_for_nan_in_loss_and_grad:
        return
    if summed.tokens == 0:
        raise _nothing_counts(run, global_batch)
    if not math.isfinite(summed.loss):
        raise _numeric_error(run, "loss", evidence)
    if summed.bad_ranks or 0 < summed.overflowed_ranks < run.world_size:
        raise _numeric_error(run, "gradient", evidence)


def _nothing_counts(run: Run, global_batch: int) -> DataError:
    return DataError(
        f"iteration {run.state.iteration + 1} (samples from {run.state.consumed_samples}): not one token of its "
        f"{global_batch} samples counts in the loss. Look at them (tools/inspect_dataset.py sample), and give a larger "
        "--global-batch-size or other data"
    )


def _numeric_error(run: Run, what: str, evidence: Evidence) -> NumericError:
    """Ask every rank what it saw, and name the cause. Called by all ranks."""
    seen: list[tuple[Finding | None, ...]] = [()] * run.world_size
    torch.distributed.all_gather_object(
        seen, (_bad_weight(run), run.gradient_watch.diagnose(evidence), _bad_reduced(run, evidence))
    )
    weight, gradient, reduced = (_cause(findings) for findings in zip(*seen, strict=True))
    when = f"iteration {run.state.iteration + 1} (samples from {run.state.consumed_samples})"
    unchecked = "--no-check-for-nan-in-loss-and-grad goes on regardless."
    if weight is not None:
        return NumericError(
            f"{weight}, at the start of {when}: an earlier update, or the memory of that rank, made it so. Next: "
            f"resume from a checkpoint that was saved before it (--ckpt-step); if it happens again at the same step, "
            f"lower --lr; if not, suspect the hardware. {unchecked}"
        )
    where = f"the {what} became bad between the ranks: every rank's own part is finite"
    return NumericError(
        f"{gradient or reduced or where}, {when}. This iteration changed no weight. Next: resume from the last "
        "checkpoint; if it happens again at the same step, lower --lr or look at those samples; if not, suspect the "
        f"hardware. {unchecked}"
    )


def _cause(findings: Sequence[Finding | None]) -> str | None:
    """Return of what the ranks found the cause of the rest: what a backward pass comes to first, on the lowest rank."""
    causes = [(finding.position, -rank, finding.text) for rank, finding in enumerate(findings) if finding is not None]
    if not causes:
        return None
    _, negative_rank, text = max(causes)
    return f"rank {-negative_rank}: {text}"


def _bad_weight(run: Run) -> Finding | None:
    """Return the first weight of this rank, in the order of a forward pass, that was bad before this step.
    Collective."""
    with run.gathered_parameters():
        bad = first_bad((name, local_part(weight).detach()) for name, weight in global_named_parameters(run.chunks))
    return bad and Finding((0, 0), f"{bad.nan} NaN and {bad.inf} infinite values in the weight {bad.name}")


def _bad_reduced(run: Run, evidence: Evidence) -> Finding | None:
    if not run.gradient_watch.is_of_these_gradients(evidence):
        return None
    return run.gradient_watch.in_reduced_gradients(gradients_of_update(run.sharding.parts(run.optimizer)))
