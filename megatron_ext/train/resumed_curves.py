"""Compares the curves of learning rate and weight decay that a run goes on with to the checkpoint's."""

from collections.abc import Sequence

from megatron_ext.config.derived.batch_size import samples_at_iteration
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.optim.curves import (
    LearningRateCurve,
    WeightDecayCurve,
    goes_on,
    learning_rate,
    run_samples,
    weight_decay,
)


def other_curves(config: Config, facts: Facts, iteration: int = 0) -> list[str]:
    """Return the reasons why the run would go on with other learning-rate or weight-decay curves than it began with;
    empty where it does not, or is meant to.

    Args:
        iteration: after which it goes on. A step that the loss scale skips counts here, and not for the curves.
    """
    flags, saved = config.checkpoint, facts.saved
    chosen = flags.override_opt_param_scheduler or flags.use_checkpoint_opt_param_scheduler
    if saved is None or flags.finetune or flags.no_load_optim or chosen:
        return []
    if not {"lr", "global_batch_size"} <= saved.keys() or not {"train_iters", "train_samples"} & saved.keys():
        return []  # not the configuration of a run
    before = resolve(saved, Facts(world_size=config.layout.world_size))
    different = _differences_of_curves(config, before, samples_at_iteration(before, iteration))
    different += [
        f"{flag_of(name)} {_listed(now)} instead of {_listed(was)}"
        for name in ("lr_group", "weight_decay_group")
        if (now := getattr(config.optimizer, name)) != (was := getattr(before.optimizer, name))
    ]
    if not different:
        return []
    return [
        f"the curves of learning rate and weight decay are not those of the checkpoint in --load {flags.load}: "
        f"{', '.join(different)}; add --override-opt-param-scheduler to follow the flags, or "
        f"--use-checkpoint-opt-param-scheduler to follow the checkpoint"
    ]


def _differences_of_curves(config: Config, before: Config, position: int) -> list[str]:
    """Return how the curves that make the values of the steps from `position` on (in samples) other than `before`.

    A curve whose length is the run's says nothing of steps after the run's last one. That step is always compared: a
    rate that has decayed does not rise again unnoticed.
    """
    ended, end = run_samples(before), run_samples(config)
    first = min(position, max(ended - before.training.global_batch_size, 0))
    own = before.optimizer.lr_decay_iters or before.optimizer.lr_decay_samples
    end_of_rates = end if own else min(end, ended)
    different = []
    now, then = LearningRateCurve.from_config(config), LearningRateCurve.from_config(before)
    if not goes_on(now, then, learning_rate, first, end_of_rates):
        names = {"peak": "--lr", "lowest": "--min-lr", "decay": "decay in samples", "warmup": "warmup in samples"}
        pairs = {name: (value, vars(then)[name]) for name, value in vars(now).items()}
        different += [
            f"{names.get(name, name)} {new} instead of {old}" for name, (new, old) in pairs.items() if new != old
        ]
    own_now, own_then = LearningRateCurve.decoupled(config), LearningRateCurve.decoupled(before)
    if own_now != own_then and (
        own_now is None or own_then is None or not goes_on(own_now, own_then, learning_rate, first, end_of_rates)
    ):
        different += [
            f"{flag_of(name)} {getattr(config.optimizer, name)} instead of {getattr(before.optimizer, name)}"
            for name in ("decoupled_lr", "decoupled_min_lr")
            if getattr(config.optimizer, name) != getattr(before.optimizer, name)
        ]
    decay, was = WeightDecayCurve.from_config(config), WeightDecayCurve.from_config(before)
    if not goes_on(decay, was, weight_decay, first, min(end, ended)):
        different.append(
            f"weight decay {decay.start} to {decay.end} in {decay.length} samples instead of {was.start} "
            f"to {was.end} in {was.length}"
        )
    return different


def _listed(groups: Sequence[str] | None) -> str:
    return " ".join(groups or ("none",))
