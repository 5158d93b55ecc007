"""Trains a few steps from flags on real ranks, and keeps what two layouts must agree on."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.config.schema import Config
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.registry import brought
from megatron_ext.train.extensions import NONE, Extensions

if TYPE_CHECKING:
    from megatron_ext.plugins.prove.gather import ModuleOutput, Shard
    from megatron_ext.train.run import Run
    from megatron_ext.train.step import StepResult


@dataclass(frozen=True)
class RunRecord:
    """Holds what one run did; equal in every layout, up to rounding."""

    losses: list[float]
    grad_norms: list[float | None]
    validation_loss: float | None
    weights: dict[str, np.ndarray]
    """Initial weights by global name."""
    gradients: dict[str, np.ndarray]
    """Gradients of the first step by global name, before clipping."""
    flaws: tuple[str, ...]
    """Names of tensors on which ranks disagree although they hold copies, and of vocabulary padding that is not zero,
    in the initial weights, the first gradients and the final weights."""
    final_weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Weights after the last step, by global name."""
    numbers: list[dict[str, float]] = field(default_factory=list)
    """Auxiliary numbers of each step by name: tokens that counted, losses of routers, indexers and depths, the largest
    product of a query and a key."""
    outputs: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Outputs of the modules in the first step, if they were asked for (`gather.assemble_outputs`)."""

    @property
    def weight_hash(self) -> str:
        """Return the SHA-256 over all initial weights, in the order of their names."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.weights[name]).tobytes())
        return digest.hexdigest()


def record(
    flags: Sequence[str],
    world_size: int,
    steps: int,
    sabotage: Callable[[], None] | None = None,
    *,
    outputs: bool = False,
    device: str = "cpu",
    extensions: Extensions | Callable[[], Extensions] = NONE,
    poisons: bool = False,
    timeout: float = 300.0,
) -> RunRecord:
    """Train `steps` steps with `flags` on `world_size` ranks of this machine.

    Args:
        flags: as for `megatron-ext pretrain`; a run begins with the weights of --load-hf, or goes on from the
            checkpoint of --load, and leaves one in --save at its end.
        world_size: number of ranks.
        steps: optimizer steps to run, whatever --train-iters says (which shapes the learning-rate curve); after 0 there
            are no gradients.
        sabotage: called on every rank before the run is built; plants a fault.
        outputs: keep what the modules put out in the first step. It takes the memory of all activations.
        device: "cpu", or "cuda", which needs a GPU for every rank.
        extensions: a user's own parts of the run, importable by name, or what makes them on each rank; its callbacks
            are called in every step.
        poisons: whether weights are NaN for as long as a gather has yet to bring them (`sharding/poisoned.py`).
        timeout: seconds until the ranks are killed.
    Raises:
        RankError: a rank raised, or has no result in time.
    """
    from megatron_ext.plugins.prove.gather import assemble

    words = [*flags, "--device", device]
    results = run_ranks(
        *(world_size, _train, words, steps, sabotage, outputs, extensions, poisons),
        fresh=device == "cuda",
        timeout=timeout,
    )
    last = results[-1]
    tensors, flaws = {}, []
    for what in ("initial weights", "first gradients", "final weights"):
        shards = (shard for result in results for shard in result.shards.get(what, ()))
        if what not in last.shards:  # no gradients without a step
            tensors[what] = {}
            continue
        tensors[what], problems = assemble(last.config, shards, lacks_some=extensions is not NONE)
        flaws += [f"{what}: {flaw}" for flaw in problems]
    return RunRecord(
        losses=last.losses,
        grad_norms=last.grad_norms,
        validation_loss=last.validation_loss,
        weights=tensors["initial weights"],
        gradients=tensors["first gradients"],
        flaws=tuple(flaws),
        final_weights=tensors["final weights"],
        numbers=last.numbers,
        outputs=_outputs(results) if outputs else {},
    )


def _outputs(results: list["_RankRecord"]) -> dict[str, list[np.ndarray]]:
    from megatron_ext.plugins.prove.gather import assemble_outputs

    return assemble_outputs(results[-1].config, (part for result in results for part in result.parts))


@dataclass(frozen=True)
class _RankRecord:
    """Holds what one rank hands back. Losses and norms are equal on all ranks."""

    config: Config
    losses: list[float]
    grad_norms: list[float | None]
    validation_loss: float | None
    numbers: list[dict[str, float]]
    shards: dict[str, list["Shard"]]
    parts: list["ModuleOutput"]


def _train(
    flags: list[str],
    steps: int,
    sabotage: Callable[[], None] | None,
    outputs: bool,
    extensions: Extensions | Callable[[], Extensions],
    poisons: bool,
) -> _RankRecord:
    """Train on one rank of `record`."""
    own = extensions if isinstance(extensions, Extensions) else extensions()
    with own.registered():
        return _trained(flags, steps, sabotage, outputs, own, poisons)


def _trained(
    flags: list[str],
    steps: int,
    sabotage: Callable[[], None] | None,
    outputs: bool,
    extensions: Extensions,
    poisons: bool,
) -> _RankRecord:
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.plugins.prove import gather
    from megatron_ext.train.callbacks.evaluation import evaluate
    from megatron_ext.train.trainer import Callback, Trainer

    with poisoned_gathers() if poisons else nullcontext():
        run = build(flags, extensions, sabotage)
    begun, numbers = run.state.iteration, []
    shards = {"initial weights": gather.weights(run)}

    class CaptureGradients(Callback):
        def before_update(self, trainer: Trainer) -> None:
            if trainer.run.state.iteration == begun:
                shards["first gradients"] = gather.gradients(trainer.run)

    brought_ones = [one for callbacks_of in brought("callbacks") for one in callbacks_of(run)]
    callbacks = [CaptureGradients(), *brought_ones, *extensions.made_callbacks()]
    trainer = Trainer(run, callbacks, extensions.learning_rate)
    taps = gather.Taps(run) if outputs else None
    losses, grad_norms = [], []
    for _ in range(steps):
        result = trainer.step()
        losses.append(result.loss)
        grad_norms.append(result.grad_norm)
        numbers.append(_numbers(result))
        if taps is not None:
            taps.close()
    validation_loss = evaluate(run, run.loaders.valid) if run.loaders.valid is not None else None
    shards["final weights"] = gather.weights(run)
    if run.config.checkpoint.save is not None:
        save_checkpoint(run, run.config.checkpoint.save)
    parts = taps.parts if taps is not None else []
    return _RankRecord(run.config, losses, grad_norms, validation_loss, numbers, shards, parts)


def _numbers(result: "StepResult") -> dict[str, float]:
    """Return the tokens of a step, and the numbers that the parts of the model report, by name."""
    return {"tokens": float(result.tokens), **result.numbers}


@contextmanager
def poisoned_gathers() -> Iterator[None]:
    """Poison the sharding scheme of every run that is built inside, for as long as the run lives: see
    `sharding/poisoned.py`."""
    from megatron_ext.sharding.poisoned import poisoned
    from megatron_ext.train import build

    choose = build.sharding_of
    build.sharding_of = lambda config: poisoned(choose(config))
    try:
        yield
    finally:
        build.sharding_of = choose


def build(flags: Sequence[str], extensions: Extensions, sabotage: Callable[[], None] | None = None) -> "Run":
    """Return the run of these flags on this rank, which nothing has used before, at its first step here.

    Args:
        extensions: as registered.
        sabotage: called before the run is built.
    """
    from megatron_ext import device
    from megatron_ext.device.external_kernels import asked_for
    from megatron_ext.train.configure import configure

    configured = configure(flags)
    config = extensions.applied(configured.config)
    # Before anything that imports the engine.
    installed = device.install(
        config.layout.device,
        fuses=not config.training.disable_jit_fuser,
        own_kernels=not config.training.no_triton_kernels,
        kernels=asked_for(config),
        nccl_backend=config.layout.nccl_backend,
    )

    from megatron_ext.train.build import build_run

    if sabotage is not None:
        sabotage()
    run = build_run(config, installed, configured.resume, extensions)
    if configured.resume is not None:
        from megatron_ext.checkpoint.native.load_checkpoint import load_saved

        load_saved(run, configured.resume)
    elif config.checkpoint.load_hf is not None:
        from megatron_ext.plugins.huggingface.load_hf import load_huggingface

        load_huggingface(run, config.checkpoint.load_hf)
    return run
