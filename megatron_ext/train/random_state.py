"""Reads and restores the states of the generators that dropout draws from."""

from typing import Any

from megatron.core import tensor_parallel

from megatron_ext.train.run import Run

RandomState = Any


def random_state(run: Run) -> RandomState:
    """Return the state of the generators that dropout draws from."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    return run.device.rng_state(), {name: state.clone() for name, state in tracker.get_states().items()}


def set_random_state(run: Run, state: RandomState) -> None:
    """Put the generators back into a state."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    run.device.set_rng_state(state[0])
    tracker.set_states({name: value.clone() for name, value in state[1].items()})
