"""Times steps of the real training loop in this process, for other benchmarks."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

MADE_UP = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--eval-interval", "0", "--lr", "1e-3")


def timed_steps(flags: Sequence[str], warmup: int, steps: int, profiler: Any = None) -> dict[str, Any]:
    """Train and return seconds and processor seconds of each step after the first ones, and the FLOPs of a token.

    Args:
        flags: those of pretrain_gpt.py but for the number of steps, with --device.
        profiler: a context for the timed steps.
    """
    from megatron_ext import device
    from megatron_ext.train.configure import configure

    config = configure([*MADE_UP, *flags, "--train-iters", str(warmup + steps)]).config
    training = config.training
    here = device.install(
        config.layout.device,
        fuses=not training.disable_jit_fuser,
        own_kernels=not training.no_triton_kernels,
        nccl_backend=config.layout.nccl_backend,
    )
    from megatron_ext.cost.flops import flops_per_token
    from megatron_ext.parallel import groups
    from megatron_ext.train.build import build_run
    from megatron_ext.train.step import StepResult
    from megatron_ext.train.trainer import Callback, Trainer

    marks: list[tuple[float, float]] = []

    class Marks(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            here.synchronize()
            if len(marks) == warmup and profiler is not None:
                profiler.__enter__()
            marks.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.run.state.iteration == warmup + steps:
                here.synchronize()
                marks.append((time.perf_counter(), time.process_time()))
                if profiler is not None:
                    profiler.__exit__(None, None, None)

    run = build_run(config, here)
    Trainer(run, [Marks()]).fit()
    run.loaders.close()
    groups.destroy()
    timed = marks[warmup:]
    differences = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(timed)]
    return {
        "seconds": [seconds for seconds, _ in differences],
        "processor_seconds": [used for _, used in differences],
        "flops_per_token": flops_per_token(config),
        "tokens": config.model.seq_length * (config.training.global_batch_size or 1),
    }
