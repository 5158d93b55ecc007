"""pretrain_gpt.py in a rank of `run_ranks`: the whole program, without the start of an interpreter."""

import contextlib
import io
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61
    --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --eval-interval 0
    --device cpu
"""


def tiny(flags: str) -> list[str]:
    """Return the flags of a launch with two layers of GPT-2, and these, which may override them and give its length."""
    return shlex.split(f"{_TINY} {flags}")


@dataclass(frozen=True)
class Ended:
    """How the program ended on one rank, and which training samples it read, in this order."""

    code: int
    output: str
    errors: str
    samples: list[int]


def run_program(argv: Sequence[str]) -> Ended:
    """Run the program on this rank; `samples` are those that its loader really asked its training data for."""
    from megatron_ext.data.loader import BatchLoader
    from megatron_ext.resilience.process_end import RunStatus, run_guarded
    from pretrain_gpt import main

    samples: list[int] = []
    trains = [False]  # whether the batch that is being loaded is one of the training
    read, load = BatchLoader._read, BatchLoader.global_batch

    def read_and_remember(self: BatchLoader, index: int) -> Any:
        if trains[0]:
            samples.append(index)
        return read(self, index)

    def load_and_tell(
        self: BatchLoader, consumed_samples: int, num_microbatches: int, end: int | None = None
    ) -> list[Any]:
        trains[0] = end is None  # an evaluation has an end
        return load(self, consumed_samples, num_microbatches, end)

    BatchLoader._read, BatchLoader.global_batch = read_and_remember, load_and_tell
    status = RunStatus(rank=int(os.environ["RANK"]))
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = run_guarded(lambda: main([*argv, "--device", "cpu", "--num-workers", "0"], status), status)
    return Ended(code, output.getvalue(), errors.getvalue(), samples)
