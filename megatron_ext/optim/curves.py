"""Computes learning rate and weight decay as pure functions of progress, without torch.

Progress is counted in samples, as in Megatron: every step that updated the weights adds its global batch, a step
that the loss scaler skipped adds nothing. Flags that count iterations mean the samples that these iterations consume,
also while the batch grows: a run of --train-iters ends where its curves end. (Megatron multiplies iterations by the
last batch size, so that such a run ends before its decay does.)

    curve = LearningRateCurve.from_config(config)
    learning_rate(consumed_by_updates, curve)

Each value equals the one of megatron-core's OptimizerParamScheduler to the last bit; a test compares them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ext.config.derived.batch_size import samples_at_iteration
from megatron_ext.config.schema import Config

_COMPARED = 1000
Schedule = Callable[[int, float], float]
"""Maps the samples of all updates so far, and the rate that the flags give, to the learning rate of the next step."""


@dataclass(frozen=True)
class LearningRateCurve:
    """A linear warmup from `start` to `peak`, then a decay to `lowest`; lengths in samples.

    `decay` is counted from the first sample, so it includes the warmup. `wsd_decay` is the length of WSD's last phase,
    which ends at `decay`; other styles do not read it. The configuration's rules have checked that lowest <= peak,
    start <= peak and warmup < decay.
    """

    peak: float
    lowest: float
    start: float
    warmup: float
    decay: int
    style: str
    wsd_decay: int | None = None
    wsd_style: str = "exponential"
    power: tuple[float, float, int] = (0.0, 0.0, 1)
    """Factor of the power of the tokens, relative to the peak; the exponent; tokens of a sample. Only power reads
    it."""

    @property
    def corners(self) -> tuple[float, ...]:
        """Samples at which one formula takes another's place."""
        return self.warmup, self.decay, self.decay - (self.wsd_decay or 0)

    @classmethod
    def from_config(cls, config: Config) -> "LearningRateCurve":
        """Return the curve that the flags ask for; --train-samples makes every length one in samples."""
        optimizer, training = config.optimizer, config.training
        if training.train_samples is None:
            end, last = _or(optimizer.lr_decay_iters, training.train_iters), optimizer.lr_wsd_decay_iters
            decay, warmup = _samples_of(config, end), _samples_of(config, optimizer.lr_warmup_iters)
            wsd_decay = None if last is None else decay - _samples_of(config, end - last)
        else:
            decay = _or(optimizer.lr_decay_samples, training.train_samples)
            warmup = optimizer.lr_warmup_samples
            wsd_decay = optimizer.lr_wsd_decay_samples
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        return cls(
            peak=float(optimizer.lr),
            lowest=optimizer.min_lr,
            start=optimizer.lr_warmup_init,
            warmup=warmup,
            decay=decay,
            style=optimizer.lr_decay_style,
            wsd_decay=wsd_decay,
            wsd_style=optimizer.lr_wsd_decay_style,
            power=(0.0, 0.0, 1)
            if optimizer.lr_decay_style != "power"
            else (
                optimizer.lr_power_scale * training.global_batch_size / optimizer.lr if optimizer.lr else math.inf,
                optimizer.lr_power_exponent,
                config.model.seq_length,
            ),
        )

    @classmethod
    def decoupled(cls, config: Config) -> "LearningRateCurve | None":
        """Return this curve between --decoupled-lr and --decoupled-min-lr; None without --decoupled-lr."""
        peak, lowest = config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr
        if peak is None:
            return None
        curve = cls.from_config(config)
        return replace(curve, peak=peak, lowest=curve.lowest if lowest is None else lowest)


@dataclass(frozen=True)
class WeightDecayCurve:
    """A weight decay that goes from `start` to `end` over `length` samples and then stays at `end`."""

    start: float
    end: float
    length: int
    style: str

    @property
    def corners(self) -> tuple[float, ...]:
        """Samples at which one formula takes another's place."""
        return (self.length,)

    @classmethod
    def from_config(cls, config: Config) -> "WeightDecayCurve":
        """Return the curve that the flags ask for: constant --weight-decay, or --start- to --end-weight-decay."""
        optimizer = config.optimizer
        style = optimizer.weight_decay_incr_style
        if style == "constant":
            return cls(optimizer.weight_decay, optimizer.weight_decay, run_samples(config), style)
        start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
        assert start is not None, "the configuration's rules require it with this style"
        assert end is not None, "the configuration's rules require it with this style"
        return cls(start, end, run_samples(config), style)


def learning_rate(progress: int, curve: LearningRateCurve) -> float:
    """Return the rate of the step that follows `progress` samples.

    Source: Loshchilov and Hutter, SGDR, eq. 5 (cosine); Hu et al., MiniCPM, section 4 (WSD); Shen et al. 2024, Power
    Scheduler (arXiv:2408.13359), whose rate is min(peak, batch a n^b) after n tokens.
    """
    if curve.warmup > 0 and progress <= curve.warmup:
        return curve.start + (curve.peak - curve.start) * float(progress) / float(curve.warmup)
    if curve.style == "constant":
        return curve.peak
    if progress > curve.decay:
        return curve.lowest
    if curve.style == "inverse-square-root":
        return max(curve.lowest, curve.peak * max(curve.warmup, 1) ** 0.5 / max(progress, 1) ** 0.5)
    if curve.style == "power":
        relative, exponent, tokens = curve.power
        return max(curve.lowest, curve.peak * min(1.0, relative * (tokens * max(progress, 1)) ** exponent))
    if curve.style == "WSD":
        share = _wsd_share(progress, curve)
    else:
        done = float(progress - curve.warmup) / float(curve.decay - curve.warmup)
        share = 0.5 * (math.cos(math.pi * done) + 1.0) if curve.style == "cosine" else 1.0 - done
    return curve.lowest + share * (curve.peak - curve.lowest)


def weight_decay(progress: int, curve: WeightDecayCurve) -> float:
    """Return the weight decay of the step that follows `progress` samples."""
    if progress > curve.length or curve.style == "constant":
        return curve.end
    done = float(progress) / float(curve.length)
    share = 0.5 * (math.cos(math.pi * (1 - done)) + 1.0) if curve.style == "cosine" else done
    return curve.start + share * (curve.end - curve.start)


def goes_on[Curve: LearningRateCurve | WeightDecayCurve](
    now: Curve, then: Curve, value: Callable[[int, Curve], float], first: int, end: int
) -> bool:
    """Return whether two curves have equal values from the sample `first` up to `end`.

    Between two corners a curve is one formula: equal at so many positions, two are equal at all of them.
    """
    last = max(first, end - 1)
    positions = [first + (last - first) * share // _COMPARED for share in range(_COMPARED + 1)]
    corners = (int(corner) + by for curve in (now, then) for corner in curve.corners for by in (-1, 0, 1))
    positions += [corner for corner in corners if first <= corner <= last]
    return now == then or all(value(position, now) == value(position, then) for position in positions)


def run_samples(config: Config) -> int:
    """Return the length of the run in samples, the unit of both curves."""
    training = config.training
    if training.train_samples is not None:
        return training.train_samples
    assert training.train_iters is not None, "the configuration's rules require one of the two"
    return _samples_of(config, training.train_iters)


def _samples_of(config: Config, iterations: int) -> int:
    """Return the samples that the first `iterations` of the run consume, or would in full batches."""
    if config.optimizer.curves_in_full_batches:
        return iterations * config.training.global_batch_size
    return samples_at_iteration(config, iterations)


def _or(length: int | None, run_length: int | None) -> int:
    """Return `length` where the user gave one, else the length of the run."""
    chosen = run_length if length is None else length
    assert chosen is not None, "the configuration's rules require the length of the run"
    return chosen


def _wsd_share(progress: int, curve: LearningRateCurve) -> float:
    """Return the share of the way from the lowest rate to the peak: 1 until the last phase, then down to 0."""
    assert curve.wsd_decay is not None, "the configuration's rules require it with WSD"
    annealed = progress - (curve.decay - curve.wsd_decay)
    if annealed <= 0:
        return 1.0
    done = float(annealed) / float(curve.wsd_decay)
    match curve.wsd_style:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        case "minus_sqrt":
            return 1.0 - math.sqrt(done)
        case _:
            return 2.0 * math.pow(0.5, done) - 1.0
