"""Train a few steps from flags on real ranks, and keep what two layouts must agree on."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.config.schema import Config
from megatron_ext.verify.ranks import run_ranks


@dataclass(frozen=True)
class Record:
    """What one run did; equal in every layout, up to rounding."""

    losses: list[float]
    grad_norms: list[float | None]
    validation_loss: float | None
    weights: dict[str, np.ndarray]
    """Initial weights by global name."""
    gradients: dict[str, np.ndarray]
    """Gradients of the first step by global name, before clipping."""

    @property
    def weight_hash(self) -> str:
        """SHA-256 over all initial weights, in the order of their names."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.weights[name]).tobytes())
        return digest.hexdigest()


def record(flags: Sequence[str], world_size: int, steps: int, sabotage: Callable[[], None] | None = None) -> Record:
    """Train `steps` steps with `flags` on `world_size` CPU ranks.

    Args:
        flags: as for pretrain_gpt.py.
        world_size: number of ranks.
        steps: optimizer steps to run, whatever --train-iters says (which shapes the learning-rate curve).
        sabotage: called on every rank before the run is built; plants a fault.
    """
    from megatron_ext.verify.gather import assemble

    results = run_ranks(world_size, _train, list(flags), steps, sabotage)
    config, losses, grad_norms, validation_loss = results[-1][:4]
    return Record(
        losses=losses,
        grad_norms=grad_norms,
        validation_loss=validation_loss,
        weights=assemble(config, (shard for result in results for shard in result[4])),
        gradients=assemble(config, (shard for result in results for shard in result[5])),
    )


def _train(flags: list[str], steps: int, sabotage: Callable[[], None] | None) -> tuple[Any, ...]:
    """One rank of `record`."""
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.evaluate import evaluate
    from megatron_ext.train.trainer import Trainer
    from megatron_ext.verify import gather

    config: Config = configure([*flags, "--device", "cpu"]).config
    if sabotage is not None:
        sabotage()
    run = build_run(config, device.install("cpu"))
    initial = gather.weights(run)
    first_gradients: list[gather.Shard] = []
    prepare_grads = run.optimizer.prepare_grads

    def capture_then_prepare() -> bool:
        if run.state.iteration == 0:
            first_gradients.extend(gather.gradients(run))
        return prepare_grads()

    run.optimizer.prepare_grads = capture_then_prepare
    trainer = Trainer(run, [])
    losses, grad_norms = [], []
    for _ in range(steps):
        result = trainer.step()
        losses.append(result.loss)
        grad_norms.append(result.grad_norm)
    validation_loss = evaluate(run) if run.loaders.validation_samples else None
    return config, losses, grad_norms, validation_loss, initial, first_gradients
