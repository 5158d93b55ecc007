"""Steps whose passes are replayed from a graph are those that run as they are, to the bit.

A stand-in for CUDA's graphs (tests/support/recorded_graph.py) repeats the operators of a capture on the same tensors,
and no Python: what a replay cannot repeat shows as another number.
"""

from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.full_cuda_graph import StaticBufferLoader
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.train.captured_passes import CapturedPasses
from megatron_ext.train.step import held_out_loss
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.checkpoints import build
from tests.support.program import tiny
from tests.support.recorded_graph import recorded_graphs
from tests.support.run_state import state_hash
from tests.support.selection import marked
from tests.support.several_models import end_layout

FLAGS = tiny("--lr 1e-2 --train-iters 7 --num-workers 0 --hidden-dropout 0 --attention-dropout 0 --clip-grad 0.01")
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
)
CASES = {
    "GPT-2": (1, ""),
    "Llama, bf16, numbers read late": (1, f"{LLAMA} --bf16"),
    "two replicas, numbers read late": (2, ""),
    "positions that restart": (1, f"{LLAMA} --reset-position-ids"),
    "loss with its output layer": (1, f"{LLAMA} --bf16 --linear-cross-entropy"),
    "gradients added by the product": (1, f"{LLAMA} --bf16 --gradient-accumulation-fusion"),
    "a batch that grows": (1, "--rampup-batch-size 2 2 8 --train-iters 9"),
    # Not the distributed optimizer: the stand-in does not follow gloo's reduce-scatter, whose output it finds unheld.
}


class Trained(NamedTuple):
    steps: list[tuple[str, ...]]
    """Loss and norm of each step, and what the watch saw of its gradients before they were mixed with others'."""

    evaluated: list[str]
    hash: str


def _train(flags: list[str], late: bool, captures: bool) -> tuple[Trained, list[Any]]:
    run = build(flags, reads_wait=late)
    evaluated: list[str] = []
    steps: list[tuple[str, ...]] = []
    seen: list[Any] = []

    class Notes(Callback):
        def before_update(self, trainer: Any) -> None:
            evidence = run.gradient_watch._evidence
            assert evidence is not None
            seen.append(evidence)
            if len(seen) in (2, 5):
                batch = run.loaders.train.microbatches_of(0, 0, 1)
                evaluated.append(held_out_loss(run, batch)[0].hex())

        def ends_before_next(self, trainer: Any) -> bool:
            return False

        def on_step_end(self, trainer: Any, result: Any) -> None:
            evidence = seen[len(steps)]
            norms = [norm.item().hex() for _, norms in evidence.norms for norm in norms]
            steps.append((result.loss.hex(), result.grad_norm.hex(), *norms))

    elsewhere: list[Any] = []
    with recorded_graphs() as made:
        if captures:
            schedule = get_forward_backward_func(1, None)
            run.captured_passes = CapturedPasses(schedule, 2, run.chunks, run.gradient_watch, run.device.synchronize)
        Trainer(run, [Notes()]).fit()
        if captures:
            elsewhere += _held_by_nobody(run, made[-1].read_from_outside)
        run.release_graph()
    run.loaders.close()
    assert not elsewhere, f"the graph reads what may be freed: {elsewhere}"
    return Trained(steps, evaluated, state_hash(run)), made


def _held_by_nobody(run: Any, tensors: dict[int, Any]) -> list[Any]:
    """Those of a graph's tensors, by their memory, that are no weights, gradients, inputs, or other lasting ones."""
    held: list[Any] = [*run.captured_passes._tables]
    for chunk in run.chunks:
        held += [getattr(module, "inv_freq", None) for module in chunk.modules()]
        held += [*run.sharding.held_weights(chunk), *run.sharding.held_gradients(chunk)]
    held += [value for fields in StaticBufferLoader.static_buffers["training"] for value in fields.values()]
    held += [value for part in run.optimizer.chained_optimizers for value in vars(part).values()]
    places = {one.untyped_storage().data_ptr() for one in held if isinstance(one, torch.Tensor)}
    return [(tuple(one.shape), one.dtype) for place, one in tensors.items() if place not in places]


def _both(flags: str, late: bool) -> tuple[Trained, Trained, list[int]]:
    words = [*FLAGS, *flags.split()]
    eager, none = _train(words, late, captures=False)
    assert none == []
    end_layout()
    captured, made = _train(words, late, captures=True)
    return eager, captured, [graph.replays for graph in made]


IN_EVERY_RUN = {"Llama, bf16, numbers read late", "a batch that grows"}


# Slow: the same step of other layers.
@pytest.mark.parametrize("case", marked(CASES, slow=CASES.keys() - IN_EVERY_RUN))
def test_replayed_steps_are_equal_to_the_bit(case: str) -> None:
    ranks, flags = CASES[case]
    replays = [2, 3] if "grows" in case else [5]
    for eager, captured, counted in run_ranks(ranks, _both, flags, "late" in case):
        assert captured == eager
        assert len({step[0] for step in eager.steps}) == len(eager.steps), "each step has data of its own"
        assert counted == replays
