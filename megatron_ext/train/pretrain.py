"""The main job: build the run, load a checkpoint if there is one, train."""

from megatron_ext import device
from megatron_ext.config.schema import Config


def pretrain(config: Config) -> None:
    """Train as `config` says, on this rank.

    Raises:
        TrainingError: whatever ends the run before its planned end.
    """
    here = device.install(config.layout.device)
    # Only now may megatron-core be imported.
    from megatron_ext.parallel import groups
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.standard import standard_callbacks
    from megatron_ext.train.trainer import Trainer

    run = build_run(config, here)
    Trainer(run, standard_callbacks(config)).fit()
    run.loaders.close()
    groups.destroy()
