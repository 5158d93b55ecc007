#!/usr/bin/env python3
"""Pretrain a GPT model. `python pretrain_gpt.py --help` lists the flags; the README shows how to begin."""

import sys
from collections.abc import Sequence

from megatron_ext import environment
from megatron_ext.config.lr_scale import scaling_text
from megatron_ext.resilience import launch
from megatron_ext.resilience.launcher_watch import watch_launcher
from megatron_ext.resilience.process_end import RunStatus, end_process, run_guarded
from megatron_ext.terminal import warn
from megatron_ext.train.configure import configure


def main(argv: Sequence[str], status: RunStatus) -> int:
    """Configure, then train. Nothing heavy is imported before the flags are known to be right."""
    environment.check_launch()
    configured = configure(argv)
    config = configured.config
    status.save = config.checkpoint.save
    for warning in configured.typed.warnings if status.rank == 0 else ():
        warn(warning)
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


if __name__ == "__main__":
    run_status = RunStatus(rank=environment.rank())
    watch_launcher(run_status)
    end_process(run_guarded(lambda: main(sys.argv[1:], run_status), run_status))
