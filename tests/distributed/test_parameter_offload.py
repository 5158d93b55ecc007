"""`--torch-fsdp2-cpu-offload`: weights, gradients and optimizer state in host memory; the same losses to the bit."""

from dataclasses import dataclass
from typing import Any

import pytest
from megatron.core import parallel_state
from torch.distributed.fsdp import FSDPModule

from benchmarks.memory import Bytes, bytes_per_rank
from megatron_ext.parallel.rows import local_part
from megatron_ext.train.trainer import Trainer
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import build
from tests.support.program import TINY
from tests.support.selection import chosen, marked

OWN = """
    --ffn-hidden-size 48 --swiglu --global-batch-size 2 --train-iters 8 --lr 1e-2 --clip-grad 0.1
    --attention-dropout 0.1 --hidden-dropout 0.1 --log-num-zeros-in-grad --use-torch-fsdp2
"""
BASE = [*TINY, *OWN.split()]
STEPS = 3
LAYOUTS = {
    "fp32": (2, ""),
    "bf16": (2, "--bf16"),
    "SGD": (2, "--optimizer sgd"),
    "Lion": (2, "--optimizer lion --lr 1e-3 --bf16"),
    "TP2 SP, query and key norm": (4, "--tensor-model-parallel-size 2 --sequence-parallel --qk-layernorm --bf16"),
}


@dataclass(frozen=True)
class Trace:
    steps: list[tuple[str, str, float]]
    """Loss, norm of the gradients and zeros in them."""
    bytes: Bytes
    elements: int
    """That this rank holds."""
    norm_from: list[int]
    """Elements of what the norm is taken from."""
    policies: set[str]
    """torch's, of what is gathered at a time."""


def _traces(all_words: list[str]) -> list[tuple[Trace, Trace]]:
    """Without and with the flag, layout by layout."""
    return [(_train(words), _train(f"{words} --torch-fsdp2-cpu-offload")) for words in all_words]


def _train(words: str) -> Trace:
    # Not the groups themselves, as elsewhere: DTensor remembers those of the same mesh by name.
    parallel_state.destroy_model_parallel()
    run = build([*BASE, *words.split()])
    trainer = Trainer(run, [])
    results: list[Any] = [trainer.step() for _ in range(STEPS)]
    run.loaders.close()
    [chunk] = run.chunks
    policies: set[str] = set()
    for unit in chunk.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            policies.add(type(state._fsdp_param_group.offload_policy).__name__)
    return Trace(
        steps=[(result.loss.hex(), float(result.grad_norm).hex(), result.num_zeros) for result in results],
        bytes=bytes_per_rank(run),
        elements=sum(local_part(parameter).numel() for parameter in chunk.parameters()),
        norm_from=[
            gradient.numel() for part in run.optimizer.chained_optimizers for gradient in part.get_grads_for_grad_norm()
        ],
        policies=policies,
    )


@pytest.fixture(scope="module")
def traces(request: pytest.FixtureRequest) -> dict[str, list[tuple[Trace, Trace]]]:
    """By layout, of each rank; the same ranks train in all layouts of as many."""
    found = {}
    for size in (2, 4):
        layouts = [layout for layout in chosen(request, "layout") if LAYOUTS[layout][0] == size]
        by_rank = run_ranks(size, _traces, [LAYOUTS[layout][1] for layout in layouts]) if layouts else []
        found |= dict(zip(layouts, map(list, zip(*by_rank, strict=True)), strict=True))
    return found


# Slow: less state than the others keep.
@pytest.mark.parametrize("layout", marked(LAYOUTS, slow={"fp32", "SGD"}))
def test_host_memory_holds_all_and_changes_nothing(layout: str, traces: dict[str, list[tuple[Trace, Trace]]]) -> None:
    for without, offloaded in traces[layout]:
        assert offloaded.steps == without.steps
        assert len({loss for loss, _, _ in without.steps}) == STEPS
        assert all(float.fromhex(norm) > 0.1 for _, norm, _ in without.steps)  # so that gradients are clipped
        assert (without.policies, offloaded.policies) == ({"OffloadPolicy"}, {"CPUOffloadPolicy"})
        assert offloaded.norm_from == [1] != without.norm_from  # one number goes to the device
        assert without.bytes.host == offloaded.bytes.total == 0
        assert offloaded.bytes.host <= without.bytes.total
        # fp32 weight and gradient, and two moments or, for SGD and Lion, one; Adam counts steps, once a tensor.
        each = 12 if layout in ("SGD", "Lion") else 16
        assert offloaded.bytes.host == pytest.approx(each * offloaded.elements, rel=0.02)
