"""Pretrain a GPT model. `megatron-ext pretrain --help` lists the flags; the README shows how to begin.

megatron-ext pretrain --config run.yaml --dry-run --world-size 8
torchrun --nproc-per-node 8 -m megatron_ext pretrain --config run.yaml --save checkpoints --load checkpoints

What only a run needs is imported by the functions that need it: `--help` waits for none of it.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_ext import environment
from megatron_ext.config.parse.arguments import read
from megatron_ext.errors import ConfigurationError
from megatron_ext.own_code import hand_over
from megatron_ext.terminal import columns, lines, say, survive_lost_output, warn

if TYPE_CHECKING:
    from megatron_ext.config.parse.arguments import Typed
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.train.configure import Configured

_ANSWERED = {"--help", "-h", "--version"}
"""Flags that `read` answers, and ends the process."""


_ALONE = "This is the layout of one process, since no launcher says how many: --world-size 8 shows that of 8."


def main(argv: Sequence[str], status: "RunStatus", **own: Any) -> int:
    """Configure, then train. Nothing heavy is imported before the flags are known to be right.

    Args:
        own: arguments of `train.pretrain.pretrain` that bring in a user's code.
    """
    environment.check_launch()
    from megatron_ext.registry import with_own

    if own:
        from megatron_ext.train.extensions import require_known  # imports numpy

        require_known(own)
    with with_own("families", own.get("families", ())):  # of which configuring asks, too
        return _run(argv, status, own)


def _run(argv: Sequence[str], status: "RunStatus", own: Mapping[str, Any]) -> int:
    from megatron_ext.config.parse.command_line import read  # with the registry of plugins

    typed = read(argv)
    if not _is_needed(typed):
        return 0
    from megatron_ext.config.derived.lr_scale import scaling_text
    from megatron_ext.resilience import launcher
    from megatron_ext.train.configure import configure_typed

    try:
        configured = configure_typed(typed, believing=True)
    except ConfigurationError:
        status.save = _save_folder(typed)  # of the record
        raise
    config = configured.config
    status.save = config.checkpoint.save
    launched = [environment.launch_warning()]
    for warning in (*filter(None, launched), *configured.typed.warnings) if status.rank == 0 else ():
        warn(warning)
    scaled = scaling_text(configured.typed.values, config) if status.rank == 0 else None
    if configured.typed.dry_run:
        return _describe(configured, scaled, own)
    if launcher.stopped_before():
        return 0
    if scaled:
        say(scaled)
    from megatron_ext.train.pretrain import pretrain

    pretrain(configured, status, **own)
    return 0


def _describe(configured: "Configured", scaled: str | None, own: Mapping[str, Any]) -> int:
    """Print the text of --dry-run, with a user's own optimizer and layers, and return the exit code."""
    from megatron_ext.cost.dry_run import describe, height, verdict

    typed, config = configured.typed, configured.config
    if own:
        from megatron_ext.train.extensions import Extensions  # imports numpy

        extensions = Extensions(**own)
        for warning in extensions.warnings(typed.values) if environment.rank() == 0 else ():
            warn(warning)
        config = extensions.applied(config)
    memory, fits = verdict(config, device_memory_gb=typed.device_memory_gb, device_name=typed.device_name)
    if environment.rank() == 0:  # every rank of a launcher comes here
        alone = [] if "world_size" in typed.values or "WORLD_SIZE" in os.environ else [_ALONE]
        below = [*([scaled] if scaled else []), "\n".join(memory), *alone]
        shown = [line for text in below for line in ("", *text.splitlines())]
        room = lines() - 1 - height(shown, columns()) if sys.stdout.isatty() else None  # with a line for the prompt
        say("\n\n".join([describe(config, room, columns() if room is not None else None), *below]))
    return 0 if fits else 1


def _is_needed(typed: "Typed") -> bool:
    """Return whether this rank trains; with --elastic, False where it was a spare, and the run is over."""
    launched = environment.world_size()
    if not typed.values.get("elastic") or typed.problems or typed.dry_run or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from megatron_ext.resilience import elastic, launcher

    if launcher.stopped_before():
        return False
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigurationError(
            f"--elastic: no machine could join later, since torchrun shares its store; set {elastic.NO_SHARED_STORE}=1 "
            "in the environment of every torchrun and start it again"
        )
    used = elastic.ranks_to_use(launched, typed.values, lambda ranks: _works(typed, ranks))
    if used is None:  # for another reason, which configuring names
        return True
    if used == 0:
        elastic.wait_for_more(launched)
    if elastic.take_part(used):
        return True
    elastic.wait_as_spare(launched, used)
    return False


def _works(typed: "Typed", ranks: int) -> bool:
    from megatron_ext.train.configure import configure_typed

    try:
        configure_typed(typed, world_size=ranks)
    except ConfigurationError:
        return False
    return True


def _save_folder(typed: "Typed") -> str | None:
    """Return the folder of --save, emptied of the record of an earlier run; None without --save, for a dry run, and
    where another job is at work in it."""
    folder = typed.values.get("save")
    if not folder or typed.dry_run:
        return None
    if environment.rank() == 0:
        from megatron_ext.checkpoint.native import lock
        from megatron_ext.resilience import exit_record

        if lock.is_held(folder):
            return None
        exit_record.clear(folder)
    return folder


def start(argv: Sequence[str], **own: Any) -> NoReturn:
    """Run the program as this process, on the rank that the launcher says, and end the process.

    Args:
        own: arguments of `train.pretrain.pretrain` that bring in a user's code: `start(flags, loss=my_loss)`.
    """
    hand_over(argv, own)
    survive_lost_output()
    environment.take_ranks_of_mpi()
    if not _ANSWERED.isdisjoint(argv):
        read(argv)
    from megatron_ext.resilience.launcher_watch import watch_launcher
    from megatron_ext.resilience.process_end import RunStatus, end_process, run_guarded

    status = RunStatus(rank=environment.rank())
    watch_launcher(status)
    end_process(run_guarded(lambda: main(argv, status, **own), status))
