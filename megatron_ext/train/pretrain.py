"""Runs the main job: build the run, load a checkpoint if there is one, train."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext import device
from megatron_ext.checkpoint.native.lock import hold_until_exit
from megatron_ext.checkpoint.native.resume import Resume
from megatron_ext.config.schema import CheckpointConfig
from megatron_ext.device import hardware_queues
from megatron_ext.errors import ConfigurationError, StoppedBySignal, TrainingError
from megatron_ext.resilience import exit_record, launch
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.signals import STOP_FILE, SignalWatcher
from megatron_ext.terminal import say
from megatron_ext.train.configure import Configured, configure_for

if TYPE_CHECKING:
    from megatron_ext.device.protocol import Device
    from megatron_ext.train.run import Run


def pretrain(configured: Configured, status: RunStatus) -> None:
    """Train as configured, on this rank. `status` is kept up to date for the report of a failure.

    Where the newest checkpoint turns out to be damaged, the flags are resolved once more, for the one that is loaded.

    Raises:
        TrainingError: something ended the run before its planned end.
    """
    config = configured.config
    if config.checkpoint.save is not None and status.rank == 0:
        _claim(config.checkpoint.save, status)
    warning = hardware_queues.prepare(config.layout)
    if warning and status.rank == 0:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    here = device.install(config.layout.device, fuses=not config.training.disable_jit_fuser)
    # Only now may megatron-core be imported.
    from megatron_ext.parallel import groups
    from megatron_ext.sharding.choose import sharding_of
    from megatron_ext.train.callbacks import memory_history
    from megatron_ext.train.memory_check import check_it_fits, telling_of_memory

    memory_history.begin(config, status.rank, here)
    if configured.search is not None:
        from megatron_ext.checkpoint.native.agreement import agree

        # The group of all ranks follows from typed flags alone, which no checkpoint changes.
        groups.start(config.layout, here, from_host=sharding_of(config).lives_on_host)
        configured = configure_for(configured, agree(configured.search, config.checkpoint))
        config = configured.config
    resume = configured.resume
    if resume is None and config.checkpoint.load is not None and config.checkpoint.exit_on_missing_checkpoint:
        raise ConfigurationError(
            f"--load {config.checkpoint.load} holds no checkpoint; name a folder that does, "
            "or leave out --exit-on-missing-checkpoint to start afresh"
        )
    check_it_fits(config, here)
    with telling_of_memory(config, here):
        _build_and_train(configured, here, status)


def _build_and_train(configured: Configured, here: "Device", status: RunStatus) -> None:
    from megatron_ext.parallel import groups
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.standard import standard_callbacks, stop_file
    from megatron_ext.train.trainer import Trainer

    config, resume = configured.config, configured.resume
    run = build_run(config, here, resume)
    for flag in run.sharding.host_memory_flags:
        if here.kind == "cpu" and run.rank == 0:
            print(f"warning: {flag} saves nothing with --device cpu: it is the same memory", flush=True)
    _load(run, config.checkpoint, resume)
    # One rank watches the stop file and tells the others at the end of a step.
    with SignalWatcher(stop_file(config) if status.rank == 0 else None, launch.requested_before()) as signals:
        trainer = Trainer(run, standard_callbacks(run, signals, status))
        try:
            trainer.fit()
        except StoppedBySignal as stop:
            launch.remember_stop(stop.exit_code, str(stop))
            raise
        if trainer.stop_reason is not None:
            launch.remember_stop(0, trainer.stop_reason)
    run.loaders.close()
    groups.destroy()


def _load(run: "Run", flags: CheckpointConfig, resume: Resume | None) -> None:
    """Load the checkpoint that was found, or the Hugging Face model that the flags name in its place; say which."""
    if resume is not None:
        from megatron_ext.checkpoint.native.load import load_found
        from megatron_ext.train.datasets import check_data_is_that_of_the_checkpoint

        load_found(run, resume)
        if not flags.finetune:
            check_data_is_that_of_the_checkpoint(run, resume)
    if flags.load is not None and run.rank == 0:
        verb = "finetuning from" if flags.finetune else "resuming at"
        found = f"{verb} iteration {resume.iteration} of" if resume is not None else "starting afresh: none in"
        say(f"checkpoint: {found} {flags.load}")
    if flags.load_hf is not None and resume is None:
        from megatron_ext.checkpoint.huggingface.load import load_huggingface

        load_huggingface(run, flags.load_hf)
        if run.rank == 0:
            say(f"checkpoint: beginning with the weights of {flags.load_hf}")


def _check_stop_file(save: str) -> None:
    path = Path(save) / STOP_FILE
    if path.is_dir():
        raise ConfigurationError(
            f"--save {save} holds a folder named {path.name}, but a file of that name is what stops a run; rename it"
        )


def _claim(save: str, status: RunStatus) -> None:
    """Make the save folder this job's own."""
    try:
        _check_stop_file(save)
        hold_until_exit(save)
    except TrainingError:
        status.save = None  # it is another's: leave no record there
        raise
    exit_record.clear(save)
