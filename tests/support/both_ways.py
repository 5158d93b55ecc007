"""Trains twice on ranks: reading the numbers of each step before its update, and late, as on a GPU."""

from typing import Any, NamedTuple

from megatron_ext.train.trainer import Callback, Trainer
from tests.support.checkpoints import build
from tests.support.run_state import state_hash
from tests.support.several_models import end_layout

ALONE = "--eval-iters 0 --num-workers 0"
OF_LAYOUTS = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 61 --init-method-std 0.1 "
    "--make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 3 "
    "--clip-grad 0.5 --hidden-dropout 0 --attention-dropout 0 --device cpu"
)
"""What a layout trains, without the flags of its model."""


class Trained(NamedTuple):
    """What one rank saw of a run."""

    steps: list[tuple[str, ...]]
    """Of each step the state after it, its result, the sum of losses, and the rate of the next."""

    hash: str
    ahead: list[int]
    """How many steps were begun when each ended, and had not ended."""


BothWays = tuple[Trained, Trained]


def trainer_of(flags: list[str], late: bool, callbacks: Any = ()) -> Any:
    """Return a trainer on a device whose reads wait, as it says if `late`."""
    return Trainer(build(flags, reads_wait=late), list(callbacks))


def _train(flags: list[str], late: bool) -> Trained:
    steps: list[tuple[str, ...]] = []
    begun: list[int] = [0]
    ahead: list[int] = []

    class Notes(Callback):
        def on_step_begin(self, trainer: Any) -> None:
            begun.append(trainer.position.iteration + 1)

        def ends_before_next(self, trainer: Any) -> bool:
            return False

        def on_step_end(self, trainer: Any, result: Any) -> None:
            state = trainer.run.state
            # Python writes as many digits of a number as tell it from any other.
            steps.append((str(state), str(result), state.interval_loss.hex(), trainer.learning_rate.hex()))
            ahead.append(begun[-1] - state.iteration)

    trainer = trainer_of(flags, late, [Notes()])
    trainer.fit()
    trainer.run.loaders.close()
    return Trained(steps, state_hash(trainer.run), ahead)


def trained_both_ways(flags: str) -> BothWays:
    """Return what a rank sees of a run whose numbers are read at once, and of the same where they are read late."""
    words = [*flags.split(), *ALONE.split()]
    at_once = _train(words, late=False)
    end_layout()
    return at_once, _train(words, late=True)
