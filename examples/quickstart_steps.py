"""Says how many steps of the quickstart fit into five minutes on this machine, by measuring its first ones.

    python examples/quickstart_steps.py 1200 --device cpu --num-layers 4 ... --micro-batch-size 8 --global-batch-size 8

trains a few steps with these flags on synthetic tokens, and prints the number and the seconds of the whole quickstart
on its standard output. What that means in minutes goes to standard error. A machine that is fast enough gets the
number that it was given.
"""

import contextlib
import io
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BUDGET = 300.0  # seconds
# All but the training on one process (corpus, tokenizer, starts, the last steps on 8 processes, evaluations, export,
# sample) took 80 of 245 s where a step took 0.142 s, and is computation of the same kind. A GPU does not speed up most.
REST_IN_STEPS, LEAST_REST = 560, 60.0
FEWEST = 100  # with fewer there is nothing to see
MEASURED, WARM_UP = 6, 2  # steps


class Fitted(NamedTuple):
    """What the quickstart does on a machine, and how long it takes by estimate."""

    steps: int
    seconds: float
    """Seconds of all of it."""
    unfitted: float
    """Seconds with the steps that were asked for."""


def fitted(step: float, asked: int) -> Fitted:
    """Return the steps that fit into the budget, at most `asked` and at least FEWEST, a multiple of 20.

    Args:
        step: seconds of one step.
    """
    rest = max(REST_IN_STEPS * step, LEAST_REST)
    unfitted = rest + asked * step
    steps = asked
    if unfitted > BUDGET:
        # The warm-up takes a twentieth of the steps.
        steps = min(asked, max(FEWEST, int((BUDGET - rest) / step) // 20 * 20))
    return Fitted(steps, rest + steps * step, unfitted)


def sentence(step: float, asked: int) -> str:
    """Return what to tell a user who waits."""
    steps, seconds, unfitted = fitted(step, asked)
    if steps == asked:
        return f"{asked:,} steps of {step:.2f} s: about {_minutes(seconds)} in all on this machine"
    return (
        f"a step takes {step:.2f} s on this machine, and {asked:,} steps {_minutes(unfitted)} in all: training "
        f"{steps:,} steps, about {_minutes(seconds)} in all (losses differ from docs/first_model.md's; "
        f"bash examples/quickstart.sh FOLDER {asked} takes them all)"
    )


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return "a minute" if minutes == 1 else f"{minutes} minutes"


def measured(flags: list[str]) -> float:
    """Train a few steps, and return the seconds of the fastest one after the first two."""
    from megatron_ext.train.pretrain import pretrain

    begun: list[float] = []

    def clock() -> Any:
        from megatron_ext.train.trainer import Callback

        class Clock(Callback):
            """Notes when each step begins."""

            def on_step_begin(self, trainer: Any) -> None:
                begun.append(time.perf_counter())

        return Clock()

    synthetic = ["--mock-data", "--vocab-size", "1024", "--eval-iters", "0", "--train-iters", str(MEASURED)]
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain([*flags, *synthetic], callbacks=[clock])
    return min(after - before for before, after in zip(begun[WARM_UP:], begun[WARM_UP + 1 :], strict=False))


def main() -> None:
    """Measure, say it, and print the number of steps and the seconds of all."""
    asked = int(sys.argv[1])
    step = measured(sys.argv[2:])
    print(sentence(step, asked), file=sys.stderr)
    found = fitted(step, asked)
    print(found.steps, round(found.seconds))


if __name__ == "__main__":
    main()
