"""Rules for the flags of gated delta rules next to other flags."""

from collections.abc import Iterator

from megatron_ext.config.derived.layer_patterns import read_pattern
from megatron_ext.config.resolve import Facts, positive, runs_on_cpu
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.gated_delta.flags import VARIANTS, GatedDeltaFlags
from megatron_ext.rules.suggest import unreadable_pattern


def layers_without_attention_are_named(config: Config, facts: Facts) -> Iterator[str]:
    """Require a pattern which can be read, and names some layer, of those that have another mixer than attention."""
    model, pattern = config.model, flags_of(config.model, GatedDeltaFlags).linear_attention_freq
    if model.experimental_attention_variant not in VARIANTS or not positive(model.num_layers):
        return
    flag, fix = "--linear-attention-freq", f"4, or [1]*{model.num_layers}"
    unreadable = [*unreadable_pattern(flag, pattern, model.num_layers, fix)]
    yield from unreadable
    if not unreadable and (pattern is None or not any(read_pattern(pattern, min(model.num_layers, 100_000)))):
        given = "that is not given" if pattern is None else f"{pattern} names none"
        yield (
            f"--experimental-attention-variant {model.experimental_attention_variant} is of the layers that "
            f"--linear-attention-freq names, but {given}; use {flag} {fix}"
        )


def letters_say_which_layers(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse two sayings of which layers have a delta rule."""
    letters, pattern = config.model.hybrid_layer_pattern, flags_of(config.model, GatedDeltaFlags).linear_attention_freq
    if letters is not None and pattern is not None:
        yield (
            f"--hybrid-layer-pattern {letters} says what each layer is, but --linear-attention-freq is {pattern}; "
            "leave --linear-attention-freq out"
        )


def recurrence_kernels_can_run(config: Config, facts: Facts) -> Iterator[str]:
    """Require the package and the GPU that --recurrence-kernels fla needs."""
    if flags_of(config.model, GatedDeltaFlags).recurrence_kernels == "torch":
        return
    if runs_on_cpu(config, facts):
        yield (
            "--recurrence-kernels fla: its kernels need a GPU, but the run is on CPU processes; use "
            "--recurrence-kernels torch"
        )
    elif "fla" not in facts.packages:
        yield (
            "--recurrence-kernels fla: the package fla-core is not installed; pip install fla-core, or use "
            "--recurrence-kernels torch"
        )


RULES = (layers_without_attention_are_named, letters_say_which_layers, recurrence_kernels_can_run)
