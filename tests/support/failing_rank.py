"""A rank that fails as its first argument says, in step 5; its peer waits for it in a collective."""

import os
import signal
import sys

from megatron_ext.errors import ConfigurationError, NumericError
from megatron_ext.resilience.process_end import RunStatus, end_process, run_guarded
from megatron_ext.resilience.signals import SignalWatcher


def main(how: str, status: RunStatus) -> int:
    if how == "configuration":
        raise ConfigurationError("--a 1: too small")

    import torch
    import torch.distributed

    with SignalWatcher():
        torch.distributed.init_process_group("gloo")
        tensor = torch.ones(4)
        for status.iteration in range(1, 10):
            torch.distributed.all_reduce(tensor)
            if status.rank == 1 and status.iteration == 5:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise NumericError("NaN in layer 3, iteration 5")
    return 0


if __name__ == "__main__":
    status = RunStatus(rank=int(os.environ["RANK"]), save=None if sys.argv[2] == "-" else sys.argv[2])
    end_process(run_guarded(lambda: main(sys.argv[1], status), status))
