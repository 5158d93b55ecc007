"""One rank asks, the others go along: for programs that run on the first rank alone.

if model.rank != 0:
    follow(model)          # until the first rank closes its leader
else:
    leader = Leader(model)
    scores = leader.score(sequences, rows=8)
    leader.close()
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.generation import Generated, OnToken, generate
from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.plugins.tasks.sampling import Sampling
from megatron_ext.plugins.tasks.scoring import Scorable, Score, score


class Leader:
    """The first rank's way to the model on all ranks, which are in `follow`."""

    def __init__(self, model: Model):
        assert model.rank == 0, "the first rank leads"
        self.model = model

    def score(self, sequences: Sequence[Scorable], rows: int) -> list[Score]:
        """Return `scoring.score` on all ranks."""
        _broadcast((score.__name__, list(sequences), rows))
        return score(self.model, sequences, rows)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        rows: int,
        on_token: OnToken | None = None,
        *,
        speculative: bool = False,
    ) -> list[Generated]:
        """Return `generation.generate` on all ranks; `on_token` hears of the first replica's prompts alone."""
        _broadcast((generate.__name__, [list(prompt) for prompt in prompts], sampling, rows, speculative))
        return generate(self.model, prompts, sampling, rows=rows, speculative=speculative, on_token=on_token)

    def close(self) -> None:
        """Let the others go."""
        _broadcast(("close",))


def follow(model: Model) -> None:
    """Execute the leader's requests, until it closes. Every rank but the first calls it."""
    while True:
        name, *arguments = _broadcast(None)
        if name == "close":
            return
        if name == score.__name__:
            score(model, *arguments)
        elif name == generate.__name__:
            prompts, sampling, rows, speculative = arguments
            with suppress(ConfigurationError):  # a prompt that cannot be answered: the leader says so
                generate(model, prompts, sampling, rows=rows, speculative=speculative)


def _broadcast(what: Any) -> Any:
    """Return the first rank's request on every rank. Collective."""
    said = [what]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(said, src=0)
    return said[0]
