"""Train a few steps from flags on real ranks, and keep what two layouts must agree on."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.config.schema import Config
from megatron_ext.verify.ranks import run_ranks

if TYPE_CHECKING:
    from megatron_ext.verify.gather import Shard


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
    flaws: tuple[str, ...]
    """What ranks should hold in common and do not, and vocabulary padding that is not zero: in the initial weights,
    the first gradients and the final weights, by name."""

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
    last = results[-1]
    tensors, flaws = {}, []
    for what in ("initial weights", "first gradients", "final weights"):
        tensors[what], found = assemble(last.config, (shard for result in results for shard in result.shards[what]))
        flaws += [f"{what}: {flaw}" for flaw in found]
    return Record(
        losses=last.losses,
        grad_norms=last.grad_norms,
        validation_loss=last.validation_loss,
        weights=tensors["initial weights"],
        gradients=tensors["first gradients"],
        flaws=tuple(flaws),
    )


@dataclass(frozen=True)
class _RankRecord:
    """What one rank hands back. Losses and norms are equal on all ranks."""

    config: Config
    losses: list[float]
    grad_norms: list[float | None]
    validation_loss: float | None
    shards: dict[str, list["Shard"]]


def _train(flags: list[str], steps: int, sabotage: Callable[[], None] | None) -> _RankRecord:
    """One rank of `record`."""
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.evaluate import evaluate
    from megatron_ext.train.trainer import Trainer
    from megatron_ext.verify import gather

    config = configure([*flags, "--device", "cpu"]).config
    if sabotage is not None:
        sabotage()
    run = build_run(config, device.install("cpu"))
    shards = {"initial weights": gather.weights(run)}
    prepare_grads = run.optimizer.prepare_grads

    def capture_then_prepare() -> bool:
        if run.state.iteration == 0:
            shards["first gradients"] = gather.gradients(run)
        return prepare_grads()

    run.optimizer.prepare_grads = capture_then_prepare
    trainer = Trainer(run, [])
    losses, grad_norms = [], []
    for _ in range(steps):
        result = trainer.step()
        losses.append(result.loss)
        grad_norms.append(result.grad_norm)
    validation_loss = evaluate(run, run.loaders.valid) if run.loaders.valid is not None else None
    shards["final weights"] = gather.weights(run)
    return _RankRecord(config, losses, grad_norms, validation_loss, shards)
