"""Pretrain a GPT model. `megatron-ext pretrain --help` lists the flags; the README shows how to begin.

megatron-ext pretrain --config run.yaml --dry-run --world-size 8
torchrun --nproc-per-node 8 -m megatron_ext pretrain --config run.yaml --save checkpoints --load checkpoints
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_ext.commandline import survive_closed_pipes
from megatron_ext.config.lr_scale import scaling_text
from megatron_ext.resilience import launch
from megatron_ext.resilience.launcher_watch import watch_launcher
from megatron_ext.resilience.process_end import RunStatus, end_process, run_guarded
from megatron_ext.train.configure import configure


def main(argv: Sequence[str], status: RunStatus) -> int:
    """Configure, then train. Nothing heavy is imported before the flags are known to be right."""
    configured = configure(argv)
    config = configured.config
    status.save = config.checkpoint.save
    for warning in configured.typed.warnings if status.rank == 0 else ():
        print(f"warning: {warning}", file=sys.stderr)
    scaled = scaling_text(configured.typed.values, config) if status.rank == 0 else None
    if configured.typed.dry_run:
        from megatron_ext.plan.dry_run import describe

        print(describe(config), *([scaled] if scaled else []), sep="\n\n")
        return 0
    if launch.stopped_before():
        return 0
    if scaled:
        print(scaled, flush=True)
    from megatron_ext.train.pretrain import pretrain

    pretrain(configured, status)
    return 0


def start(argv: Sequence[str]) -> NoReturn:
    """Run the program as this process, on the rank that the launcher says, and end the process."""
    survive_closed_pipes()
    status = RunStatus(rank=int(os.environ.get("RANK", "0")))
    watch_launcher(status)
    end_process(run_guarded(lambda: main(argv, status), status))
