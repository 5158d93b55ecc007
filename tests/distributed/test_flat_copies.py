"""The distributed optimizer's copies between buffers and shards: the engine's bits, in one launch each."""

import shlex
from typing import Any

import pytest
import torch

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.operator_calls import Calls

BASE = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-2 --eval-interval 0 --num-workers 0 "
    "--use-distributed-optimizer"
)
LAYOUTS = {
    "fp32": "",
    "bf16": "--bf16",
    "gradients in bf16": "--bf16 --grad-reduce-in-bf16",
}


GRADIENTS, WEIGHTS = "_copy_model_grads_to_main_grads", "_copy_main_params_to_model_params"


def _copied(part: Any, engine: Any, name: str) -> tuple[list[str], list[torch.Tensor]]:
    """The copies that an optimizer starts, and the gradients or weights after them.

    Args:
        engine: megatron-core's class, for its own method; None for the method that replaces it.
    """
    pairs = list(part.main_parameters())
    for weight, main in pairs:
        main.grad = None
        if weight.dtype != main.dtype:
            weight.detach().zero_()
    with Calls() as calls:
        getattr(part.core, name)() if engine is None else getattr(engine, name)(part.core)
    results = [main.grad for _, main in pairs] if name == GRADIENTS else [weight.detach() for weight, _ in pairs]
    return [str(one) for one, *_ in calls.calls if "copy" in str(one)], [one.clone() for one in results]


def _copies() -> dict[str, dict[str, Any]]:
    """By layout: number of weights, and of each copy the launches of the engine and of ours, and whether both give the
    same bits."""
    from megatron_ext import device

    here = device.install("cpu")
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer
    from tests.support.several_models import end_layout

    found: dict[str, dict[str, Any]] = {}
    for layout, flags in LAYOUTS.items():
        run = build_run(configure(shlex.split(f"{BASE} {flags}")).config, here)
        Trainer(run, []).step()
        [part] = run.sharding.parts(run.optimizer)
        mains = [main.detach() for _, main in part.main_parameters()]
        found[layout] = {"weights": len(mains)}
        for name in (GRADIENTS, WEIGHTS):
            for main in mains:
                main.mul_(1.25)
            (engines, expected), (ours, got) = (_copied(part, engine, name) for engine in (DistributedOptimizer, None))
            found[layout][name] = engines, ours, all(map(torch.equal, expected, got))
        end_layout()
    return found


@pytest.fixture(scope="module")
def copies() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, _copies)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_copied_at_once(layout: str, copies: list[dict[str, dict[str, Any]]]) -> None:
    for rank in copies:
        seen = rank[layout]
        assert seen["weights"] > 10
        for name, in_two_types in ((GRADIENTS, layout == "gradients in bf16"), (WEIGHTS, layout != "fp32")):
            engines, ours, same = seen[name]
            assert same
            assert ours == ["aten._foreach_copy_.default"] * in_two_types
            # Shards in fp32 lie in their weights: the engine copies each onto itself.
            assert len(engines) == seen["weights"] * (in_two_types or name == WEIGHTS)
