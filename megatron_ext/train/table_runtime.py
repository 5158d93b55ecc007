"""Runs a pipeline's schedule that is a table (`pipeline_tables.py`), in place of megatron-core's own function.

A rank goes through its row: a pass of one microbatch through one of its model chunks, a send or a receive. Passes are
megatron-core's own steps (`forward_step`, `backward_step`), so that losses, scales, counts and timers are the same as
with its own schedules. `device/split_backward.py` runs the halves of backward passes.

Gradients are reduced once a chunk has its last one, next to the passes of other chunks where the flags ask for overlap.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
    get_tensor_shapes,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_ext.cost.schedule import TableSchedule
from megatron_ext.device.split_backward import Products, kept_products, splits
from megatron_ext.model.names import global_named_parameters
from megatron_ext.pipeline_tables import Action, Rows, with_messages
from megatron_ext.terminal import say

_FORWARD, _BACKWARD = "F", "B"


class TableRuntime:
    """Calls of the runtime take the arguments of megatron-core's forward_backward functions, and return the same
    results.

    Args:
        schedule_for: returns the table of a training step for a number of microbatches.
        without_gradients: returns that of an evaluation.
    """

    def __init__(self, schedule_for: Callable[[int], TableSchedule], without_gradients: Callable[[int], TableSchedule]):
        self._schedule_for, self._without_gradients = schedule_for, without_gradients
        self._rows = functools.cache(self._rows_for)
        self._told = False

    def _rows_for(self, microbatches: int, forward_only: bool) -> tuple[TableSchedule, Rows]:
        """Return the schedule, and the actions of every rank, messages included."""
        schedule = (self._without_gradients if forward_only else self._schedule_for)(microbatches)
        stages = range(schedule.stages * schedule.chunks)
        return schedule, with_messages(schedule.rows, tuple(map(schedule.rank_of, stages)))

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Sequence[Iterator[Any]],
        model: Sequence[Any],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool,
        pg_collection: ProcessGroupCollection,
        p2p_communicator: Any,
    ) -> list[Any]:
        """Run the passes of a step and reduce the gradients. Collective."""
        schedule, rows = self._rows(num_microbatches, forward_only)
        config: Any = get_model_config(model[0])
        (shape,) = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=seq_length,
            config=config,
            tp_group=pg_collection.tp,
            cp_group=pg_collection.cp,
        )
        step = _Step(
            schedule=schedule,
            row=rows[pg_collection.pp.rank()],
            groups=pg_collection,
            chunks=model,
            config=config,
            batches=data_iterator,
            forward=forward_step_func,
            shape=shape,
            microbatches=num_microbatches,
            forward_only=forward_only,
        )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        step.run()
        if splits() and not forward_only and not self._told:
            self._told = True
            _tell_unsplit(step)
        if not forward_only and config.finalize_model_grads_func is not None:
            if schedule.v_shaped:  # megatron-core takes the count of the group's last rank
                torch.distributed.all_reduce(step.tokens, group=pg_collection.pp)
            config.finalize_model_grads_func(list(model), step.tokens, pg_collection=pg_collection)
            if schedule.v_shaped:
                _add_tied(model)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return step.reports


@dataclass
class _Step:
    """One step of this rank, under way."""

    schedule: TableSchedule
    row: tuple[Action, ...]
    groups: ProcessGroupCollection
    chunks: Sequence[Any]
    config: Any
    batches: Sequence[Iterator[Any]]
    forward: Callable[..., Any]
    shape: tuple[int, ...]
    microbatches: int
    forward_only: bool
    reports: list[Any] = field(default_factory=list)
    arrived: dict[tuple[int, str, int], tuple[torch.Tensor, Any]] = field(default_factory=dict)
    """Inputs and output gradients by stage, F or B, and microbatch, each with the receive to wait for."""
    leaving: dict[tuple[int, str, int], torch.Tensor] = field(default_factory=dict)
    """Outputs and input gradients to be sent, by the same keys."""
    sent: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)
    """Input and output of a microbatch in a stage, between its forward and its backward pass."""
    products: dict[tuple[int, int], Products] = field(default_factory=dict)
    """Gradients of weights that are due."""
    split: set[int] = field(default_factory=set)
    """The weights whose gradients were made by themselves, by id()."""

    def __post_init__(self) -> None:
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self.last = self.schedule.stages * self.schedule.chunks - 1
        self.left = [self.microbatches] * len(self.chunks)

    def run(self) -> None:
        """Do everything in this rank's row."""
        functions = self.config.no_sync_func
        with ExitStack() as unsynchronized:
            for no_sync in functions if isinstance(functions, list) else [functions] if functions else []:
                unsynchronized.enter_context(no_sync())
            for action in self.row:
                getattr(self, f"_{action.kind.partition('_')[0].lower()}")(action)
                self.sent = [(work, tensor) for work, tensor in self.sent if not work.is_completed()]
            for work, _ in self.sent:
                work.wait()
        left = [*self.arrived, *self.leaving, *self.held, *self.products]
        assert not left, f"a table was checked, and does not use {left}"

    def _f(self, action: Action) -> None:
        stage, _, microbatch = action
        input_ = None if stage == 0 else self._take(stage, _FORWARD, microbatch)
        if input_ is not None and not self.forward_only:
            input_.requires_grad_()
        chunk = self._chunk(action)
        output: Any
        output, tokens = forward_step(
            self.forward,
            self.batches[chunk],
            self.chunks[chunk],
            self.microbatches,
            input_,
            self.reports,
            self.config,
            cp_group_size=self.groups.cp.size(),
            current_microbatch=microbatch,
            vp_stage=chunk if len(self.chunks) > 1 else None,
            is_last_stage=stage == self.last,
        )
        self.tokens += tokens
        if stage < self.last:
            self._hand_on(stage + 1, _FORWARD, microbatch, output.detach(), stage)
        if not self.forward_only:
            self.held[stage, microbatch] = input_, output
            if stage < self.last:
                deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def _i(self, action: Action) -> None:
        stage, _, microbatch = action
        input_, output = self.held.pop((stage, microbatch))
        gradient = None if stage == self.last else self._take(stage, _BACKWARD, microbatch)
        with kept_products() as products:
            for_input: Any = backward_step(input_, output, gradient, self.config)
        self.products[stage, microbatch] = products
        if stage > 0:
            self._hand_on(stage - 1, _BACKWARD, microbatch, for_input, stage)

    def _w(self, action: Action) -> None:
        timers = self.config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        self._weights(action)
        if timers is not None:
            timers("backward-compute").stop()

    def _weights(self, action: Action) -> None:
        with torch.no_grad():
            for weight, product in self.products.pop((action.stage, action.microbatch)):
                product()
                self.split.add(id(getattr(weight, "divided", weight)))
        chunk = self._chunk(action)
        self.left[chunk] -= 1
        start = self.config.grad_sync_func
        if self.left[chunk] == 0 and start is not None:
            (start[chunk] if isinstance(start, list) else start)(self.chunks[chunk].parameters())

    def _b(self, action: Action) -> None:
        self._i(action)
        self._weights(action)

    def _send(self, action: Action) -> None:
        peer = action.stage + (1 if action.kind[-1] == _FORWARD else -1)
        tensor = self.leaving.pop((action.stage, action.kind[-1], action.microbatch)).contiguous()
        tag, rank = self._tag(peer, action), self.schedule.rank_of(peer)
        work = torch.distributed.isend(tensor, group=self.groups.pp, group_dst=rank, tag=tag)
        self.sent.append((work, tensor))

    def _recv(self, action: Action) -> None:
        peer = action.stage - (1 if action.kind[-1] == _FORWARD else -1)
        buffer = torch.empty(self.shape, dtype=self.config.pipeline_dtype, device=self.tokens.device)
        tag, rank = self._tag(action.stage, action), self.schedule.rank_of(peer)
        work = torch.distributed.irecv(buffer, group=self.groups.pp, group_src=rank, tag=tag)
        self.arrived[action.stage, action.kind[-1], action.microbatch] = buffer, work

    def _tag(self, receiver: int, action: Action) -> int:
        """Return a number that no other message of the step has; gloo pairs by it, NCCL by order."""
        return (2 * receiver + (action.kind[-1] == _BACKWARD)) * self.microbatches + action.microbatch

    def _take(self, stage: int, kind: str, microbatch: int) -> torch.Tensor:
        tensor, work = self.arrived.pop((stage, kind, microbatch))
        if work is not None:
            work.wait()
        return tensor

    def _hand_on(self, to: int, kind: str, microbatch: int, tensor: torch.Tensor, of: int) -> None:
        if self.schedule.rank_of(to) == self.groups.pp.rank():
            self.arrived[to, kind, microbatch] = tensor, None
        else:
            self.leaving[of, kind, microbatch] = tensor

    def _chunk(self, action: Action) -> int:
        return action.stage // self.schedule.stages


def _tell_unsplit(step: _Step) -> None:
    """Say on rank 0 which matrices of its pipeline have no half of their own. Collective."""
    named = [(name, weight) for name, weight in global_named_parameters(step.chunks) if weight.ndim > 1]
    names = {re.sub(r"\d+", "N", name) for name, weight in named if id(weight) not in step.split}
    everyones: list[Any] = [None] * step.groups.pp.size()
    torch.distributed.all_gather_object(everyones, names, group=step.groups.pp)
    these = ", ".join(sorted(set[str]().union(*everyones)))
    if these and torch.distributed.get_rank() == 0:
        say(f"pipeline: backward passes are split; the gradients of these come with those of inputs: {these}")


def _add_tied(chunks: Sequence[Any]) -> None:
    """Add up the gradients of the two copies of tied word embeddings, where one rank has both ends of the model."""
    ends = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in (chunks[0], chunks[-1])]
    has_both = ends[0].pre_process and ends[1].post_process
    if not has_both or not (ends[1].share_embeddings_and_output_weights or ends[1].mtp_process):
        return
    weights = [end.shared_embedding_or_output_weight() for end in ends]
    first, last = (getattr(weight, "main_grad", weight.grad) for weight in weights)
    first.add_(last)
    last.copy_(first)
