"""How often a step makes the host wait for numbers of the device, whatever the size of the model: twice where
they are needed before the update, else once, when the next step is under way.

On a GPU each is a synchronization, after which the device has nothing queued but what came later than what is read.
"""

import shlex
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.checkpoints import build

FLAGS = shlex.split("""
    --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 --micro-batch-size 1
    --make-vocab-size-divisible-by 16 --global-batch-size 4 --train-iters 5 --lr 1e-3 --eval-interval 0 --eval-iters 0
    --clip-grad 0.01 --device cpu
""")
NUMBERS = "read"
"""Function that reads all numbers of a step, late those of the step before."""
READERS = [NUMBERS, "_of_all_ranks"]
"""The second reads whether to stop."""
LATE = [NUMBERS]
OURS = ("megatron_ext/", "megatron/core/")
SMALL, LARGE = "--num-layers 2", "--num-layers 4 --bf16 --use-distributed-optimizer"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


def _reader() -> str:
    """The function of ours or of megatron-core that asked."""
    frames = [frame for frame in traceback.extract_stack() if any(part in frame.filename for part in OURS)]
    return frames[-1].name


def _reads(flags: list[str], late: bool) -> list[list[str]]:
    """Who reads numbers of the device until each of some steps has begun and the one before has ended, and until the
    last has ended. On a CPU every tensor counts as one of the device."""
    found: list[str] = []
    of_steps: list[list[str]] = []

    class Reads(TorchDispatchMode):
        """What reads one number: item, float, bool, and a tensor made of tensors."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                found.append(_reader())
            return func(*args, **(kwargs or {}))

    class Begins(Callback):
        def on_step_begin(self, trainer: Any) -> None:
            of_steps.append(found.copy())
            found.clear()

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            found.append(_reader())
            return method(*args, **options)

        return read

    run = build(flags, reads_wait=late)
    trainer = Trainer(run, [Begins(), Stopping(SignalWatcher(), None, 60.0)])
    for name in ("tolist", "cpu", "numpy"):  # what reads several
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
    torch.cuda.synchronize = reading(torch.cuda.synchronize)
    for name in ("synchronize", "query"):
        setattr(torch.cuda.Event, name, reading(getattr(torch.cuda.Event, name)))
    with Reads():
        trainer.fit()
    run.loaders.close()
    # The state of a generator lies in host memory, a GPU's as well.
    return [[reader for reader in readers if reader != "fork"] for readers in (*of_steps[1:], found)]


@pytest.mark.parametrize("flags", [SMALL, LARGE])
def test_a_step_reads_its_numbers_once_before_its_update(flags: str) -> None:
    [of_steps] = run_ranks(1, _reads, [*FLAGS, *flags.split()], False)
    assert of_steps == [READERS] * 5


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, SMALL),
        (1, LARGE),
        (2, f"{SMALL} {PP2}"),
        # Slow: more ranks read as often.
        pytest.param(4, f"{LARGE} {TP2} {PP2}", marks=pytest.mark.slow),
        pytest.param(8, f"{LARGE} {TP2} {PP2}", marks=pytest.mark.slow),
    ],
)
def test_a_step_reads_once_when_the_next_is_under_way(ranks: int, flags: str) -> None:
    """Nothing is read of the first step before the second has begun, and of the last two when the run ends."""
    for of_steps in run_ranks(ranks, _reads, [*FLAGS, *flags.split()], True):
        assert of_steps == [[], LATE, LATE, LATE, LATE * 2]
