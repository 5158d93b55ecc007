"""Looks once, on the first batch, at which positions the output of a user's own layers depends on.

Each part is computed twice more, without gradients and dropout: as it is, and with the hidden states of the sample's
last position changed, of which no other position's output may know in a causal model. What declares that it reads each
token alone is also computed with the first position of each rank changed. Random numbers stay as they were.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.model.names import unwrapped
from megatron_ext.model.own_layers import OwnModule, hidden_states_of, own_modules
from megatron_ext.terminal import say, warn
from megatron_ext.train.random_state import random_state, set_random_state
from megatron_ext.train.run import Run
from megatron_ext.train.trainer import Callback, Trainer

_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference, over the largest output, of results that are computed in different ways; 16-bit numbers: 2^-5."""


@dataclass(frozen=True)
class Seen:
    """Observations of one of the user's modules on one rank."""

    title: str
    place: str
    is_causal: bool
    reads_token_alone: bool
    """False where the module declares it and its output nevertheless depends on an earlier position."""


class OwnParts(Callback):
    """Says in one line whether own layers are causal, and ends the run where a declaration is untrue."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._is_over = False

    def on_start(self, trainer: Trainer) -> None:
        run = trainer.run
        for one in own_modules(unwrapped(run.chunks)):
            if one.has_hidden_states:
                vars(one.module)["forward"] = _FirstPass(one, run, self._seen.append)

    def before_update(self, trainer: Trainer) -> None:
        if self._is_over:
            return
        self._is_over = True
        of_ranks: list[Any] = [self._seen]
        if trainer.run.world_size > 1:
            of_ranks = [None] * trainer.run.world_size
            torch.distributed.all_gather_object(of_ranks, self._seen)
        every = [seen for of_rank in of_ranks for seen in of_rank]
        untrue = {seen.title: seen for seen in every if not seen.reads_token_alone}
        if untrue:
            raise ConfigurationError(
                [
                    f"{seen.title}, {seen.place}, declares reads = 'token', but its output at a position depends on "
                    "its input at others (first batch); declare reads = 'sequence', or change the class "
                    "(docs/own_mixer.md)"
                    for seen in untrue.values()
                ]
            )
        if trainer.run.rank == 0:
            _report(every)


def _report(every: Sequence[Seen]) -> None:
    leaks = {seen.title: seen.place for seen in every if not seen.is_causal}
    causal = dict.fromkeys(seen.title for seen in every if seen.title not in leaks)
    if causal:
        say(f"own layers are causal on the first batch: {', '.join(causal)}")
    if leaks:
        places = ", ".join(f"{title}, {place}" for title, place in leaks.items())
        warn(
            f"own layers are NOT causal: {places}: outputs depend on later positions, whose tokens are to be predicted"
        )


class _FirstPass:
    """Stands in for the forward pass of a module until the first one of the training."""

    def __init__(self, one: OwnModule, run: Run, seen: Callable[[Seen], None]) -> None:
        self._one, self._run, self._seen, self._forward = one, run, seen, one.module.forward
        tp, is_divided = run.groups.tp, run.config.layout.sequence_parallel
        is_last = not is_divided or tp.rank() == tp.size() - 1
        self._has_last_position = is_last and run.groups.cp.rank() == 0  # whose second chunk is the last of all

    @torch.compiler.disable
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._one.module.training:
            del vars(self._one.module)["forward"]
            with torch.no_grad(), _as_evaluated(self._one.module):
                self._look(arguments, named)
        return self._forward(*arguments, **named)

    def _look(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden_SBH = hidden_states_of(arguments, named)
        state = random_state(self._run)

        def output(changed: int | None) -> torch.Tensor:
            given = hidden_SBH.detach().clone()
            if changed is not None:
                given[changed] = 1.0 - given[changed]
            set_random_state(self._run, state)
            rest = dict(named) if arguments else {**named, "hidden_states": given}
            found = self._forward(*((given, *arguments[1:]) if arguments else ()), **rest)
            return found[0] if isinstance(found, tuple) else found

        expected = output(None)
        if expected.shape != hidden_SBH.shape:
            return  # the pass that follows says so
        far = _ROUNDING.get(expected.dtype, 2.0**-5) * float(expected.abs().max())
        last = -1 if self._has_last_position else None
        kept = slice(0, last)
        is_causal = bool((output(last)[kept] - expected[kept]).abs().max() <= far) if len(expected[kept]) else True
        alone = True
        if self._one.reads == "token" and len(expected) > 1:
            alone = bool((output(0)[1:] - expected[1:]).abs().max() <= far)
        set_random_state(self._run, state)
        self._seen(Seen(self._one.title, self._one.place, is_causal, alone))


@contextmanager
def _as_evaluated(module: torch.nn.Module) -> Iterator[None]:
    """Let a module draw nothing and record nothing, for a while."""
    trained = [one for one in module.modules() if one.training]
    for one in trained:
        one.training = False
    try:
        yield
    finally:
        for one in trained:
            one.training = True
