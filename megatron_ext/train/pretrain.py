"""The main job: build the run, load a checkpoint if there is one, train."""

import sys

from megatron_ext import device
from megatron_ext.checkpoint.native.lock import hold_until_exit
from megatron_ext.config.schema import Config
from megatron_ext.device import hardware_queues
from megatron_ext.errors import ConfigurationError, StoppedBySignal, TrainingError
from megatron_ext.resilience import exit_record, launch
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.signals import SignalWatcher


def pretrain(config: Config, status: RunStatus) -> None:
    """Train as `config` says, on this rank. `status` is kept up to date for the report of a failure.

    Raises:
        TrainingError: whatever ends the run before its planned end.
    """
    if config.checkpoint.save is not None and status.rank == 0:
        _claim(config.checkpoint.save, status)
    warning = hardware_queues.prepare(config.layout)
    if warning and status.rank == 0:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    here = device.install(config.layout.device, fuses=not config.training.disable_jit_fuser)
    # Only now may megatron-core be imported.
    from megatron_ext.parallel import groups
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks import memory_history
    from megatron_ext.train.callbacks.standard import standard_callbacks, stop_file
    from megatron_ext.train.datasets import check_data_is_that_of_the_checkpoint
    from megatron_ext.train.trainer import Trainer

    memory_history.begin(config, status.rank, here)
    run = build_run(config, here)
    for flag, given in (
        ("--optimizer-cpu-offload", config.optimizer.optimizer_cpu_offload),
        ("--torch-fsdp2-cpu-offload", config.layout.torch_fsdp2_cpu_offload),
    ):
        if given and here.kind == "cpu" and run.rank == 0:
            print(f"warning: {flag} saves nothing with --device cpu: it is the same memory", flush=True)
    iteration = None
    if config.checkpoint.load is not None:
        from megatron_ext.checkpoint.native.load import load_checkpoint

        iteration = load_checkpoint(run, config.checkpoint.load)
        if iteration is None and config.checkpoint.exit_on_missing_checkpoint:
            raise ConfigurationError(
                f"--load {config.checkpoint.load} holds no checkpoint; name a folder that does, "
                "or leave out --exit-on-missing-checkpoint to start afresh"
            )
        if iteration is not None and not config.checkpoint.finetune:
            check_data_is_that_of_the_checkpoint(run, config.checkpoint.load, iteration)
        if run.rank == 0:
            verb = "finetuning from" if config.checkpoint.finetune else "resuming at"
            found = f"{verb} iteration {iteration} of" if iteration is not None else "starting afresh: none in"
            print(f"checkpoint: {found} {config.checkpoint.load}", flush=True)
    if config.checkpoint.load_hf is not None and iteration is None:
        from megatron_ext.checkpoint.huggingface.load import load_huggingface

        load_huggingface(run, config.checkpoint.load_hf)
        if run.rank == 0:
            print(f"checkpoint: beginning with the weights of {config.checkpoint.load_hf}", flush=True)
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


def _claim(save: str, status: RunStatus) -> None:
    """Make the save folder this job's own."""
    try:
        hold_until_exit(save)
    except TrainingError:
        status.save = None  # it is another's: leave no record there
        raise
    exit_record.clear(save)
