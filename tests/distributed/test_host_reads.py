"""How often a step makes the host wait for numbers of the device: three times, whatever the size of the model.

On a GPU each is a synchronization, after which the device has nothing queued.
"""

import shlex
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.verify.ranks import run_ranks

FLAGS = shlex.split("""
    --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 --micro-batch-size 1
    --make-vocab-size-divisible-by 16 --global-batch-size 4 --train-iters 8 --lr 1e-3 --eval-interval 0 --clip-grad 0.01
    --device cpu
""")
READERS = ["get_grad_norm_fp32", "summed", "on_step_end"]
"""Functions: the norm; loss, tokens and whether all is finite, over all ranks; whether to stop."""
OURS = ("megatron_ext/", "megatron/core/")


def _reader() -> str:
    """The function of ours or of megatron-core that asked."""
    frames = [frame for frame in traceback.extract_stack() if any(part in frame.filename for part in OURS)]
    return frames[-1].name


def _reads(flags: list[str]) -> list[list[str]]:
    """Who reads numbers of the device in each of some steps. On a CPU every tensor counts as one of the device."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_ext import device
    from megatron_ext.resilience.signals import SignalWatcher
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.stopping import Stopping
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    found: list[str] = []

    class Reads(TorchDispatchMode):
        """What reads one number: item, float, bool, and a tensor made of tensors."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                found.append(_reader())
            return func(*args, **(kwargs or {}))

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            found.append(_reader())
            return method(self, *args, **options)

        return read

    run = build_run(configure(flags).config, device.install("cpu"))
    trainer = Trainer(run, [])
    stopping = Stopping(SignalWatcher(), None, 60.0)
    for name in ("tolist", "cpu", "numpy"):  # what reads several
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
    of_steps = []
    for _ in range(3):
        found.clear()
        with Reads():
            stopping.on_step_end(trainer, trainer.step())
        of_steps.append(list(found))
    run.loaders.close()
    # The state of a generator lies in host memory, a GPU's as well.
    return [[reader for reader in readers if reader != "fork"] for readers in of_steps]


@pytest.mark.parametrize("flags", ["--num-layers 2", "--num-layers 4 --bf16 --use-distributed-optimizer"])
def test_a_step_reads_three_times(flags: str) -> None:
    [of_steps] = run_ranks(1, _reads, [*FLAGS, *flags.split()])
    assert of_steps == [READERS] * 3
