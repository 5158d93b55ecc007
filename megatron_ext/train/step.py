"""One optimizer step: microbatches -> pipeline schedule -> gradients -> update."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.config.batch import num_microbatches
from megatron_ext.config.schema import Config
from megatron_ext.data.batch import Batch
from megatron_ext.errors import NumericError
from megatron_ext.model.loss import token_loss
from megatron_ext.model.moe import take_auxiliary_losses
from megatron_ext.optim.offload import finish_update
from megatron_ext.optim.row_shards import clip_gradients
from megatron_ext.train.run import Run


@dataclass(frozen=True)
class AuxiliaryLosses:
    """What the routers of a mixture of experts add to the loss, each a mean over layers and microbatches, without its
    coefficient. None where it is not part of the loss."""

    load_balancing: float | None
    z: float | None


@dataclass(frozen=True)
class StepResult:
    """What a step did. Equal on every rank."""

    loss: float
    """Mean loss per token over the global batch, in nats."""

    tokens: int
    """Tokens that counted in the loss."""

    global_batch_size: int

    updated: bool
    """False when the fp16 loss scale skipped the update."""

    grad_norm: float | None
    """L2 norm of the global gradient before clipping; None for a skipped step."""

    loss_scale: float
    num_zeros: float | None
    auxiliary_losses: AuxiliaryLosses | None = None
    """Of a mixture of experts."""


def train_step(run: Run, global_batch: int, before_update: Callable[[], None] = lambda: None) -> StepResult:
    """Compute the gradients of the next `global_batch` samples and update the weights.

    Args:
        before_update: called between the two.
    Raises:
        NumericError: the loss or a gradient is NaN or infinite on some rank (unless the check is off); no weight
            has been changed then. An overflow that the dynamic loss scale handles is no error.
    """
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    run.gradient_watch.reset()
    microbatches = run.loaders.train.global_batch(
        run.state.consumed_samples, num_microbatches(run.config, global_batch)
    )
    loss, tokens = run_schedule(run, microbatches, forward_only=False)
    auxiliary = _auxiliary_losses(run, len(microbatches)) if run.config.model.num_experts is not None else None
    before_update()
    checked = not run.config.training.no_check_for_nan_in_loss_and_grad
    overflow = run.optimizer.prepare_grads()
    loss_scale = float(run.optimizer.get_loss_scale().item())
    if checked and not math.isfinite(loss):
        raise _numeric_error(run, "loss")
    if overflow:
        return StepResult(loss, tokens, global_batch, False, None, loss_scale, None, auxiliary)
    grad_norm = float(run.optimizer.get_grad_norm())
    if checked and not math.isfinite(grad_norm):
        raise _numeric_error(run, "gradient")
    clip = run.config.optimizer.clip_grad
    if clip > 0.0:
        for optimizer in run.optimizer.chained_optimizers:
            clip_gradients(optimizer, clip, grad_norm)
    num_zeros = run.optimizer.count_zeros() if run.config.logging.log_num_zeros_in_grad else None
    run.optimizer.step_with_ready_grads()
    finish_update(run.optimizer)
    return StepResult(loss, tokens, global_batch, True, grad_norm, loss_scale, num_zeros, auxiliary)


def run_schedule(run: Run, microbatches: list[Batch], *, forward_only: bool) -> tuple[float, int]:
    """Run megatron-core's schedule over `microbatches` on every stage.

    Returns:
        The mean loss per token over the microbatches of all ranks (NaN where no token counts), and the number of
        those tokens.
    """
    config = run.config
    reports = get_forward_backward_func(run.groups.pp.size(), _virtual_size(config))(
        forward_step_func=_forward_step,
        data_iterator=[(batch.to(run.device.torch_device) for batch in microbatches) for _ in run.chunks],
        model=list(run.chunks),
        num_microbatches=len(microbatches),
        seq_length=config.model.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        forward_only=forward_only,
        pg_collection=run.groups,
        p2p_communicator=run.p2p,
    )
    # One vector carries the loss from the last stage to every rank; tensor-parallel ranks hold the same loss.
    total = torch.zeros(2, dtype=torch.float64, device=run.device.torch_device)
    if run.is_last_stage and run.groups.tp.rank() == 0:
        total += torch.stack([report["lm loss"] for report in reports]).sum(dim=0, dtype=torch.float64)
    run.gradient_watch.loss_is_finite = bool(torch.isfinite(total[0]))
    if run.world_size > 1:
        torch.distributed.all_reduce(total)
    loss_sum, tokens = total.tolist()
    return (loss_sum / tokens if tokens else math.nan), int(tokens)


def _auxiliary_losses(run: Run, microbatches: int) -> AuxiliaryLosses:
    """Collect what the routers of all ranks recorded in this step. Collective."""
    total = torch.tensor(take_auxiliary_losses(run.groups), dtype=torch.float64, device=run.device.torch_device)
    if run.world_size > 1:
        torch.distributed.all_reduce(total)
    model = run.config.model
    load_balancing, z = (total / (microbatches * model.num_layers)).tolist()
    return AuxiliaryLosses(
        load_balancing=load_balancing if model.load_balancing_coefficient else None,
        z=z if model.moe_z_loss_coeff is not None else None,
    )


def _virtual_size(config: Config) -> int | None:
    size = config.layout.virtual_pipeline_model_parallel_size
    return size if size > 1 else None


def _forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """megatron-core's forward_step_func: run one model chunk on its next microbatch."""
    batch = next(batches)
    output = model(batch.tokens, batch.position_ids, labels=batch.labels, documents=batch.documents)
    # A stage before the last has no mask, and the engine never calls its loss.
    return output, partial(token_loss, cast(torch.Tensor, batch.loss_mask))


def _numeric_error(run: Run, what: str) -> NumericError:
    """Ask every rank what it saw, and name the first that was wrong. Called by all ranks."""
    findings: list[str | None] = [None] * run.world_size
    torch.distributed.all_gather_object(findings, run.gradient_watch.diagnose())
    where = next(
        (f"rank {rank}: {finding}" for rank, finding in enumerate(findings) if finding),
        f"the {what} became bad between the ranks: every rank's own part is finite",
    )
    return NumericError(
        f"{where}, iteration {run.state.iteration + 1} (samples from {run.state.consumed_samples}). No weight was "
        "changed. Next: resume from the last checkpoint; if it happens again at the same step, lower --lr or look at "
        "those samples; if not, suspect the hardware. --no-check-for-nan-in-loss-and-grad goes on regardless."
    )
