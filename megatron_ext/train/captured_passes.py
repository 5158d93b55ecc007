"""Captures the forward and backward passes of a step into a CUDA graph, and replays it in the steps that follow.

Where a model is small, a GPU has done a kernel before the host has launched the next one. A graph holds all kernels of
a step's passes, of all its microbatches and of the reduction of the gradients, and is launched at once. The graph is
megatron-core's (`FullCudaGraphWrapper`); here stands what a run needs around it.

A replay repeats kernels and nothing else: no Python runs, and every tensor lies where it lay when the graph was
captured. So

- microbatches are copied into the same tensors before every step (megatron-core's `StaticBufferLoader`);
- a step with another number of microbatches drops the graph and begins anew with steps that run without;
- what hooks see of the gradients is what they saw at the capture, with the numbers of this replay;
- evaluations run without the graph;
- with dropout, experts, loss scales and whatever else differs from step to step there is no graph
  (`config/derived/cuda_graphs.py` says when, and why).

The update, the norm, clipping and what is read by the host stay outside.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.data.microbatch import Batch
from megatron_ext.errors import ConfigurationError, TrainingError
from megatron_ext.train.gradient_watch import GradientWatch, Seen
from megatron_ext.train.memory_check import is_exhausted

_TRAINING = "training"  # megatron-core's name of what is captured


class CapturedPasses:
    """Stands in for one of megatron-core's schedules, in training.

    megatron-core keeps one graph for a process: of several runs in it, one at a time may be captured.

    Args:
        schedule: megatron-core's function of the forward and backward passes.
        eager_steps: steps that run without a graph before one is captured, at least one.
        chunks: the model.
        watch: hears of a replay's gradients as of others.
        synchronize: waits until the device has done its work.
    """

    def __init__(
        self,
        schedule: Callable[..., Any],
        eager_steps: int,
        chunks: Sequence[torch.nn.Module],
        watch: GradientWatch,
        synchronize: Callable[[], None],
    ):
        assert eager_steps > 0, "resolved: a first step without a graph"
        self._graph = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=eager_steps)
        self._chunks, self._watch, self._synchronize = chunks, watch, synchronize
        self._microbatches: int | None = None
        self._seen: Seen | None = None
        self._tables: list[torch.Tensor] = []
        self.release()

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Sequence[Iterator[Batch]],
        num_microbatches: int,
        **others: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Run the schedule over microbatches, which may lie in host memory.

        Returns:
            What the schedule returns. The next replay writes into the same tensors.
        Raises:
            ConfigurationError: the passes cannot be captured.
        """
        if num_microbatches != self._microbatches:
            self.release()
            self._microbatches = num_microbatches
        captures = self._graph.curr_iter(_TRAINING) == self._graph.cuda_graph_warmup_steps
        with self._capture() if captures else nullcontext():
            reports: Any = self._graph(
                forward_step_func=_taking_fields(forward_step_func),
                data_iterator=[map(_fields, batches) for batches in data_iterator],
                num_microbatches=num_microbatches,
                **others,
            )
        if captures:
            self._seen = self._watch.seen()
        if self._seen is not None:
            self._watch.see_again(self._seen)
        return reports

    def release(self) -> None:
        """Free the graph and its tensors. NCCL cannot leave a group while there is a graph with its collectives."""
        self._synchronize()  # a replay may be under way
        self._seen, self._microbatches = None, None
        self._tables.clear()
        self._graph.reset_cuda_graph(_TRAINING)
        StaticBufferLoader.static_buffers[_TRAINING].clear()

    @contextmanager
    def _capture(self) -> Iterator[None]:
        with _no_generators(), self._keeping_tables():
            try:
                yield
            except Exception as error:
                if is_exhausted(error) or isinstance(error, TrainingError | torch.distributed.DistError):
                    raise
                raise ConfigurationError(
                    "--cuda-graph-impl full_iteration: the passes of a step cannot be captured here "
                    f"({type(error).__name__}: {error}); leave --cuda-graph-impl out"
                ) from error

    @contextmanager
    def _keeping_tables(self) -> Iterator[None]:
        """Keep the rotary tables that the graph reads: megatron-core makes one for each length of a sequence, and
        forgets those that were not asked for lately."""

        def keep(_module: torch.nn.Module, _inputs: object, table: torch.Tensor) -> None:
            self._tables.append(table)

        modules = [one for chunk in self._chunks for one in chunk.modules() if isinstance(one, RotaryEmbedding)]
        handles = [module.register_forward_hook(keep) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _taking_fields(forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
    def forward_step(batches: Iterable[Mapping[str, Any]], model: torch.nn.Module) -> Any:
        return forward_step_func((Batch(**fields) for fields in batches), model)

    return forward_step


def _fields(batch: Batch) -> dict[str, torch.Tensor | None]:
    """Return a microbatch in the form that megatron-core copies tensors from."""
    assert batch.documents is None, "resolved: no graph where each microbatch has documents of its own"
    return dict(vars(batch))


@contextmanager
def _no_generators() -> Iterator[None]:
    """Take megatron-core's generators away: nothing draws from them, and a graph takes only generators of another
    kind."""
    tracker: Any = get_cuda_rng_tracker()
    states = tracker.get_states()
    tracker.set_states({})
    try:
        yield
    finally:
        tracker.set_states(states)
