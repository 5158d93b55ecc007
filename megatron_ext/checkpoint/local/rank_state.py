"""All that a rank's next step follows from, as plain tensors and numbers: what a snapshot holds.

Nothing of it is cut, gathered or named for another layout, as in a checkpoint: it is read by the same rank of the same
layout, which has tensors of the same names and shapes.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import torch

from megatron_ext.checkpoint.native import contents, optimizer_state
from megatron_ext.checkpoint.native.saveable import Saveable


def tensors_of(run: Saveable) -> dict[str, torch.Tensor]:
    """Return the tensors themselves, by names that are the same in every process of this layout. Each byte once.

    Call it where all parameters are up to date. A weight whose memory megatron-core's FSDP has freed after use (ZeRO-3)
    is left out; it follows from the rows, which the buffers hold.
    """
    found = {name: tensor.detach() for name, tensor in _all(run) if tensor.numel() and _has_memory(tensor)}
    largest_first = sorted(found, key=lambda name: -found[name].numel() * found[name].element_size())
    kept: dict[int, list[tuple[int, int]]] = {}
    chosen = set()
    for name in largest_first:
        tensor = found[name]
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        ranges = kept.setdefault(tensor.untyped_storage().data_ptr(), [])
        if not any(first <= begin and end <= last for first, last in ranges):
            chosen.add(name)
            if tensor.is_contiguous():
                ranges.append((begin, end))
    return {name: tensor for name, tensor in found.items() if name in chosen}


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def numbers_of(run: Saveable) -> dict[str, Any]:
    """Return the rest, as plain data whose floats read back to the same doubles."""
    return {
        "state": asdict(run.state),
        "optimizer_step": optimizer_state.step_count(contents.optimizer_parts(run)),
        "grad_scaler": contents.grad_scaler_state(run),
    }


def random_states(run: Saveable) -> dict[str, torch.Tensor]:
    """Return the states of the random generators."""
    states = {f"rng.{name}": state.clone() for name, state in contents.random_tracker().get_states().items()}
    return {"rng": run.device.rng_state(), **states}


def set_numbers(run: Saveable, numbers: dict[str, Any]) -> None:
    """Restore what `numbers_of` returned, when the tensors have been restored."""
    for field in fields(run.state):
        setattr(run.state, field.name, numbers["state"][field.name])
    parts = contents.optimizer_parts(run)
    for part in parts:
        part.updater.refresh()
    optimizer_state.set_step_count(parts, run.config.optimizer, numbers["optimizer_step"])
    contents.set_grad_scaler(run, numbers["grad_scaler"])


def set_random_states(run: Saveable, states: dict[str, torch.Tensor]) -> None:
    """Restore what `random_states` returned."""
    run.device.set_rng_state(states["rng"])
    names = contents.random_tracker().get_states()
    contents.random_tracker().set_states({name: states[f"rng.{name}"] for name in names})


def _all(run: Saveable) -> Iterator[tuple[str, torch.Tensor]]:
    for number, chunk in enumerate(run.chunks):
        for index, tensor in enumerate(run.sharding.held_weights(chunk)):
            if tensor is not None:
                yield f"weights.{number}.{index}", tensor
        for name, buffer in chunk.named_buffers():
            yield f"buffers.{number}.{name}", buffer
    for number, part in enumerate(contents.optimizer_parts(run)):
        optimizer_state.initialize_state(part, run.config.optimizer)
        for index, (_, state) in enumerate(optimizer_state.own_state(part, run.config.optimizer)):
            for name, tensor in state.items():
                yield f"optimizer.{number}.{index}.{name}", tensor
        for index, (_, main) in enumerate(part.main_parameters()):
            yield f"optimizer.{number}.{index}.main", part.updater.master_of(main)
