"""Hands thousands of changed inputs to everything that reads what others wrote, in one process.

    python -m tests.fuzz.fuzzer --inputs 10000 --seed 1 [--target yaml]

An input is taken or refused by an error of `megatron_ext.errors` (or, below these, by the reader's own kind). Anything
else is a finding: another exception, more than `SECONDS`, a gigabyte more memory, or content that was taken although
it is not what it says (each target knows how to tell). The same seed gives the same inputs.
"""

import argparse
import collections
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import TrainingError
from tests.fuzz.targets import TARGETS

SECONDS = 10.0
"""Processor seconds that one input may take; those meant for are below two, on a machine with other work."""

_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """An input that was neither taken for what it is nor refused."""

    target: str
    seed: str
    what: str


def fuzz(inputs: int, seed: int, targets: Sequence[str] = ()) -> tuple[collections.Counter[str], list[Finding]]:
    """Try inputs on the targets in turn.

    Returns:
        How many inputs each target has taken and refused, and what was found.
    """
    names = list(targets or TARGETS)
    outcomes: collections.Counter[str] = collections.Counter()
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder:
        readers = {name: _prepared(name, Path(folder) / name) for name in names}
        for number in range(inputs):
            name = names[number % len(names)]
            one = f"{seed}:{name}:{number}"
            outcome = _try(readers[name], random.Random(one))
            outcomes[f"{name} {outcome.split(':')[0]}"] += 1
            if outcome not in ("taken", "refused"):
                findings.append(Finding(name, one, outcome))
    return outcomes, findings


def _prepared(name: str, folder: Path) -> Callable[[random.Random], None]:
    folder.mkdir()
    return TARGETS[name](folder)


def _try(read: Callable[[random.Random], None], chance: random.Random) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _at_most(SECONDS):
            read(chance)
        outcome = "taken"
    except TrainingError as error:
        outcome = "refused"
        if not str(error) or len(str(error)) > 20_000:
            outcome = f"wrong message: {len(str(error))} characters"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(at.filename).name}:{at.lineno}" for at in where if "megatron_ext" in at.filename]
        place = ours[-1] if ours else "the target itself"
        outcome = f"{type(error).__name__}: {str(error)[:300]!r} at {place}"
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > _BYTES:
        outcome = "memory: a gigabyte more"
    return outcome


class TooLongError(BaseException):
    """Raised where an input takes too long."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TooLongError after so many seconds of processor time, or ten times as many of waiting."""

    def stop(number: int, frame: object) -> None:
        raise TooLongError(f"more than {seconds} seconds")

    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGVTALRM, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


def main() -> int:
    """Run the command line; the exit code is 1 where something was found."""
    parser = argparse.ArgumentParser(description="Fuzz everything that reads what others wrote.")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), default=[])
    options = parser.parse_args()
    started = time.monotonic()
    outcomes, findings = fuzz(options.inputs, options.seed, options.target)
    for name in sorted(outcomes):
        print(f"{outcomes[name]:7d} {name}")
    for finding in findings[:100]:
        print(f"FOUND {finding.target} ({finding.seed}): {finding.what}")
    print(f"{options.inputs} inputs, {len(findings)} findings, {time.monotonic() - started:.0f} s, seed {options.seed}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
