"""Pretrain a GPT model. `megatron-ext pretrain --help` lists the flags; the README shows how to begin.

megatron-ext pretrain --config run.yaml --dry-run --world-size 8
torchrun --nproc-per-node 8 -m megatron_ext pretrain --config run.yaml --save checkpoints --load checkpoints
"""

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_ext import environment
from megatron_ext.checkpoint.native import lock
from megatron_ext.config.lr_scale import scaling_text
from megatron_ext.errors import ConfigurationError
from megatron_ext.lasting_output import survive_closed_pipes
from megatron_ext.resilience import exit_record, launch
from megatron_ext.resilience.launcher_watch import watch_launcher
from megatron_ext.resilience.process_end import RunStatus, end_process, run_guarded
from megatron_ext.terminal import warn
from megatron_ext.train.configure import configure


def main(argv: Sequence[str], status: RunStatus, **own: Any) -> int:
    """Configure, then train. Nothing heavy is imported before the flags are known to be right.

    Args:
        own: arguments of `train.pretrain.pretrain` that bring in a user's code.
    """
    environment.check_launch()
    try:
        configured = configure(argv, believing=True)
    except ConfigurationError:
        status.save = _save_folder(argv)  # of the record
        raise
    config = configured.config
    status.save = config.checkpoint.save
    for warning in configured.typed.warnings if status.rank == 0 else ():
        warn(warning)
    scaled = scaling_text(configured.typed.values, config) if status.rank == 0 else None
    if configured.typed.dry_run:
        from megatron_ext.plan.dry_run import describe
        from megatron_ext.plan.verdict import verdict

        typed = configured.typed
        memory, fits = verdict(config, device_memory_gb=typed.device_memory_gb, device_name=typed.device_name)
        print(describe(config), *([scaled] if scaled else []), "\n".join(memory), sep="\n\n")
        return 0 if fits else 1
    if launch.stopped_before():
        return 0
    if scaled:
        print(scaled, flush=True)
    from megatron_ext.train.pretrain import pretrain

    pretrain(configured, status, **own)
    return 0


def _save_folder(argv: Sequence[str]) -> str | None:
    """Return the folder that --save names on the command line, emptied of the record of an earlier run; None where it
    names none, for a dry run, and where another job is at work in it."""
    values = [value for flag, value in itertools.pairwise([*argv, ""]) if flag == "--save"]
    values += [word.partition("=")[2] for word in argv if word.startswith("--save=")]
    if not values or not values[-1] or values[-1].startswith("-") or "--dry-run" in argv:
        return None
    if environment.rank() == 0:
        if lock.is_held(values[-1]):
            return None
        exit_record.clear(values[-1])
    return values[-1]


def start(argv: Sequence[str], **own: Any) -> NoReturn:
    """Run the program as this process, on the rank that the launcher says, and end the process.

    Args:
        own: arguments of `train.pretrain.pretrain` that bring in a user's code: `start(flags, loss=my_loss)`.
    """
    survive_closed_pipes()
    status = RunStatus(rank=environment.rank())
    watch_launcher(status)
    end_process(run_guarded(lambda: main(argv, status, **own), status))
