"""Rules about the curves of learning rate and weight decay."""

from collections.abc import Iterator

from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config

_MOST_PHASES = 10_000  # of a batch ramp-up: each is counted by itself

RECOMPUTED_PARTS = ("core_attn", "mlp", "layernorm")


def learning_rates_are_in_order(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the lowest and the first learning rate do not pass the peak."""
    optimizer = config.optimizer
    if optimizer.lr is None:
        return
    if not 0 <= optimizer.min_lr <= optimizer.lr:
        yield (
            f"--min-lr {optimizer.min_lr:g} must be at least 0 and at most --lr {optimizer.lr:g}; "
            f"use --min-lr {max(optimizer.lr, 0) / 10:g}"
        )
    if not 0 <= optimizer.lr_warmup_init <= optimizer.lr:
        yield (
            f"--lr-warmup-init {optimizer.lr_warmup_init:g} must be at least 0 and at most --lr {optimizer.lr:g}; "
            f"use --lr-warmup-init 0"
        )


def decoupled_rates_are_in_order(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the lowest and the first learning rate of the embeddings do not pass their peak."""
    optimizer = config.optimizer
    peak, lowest = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if peak is None:
        if lowest is not None:
            example = max(optimizer.lr or 0.0, lowest)
            fix = f"add --decoupled-lr {example:g}, or leave it out"
            yield f"--decoupled-min-lr {lowest:g} belongs to --decoupled-lr; {fix}"
        return
    if peak < 0:
        return  # the flag's own bound says that, and no other rate would be right beside it
    if (optimizer.min_lr if lowest is None else lowest) > peak:
        flag = f"--min-lr {optimizer.min_lr:g}" if lowest is None else f"--decoupled-min-lr {lowest:g}"
        yield f"{flag} is above --decoupled-lr {peak:g}; use --decoupled-min-lr {peak / 10:g}"
    if optimizer.lr_warmup_init > peak:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init:g} is above --decoupled-lr {peak:g}; use --lr-warmup-init 0"


def scaling_has_its_base(config: Config, facts: Facts) -> Iterator[str]:
    """Require the base batch for --lr-scale-rule."""
    optimizer = config.optimizer
    rule, base = optimizer.lr_scale_rule, optimizer.lr_scale_base_batch_size
    if rule == "none" and base is not None:
        yield f"--lr-scale-base-batch-size {base} has no effect without --lr-scale-rule; add --lr-scale-rule sqrt"
    elif rule != "none" and base is None:
        batch = config.training.global_batch_size
        yield (
            f"--lr-scale-rule {rule} needs the global batch that --lr was chosen for; "
            f"add --lr-scale-base-batch-size {batch if positive(batch) else 256}, which leaves --lr as it is, or yours"
        )


def curves_use_the_unit_of_the_run(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse curves in iterations where the run's length is in samples, and the other way round."""
    training, optimizer = config.training, config.optimizer
    by_iters = [
        ("--lr-decay-iters", optimizer.lr_decay_iters),
        ("--lr-warmup-iters", optimizer.lr_warmup_iters or None),
        ("--lr-wsd-decay-iters", optimizer.lr_wsd_decay_iters),
    ]
    by_samples = [
        ("--lr-decay-samples", optimizer.lr_decay_samples),
        ("--lr-warmup-samples", optimizer.lr_warmup_samples or None),
        ("--lr-wsd-decay-samples", optimizer.lr_wsd_decay_samples),
    ]
    if training.train_iters is not None:
        wrong, length, unit = by_samples, "--train-iters", "iters"
    elif training.train_samples is not None:
        wrong, length, unit = by_iters, "--train-samples", "samples"
    else:
        return
    batch = training.global_batch_size
    for flag, value in wrong:
        if value is not None:
            instead = f"{flag.rsplit('-', 1)[0]}-{unit}"
            if positive(batch):
                instead = f"{instead} {max(value // batch, 1) if unit == 'iters' else value * batch}"
            yield f"{flag} {value}, but the run's length is given by {length}; use {instead} instead of {flag}"


def warmup_fits_the_decay(config: Config, facts: Facts) -> Iterator[str]:
    """Require a warmup that is shorter than the decay."""
    optimizer = config.optimizer
    fraction = optimizer.lr_warmup_fraction
    unit, length, warmup, decay = _curve(config)
    decay_flag = f"--lr-decay-{unit}"
    if fraction is not None:
        if warmup:
            yield f"--lr-warmup-fraction {fraction:g} and --lr-warmup-{unit} {warmup} both give the warmup; keep one"
        if not 0 <= fraction < 1:
            yield f"--lr-warmup-fraction {fraction:g} is not at least 0 and below 1; use --lr-warmup-fraction 0.1"
    elif warmup < 0:
        yield f"--lr-warmup-{unit} {warmup} is below 0; use --lr-warmup-{unit} 0"
    elif positive(warmup, decay or length) and warmup >= (decay or length):
        end = f"{decay_flag} {decay}" if decay else f"the run's end (--train-{unit} {length})"
        yield (
            f"--lr-warmup-{unit} {warmup} does not end before {end}; "
            f"use --lr-warmup-{unit} {(decay or length) // 10}, or more steps"
        )


def wsd_has_its_last_phase(config: Config, facts: Facts) -> Iterator[str]:
    """Require the length of WSD's last phase."""
    optimizer = config.optimizer
    unit, length, _, decay = _curve(config)
    last = optimizer.lr_wsd_decay_iters if unit == "iters" else optimizer.lr_wsd_decay_samples
    if optimizer.lr_decay_style != "WSD":
        if last is not None:
            yield (
                f"--lr-wsd-decay-{unit} {last} belongs to --lr-decay-style WSD, but the style is "
                f"{optimizer.lr_decay_style}; use --lr-decay-style WSD, or leave it out"
            )
        return
    steps = decay or length
    if last is None:
        example = f" {max(steps // 5, 1)}" if positive(steps) else ""
        yield f"--lr-decay-style WSD needs the length of its last phase; add --lr-wsd-decay-{unit}{example}"
    elif positive(steps) and not 0 < last <= steps:
        yield (
            f"--lr-wsd-decay-{unit} {last} must be 1 to {steps}, the steps of the decay; "
            f"use --lr-wsd-decay-{unit} {max(steps // 5, 1)}"
        )


def weight_decay_has_both_ends(config: Config, facts: Facts) -> Iterator[str]:
    """Require both ends of a weight decay that changes."""
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style == "constant":
        if start is not None or end is not None:
            yield (
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine; "
                "add it, or give --weight-decay alone"
            )
    elif start is None or end is None:
        yield (
            f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay; "
            f"add --start-weight-decay 0 --end-weight-decay {optimizer.weight_decay:g}"
        )
    elif not 0 <= start <= end:
        last = max(end, optimizer.weight_decay)
        fix = "swap them" if min(start, end) >= 0 else f"use --start-weight-decay 0 --end-weight-decay {last:g}"
        yield f"--start-weight-decay {start:g} must be at least 0 and at most --end-weight-decay {end:g}; {fix}"


def _curve(config: Config) -> tuple[str, int, int, int]:
    """Return the unit of the run, its length, the warmup and the decay in that unit; 0 for a length that is not
    given."""
    training, optimizer = config.training, config.optimizer
    if training.train_samples is not None and training.train_iters is None:
        return "samples", training.train_samples, optimizer.lr_warmup_samples, optimizer.lr_decay_samples or 0
    return "iters", training.train_iters or 0, optimizer.lr_warmup_iters, optimizer.lr_decay_iters or 0


RULES = (
    learning_rates_are_in_order,
    decoupled_rates_are_in_order,
    scaling_has_its_base,
    curves_use_the_unit_of_the_run,
    warmup_fits_the_decay,
    wsd_has_its_last_phase,
    weight_decay_has_both_ends,
)
