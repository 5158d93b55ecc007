"""Plays the start of one rank of a world, up to the plan of its first checkpoint, and measures each phase.

Tensors have shapes and no memory, so that a rank of any model fits: the model is built on the meta device, its weights
then become torch's fake tensors, which gradient buffers and optimizer are made of, too. Seconds are those of the Python
around them, and include what fake tensors cost, some 0.1 ms an operation. Initial weights are not drawn.
"""

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _world

from benchmarks.rehearsal_meter import Meter, Phase
from benchmarks.rehearsed_world import Objects, played
from megatron_ext import device
from megatron_ext.checkpoint.native import checkpoint_state_dict, save
from megatron_ext.config.derived.batch_size import num_microbatches
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.model import initialize
from megatron_ext.model.config import transformer_config
from megatron_ext.model.gpt import build_model
from megatron_ext.parallel import groups as process_groups
from megatron_ext.sharding.choose import sharding_of
from megatron_ext.sharding.parts import IN_PLACE
from megatron_ext.sharding.scheme import Sharding
from megatron_ext.train.build import build_loaders, seed_dropout
from megatron_ext.train.configure import configure
from megatron_ext.train.datasets import record_of_run
from megatron_ext.train.state import TrainState


@dataclass(frozen=True)
class Rehearsed:
    """What one played rank did."""

    phases: list[Phase]
    told: list[bytes]
    """What it told the other ranks, as rank 0."""
    sent: list[bytes]
    """What it sent to rank 0 for the plan of the checkpoint."""
    groups: dict[str, tuple[str, list[int]]]
    """The ranks of each process group that it made, by the group's name, after the group's description."""


@dataclass
class _Run:
    """What a checkpoint is made of."""

    config: Config
    device: Device
    groups: Any
    sharding: Sharding
    chunks: Any
    optimizer: Any
    rank: int
    state: TrainState = field(default_factory=TrainState)
    data_record: Mapping[str, Any] | None = None

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters are up to date."""
        return self.sharding.gathered(self.chunks)


def rehearse(
    flags: Sequence[str],
    world_size: int,
    rank: int,
    heard: Sequence[bytes] = (),
    gathered: Sequence[Sequence[bytes]] = (),
    *,
    measures: bool = True,
) -> Rehearsed:
    """Play one rank from its flags to the plan of its first checkpoint.

    Args:
        flags: those of pretrain_gpt.py, with --device cpu.
        heard: what rank 0 told; this is another one.
        gathered: what each of the other ranks sent to rank 0, if this is rank 0: it then makes the plan of all ranks.
            Without, rank 0 begins its plan, so that others hear of it, and does not get far.
        measures: whether the phases are of interest, or only what this rank sends.
    Raises:
        CheckpointingException: the ranks together do not save each part of each tensor once.
    """
    with played(rank, world_size, heard, gathered) as objects:
        return _rehearse(flags, objects, Meter(measures=measures), rank != 0 or len(gathered) == world_size - 1)


def _rehearse(flags: Sequence[str], objects: Objects, meter: Meter, plans: bool) -> Rehearsed:
    with meter.phase("configuration"):
        config = configure(flags).config
    here = device.install("cpu")
    with meter.phase("process groups"):
        groups = process_groups.initialize(config.layout, here)
    made = groups_made()
    sharding = sharding_of(config)
    seed_dropout(config, groups)
    with meter.phase("data: checks, order, first batch"):
        loaders = build_loaders(config, here, groups)
        record = record_of_run(config, loaders.samples, None)
        loaders.train.global_batch(0, num_microbatches(config, config.training.global_batch_size))
    with meter.phase("model"):
        core = transformer_config(config, here.kind, on_meta=True)
        chunks = build_model(config, core, groups, on_meta=True)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_from_initialization_on(fakes), meter.phase("gradient buffers and optimizer"):
        here.torch_device = torch.device("meta")  # where the chunks are to stay for now
        wrapped = sharding.shard(chunks, core, groups, here)
        here.torch_device = torch.device("cpu")
        optimizer = sharding.optimizer(wrapped, groups, here)
    run = _Run(config, here, groups, sharding, wrapped, optimizer, torch.distributed.get_rank(), data_record=record)
    # What is counted or pickled, such as the number of updates and random states, must be real.
    with meter.phase("checkpoint: what this rank saves"), run.gathered_parameters():
        taken = checkpoint_state_dict.take(run, save.as_it_is)
        with fakes:
            state_dict = checkpoint_state_dict.to_save(taken, IN_PLACE)
    if plans:
        with meter.phase("checkpoint: plan"):
            _plan(state_dict)
    else:
        with suppress(CheckpointingException):
            _plan(state_dict)
    if meter.measures:
        _collect_garbage(meter)
    loaders.close()
    return Rehearsed(meter.phases, objects.told, objects.sent, made)


def groups_made() -> dict[str, tuple[str, list[int]]]:
    """Return description and ranks of each process group of this rank, by its name."""
    return {
        group.group_name: (group.group_desc, sorted(ranks))
        for group, ranks in _world.pg_group_ranks.items()
        if group in _world.pg_map
    }


def _plan(state_dict: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save._request(state_dict, Path(folder), save.Kept().strategy, validate=True)


def _collect_garbage(meter: Meter) -> None:
    """Measure what a collection costs that looks at everything, and one after --manual-gc's freeze."""
    with meter.phase("garbage collection"):
        gc.collect()
    gc.freeze()
    with meter.phase("garbage collection, --manual-gc"):
        gc.collect()
    gc.unfreeze()


@contextmanager
def _fake_from_initialization_on(fakes: FakeTensorMode) -> Iterator[None]:
    """Return a context in which weights are not drawn: they become fake tensors, and so does every tensor after them.

    (Modules cannot change the dtype of fake weights, as the wrapper of 16-bit training does.)
    """
    named = initialize.global_named_parameters
    with ExitStack() as stack:

        def make_fake(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
            stack.enter_context(fakes)
            for chunk in model_chunks:
                for module in chunk.modules():
                    _fake(module)
            return iter(())  # nothing is to be filled

        initialize.global_named_parameters = make_fake
        try:
            yield
        finally:
            initialize.global_named_parameters = named


def _fake(module: torch.nn.Module) -> None:
    for name, weight in module.named_parameters(recurse=False):
        fake = torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), requires_grad=weight.requires_grad)
        vars(fake).update(vars(weight))  # what megatron-core marks it with
        module.register_parameter(name, fake)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
