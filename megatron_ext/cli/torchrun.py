"""torchrun, but the last line says why the run failed, and it exits with the code of the rank that failed first.

    megatron-ext torchrun --nproc-per-node 8 pretrain_gpt.py --config run.yaml

It takes torchrun's flags and is torchrun, which itself ends with a traceback of its own and exit code 1, whatever its
ranks return. A rank that a signal has ended gives 128 and the signal's number. A signal to this process is passed on to
the ranks: where they record how the run has ended, as after SIGTERM, at which they save, that is the end and the exit
code here, too; else it is 128 and the signal's number.
"""

import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import PeerLostError, TrainingError
from megatron_ext.resilience import exit_record
from megatron_ext.terminal import note

_CONSEQUENCES = (PeerLostError.exit_code, -signal.SIGTERM)
"""Exit codes of ranks that end because another one did."""


def main(argv: list[str]) -> int:
    """Run the ranks with torchrun's command line `argv` and return the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options, begun = torchrun.parse_args(argv), time.time()
    try:
        torchrun.run(options)
    except SignalException as signalled:
        if (end := _end_of_run(options.training_script_args, begun)) is not None:
            note(end["message"])
            return end["code"]
        note(f"torchrun: ended by {signalled.sigval.name}")
        return 128 + signalled.sigval
    except ChildFailedError as failed:
        rank, failure = min(failed.failures.items(), key=lambda each: _order(each[1]))
        if (cause := _written(failure)) is not None:
            note(cause["message"])
        elif failure.exitcode < 0:
            note(f"rank {rank}: ended by {failure.signal_name()}")
        else:
            note(f"rank {rank}: ended with exit code {failure.exitcode}; the last line of a rank above says why")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _end_of_run(words: Sequence[str], begun: float) -> dict[str, Any] | None:
    """Return the record that the ranks of a training with the command line `words` have left in --save since `begun`;
    None where they left none, or are no ranks of a training."""
    from megatron_ext.config.parse.arguments import read

    with contextlib.suppress(TrainingError, SystemExit):  # of another program
        save = read(words).values.get("save")
        return exit_record.read(Path(save), since=begun) if isinstance(save, str) else None
    return None


def _order(failure: Any) -> tuple[bool, bool, int]:
    """Return a sort key: causes before consequences, ranks with an exit record before ranks without, earlier before
    later failures."""
    return failure.exitcode in _CONSEQUENCES, _written(failure) is None, failure.timestamp


def _written(failure: Any) -> dict[str, Any] | None:
    """Return the exit record of a failed rank (resilience/exit_record.py); None if it wrote none."""
    written = failure.error_file_data.get("message")
    return written if isinstance(written, dict) else None
