"""Several small computations by the same ranks: what takes time is the start of a rank, not a model of two layers."""

from collections.abc import Callable, Sequence
from typing import Any


def in_turn(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """On a rank of `run_ranks`: what `function` returns for each of the arguments, one after the other.

    In between, megatron-core's groups end, so that each may have a layout of its own on these ranks.
    """
    from megatron.core import parallel_state

    results = []
    for argument in arguments:
        results.append(function(argument))
        # The default group stays: one store serves it only once.
        parallel_state.destroy_model_parallel()
    return results
