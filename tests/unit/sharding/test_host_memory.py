"""--optimizer-cpu-offload in a real small run: the bits of an optimizer on the device, and where its memory is.

tests/distributed/test_offload.py has more layouts, and checkpoints.
"""

from typing import Any

import pytest
import torch

from megatron_ext.sharding.host_memory import InHostMemory
from megatron_ext.train.run import Run
from megatron_ext.train.trainer import Trainer
from tests.support.small_runs import are_equal, built, weights

OFFLOAD = "--use-distributed-optimizer --optimizer-cpu-offload"


def _updaters(run: Run) -> list[Any]:
    return [part.updater for part in run.sharding.parts(run.optimizer)]


def _trained(flags: str, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    with built(flags) as run:
        trainer = Trainer(run, [])
        losses = [trainer.step().loss for _ in range(steps)]
        return losses, weights(run)


@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize("more", ["", "--optimizer-offload-fraction 0.5", "--overlap-cpu-optimizer-d2h-h2d"])
def test_an_optimizer_in_host_memory_has_the_same_bits(more: str, precision: str) -> None:
    losses, expected = _trained(f"--use-distributed-optimizer {precision}")
    found, trained = _trained(f"{OFFLOAD} {precision} {more}")
    assert found == losses
    assert are_equal(trained, expected)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_as_many_elements_as_asked_for_are_updated_in_host_memory(fraction: float) -> None:
    """Whole tensors, until there are enough."""
    with built(f"{OFFLOAD} --optimizer-offload-fraction {fraction}") as run:
        [updater] = _updaters(run)

        def sizes(optimizers: Any) -> list[int]:
            return [one.numel() for made in optimizers for group in made.param_groups for one in group["params"]]

        total, on_host = sizes(updater.torch_optimizers), sizes(updater.host_optimizers)
        assert sum(on_host) >= fraction * sum(total)
        assert sum(on_host) - max(on_host, default=0) < fraction * sum(total) or not on_host


def test_masters_take_no_memory_on_the_device_between_updates() -> None:
    """And are there again during one; a weight that is its own master stays."""
    for precision, is_freed in (("--bf16", True), ("", False)):
        with built(f"{OFFLOAD} {precision}") as run:
            Trainer(run, []).step()
            parts = run.sharding.parts(run.optimizer)
            sizes = {main.untyped_storage().size() for part in parts for _, main in part.main_parameters()}
            assert (sizes == {0}) == is_freed


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_masters_begin_as_the_weights_that_were_loaded(precision: str) -> None:
    """A run whose weights were put there afterwards trains as one that had them from the beginning."""
    with built(f"--use-distributed-optimizer {precision} --seed 7") as run:
        begins = weights(run)
    with built(f"--use-distributed-optimizer {precision} --hidden-dropout 0 --attention-dropout 0") as run:
        for chunk in run.chunks:
            for name, weight in chunk.named_parameters():
                weight.data.copy_(begins[name])
        run.sharding.reload_masters(run.optimizer)
        Trainer(run, []).step()
        expected = weights(run)
    with built(f"{OFFLOAD} {precision} --hidden-dropout 0 --attention-dropout 0") as run:
        assert isinstance(run.sharding, InHostMemory)
        for chunk in run.chunks:
            for name, weight in chunk.named_parameters():
                weight.data.copy_(begins[name])
        run.sharding.reload_masters(run.optimizer)
        Trainer(run, []).step()
        assert are_equal(weights(run), expected)
