"""All that a run's next step follows from, as one hash."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch


def state_hash(run: Any) -> str:
    """SHA-256 of this rank's weights, master copies and optimizer state, bit for bit. Collective where weights
    are divided."""
    digest = hashlib.sha256()
    with run.gathered_parameters():
        for tensor in _tensors(run):
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(run: Any) -> Iterator[torch.Tensor]:
    from megatron_ext.parallel.rows import local_part

    for chunk in run.chunks:
        yield from map(local_part, chunk.parameters())
    for part in run.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                yield main
                # An optimizer makes its state at its first update; a saved or loaded one has it, as zeros.
                for _, value in sorted(part.optimizer.state[main].items()):
                    yield torch.as_tensor(value).reshape(-1)
