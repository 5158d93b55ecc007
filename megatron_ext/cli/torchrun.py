"""torchrun, but the last line says why the run failed, and it exits with the code of the rank that failed first.

    megatron-ext torchrun --nproc-per-node 8 pretrain_gpt.py --config run.yaml

It takes torchrun's flags and is torchrun, which itself ends with a traceback of its own and exit code 1, whatever its
ranks return. A rank that a signal has ended gives 128 and the signal's number, and so does a signal to this process,
which the ranks get as well.
"""

import signal
from typing import Any

from megatron_ext.errors import PeerLostError
from megatron_ext.terminal import note

_CONSEQUENCES = (PeerLostError.exit_code, -signal.SIGTERM)
"""Exit codes of ranks that end because another one did."""


def main(argv: list[str]) -> int:
    """Run the ranks with torchrun's command line `argv` and return the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(torchrun.parse_args(argv))
    except SignalException as signalled:
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


def _order(failure: Any) -> tuple[bool, bool, int]:
    """Return a sort key: causes before consequences, ranks with an exit record before ranks without, earlier before
    later failures."""
    return failure.exitcode in _CONSEQUENCES, _written(failure) is None, failure.timestamp


def _written(failure: Any) -> dict[str, Any] | None:
    """Return the exit record of a failed rank (resilience/exit_record.py); None if it wrote none."""
    written = failure.error_file_data.get("message")
    return written if isinstance(written, dict) else None
