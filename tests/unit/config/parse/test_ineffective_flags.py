"""Flags that change nothing next to the others are named, and only they."""

import shlex

import pytest

from megatron_ext.train.configure import configure
from tests.support.small_runs import MODEL

UNUSED = (
    "--ema-decay changes nothing here: the averages are neither saved (--save without --no-save-optim) nor evaluated "
    "(--eval-ema)"
)


@pytest.mark.parametrize(
    ("flags", "is_used"),
    [
        ("--ema-decay 0.9", False),
        ("--ema-decay 0.9 --save folder --no-save-optim", False),
        ("--ema-decay 0.9 --save folder", True),
        ("--ema-decay 0.9 --eval-ema", True),
        ("--ema-decay 0.9 --eval-ema --save folder --no-save-optim", True),
    ],
)
def test_averages_of_weights_are_used_where_they_are_saved_or_evaluated(flags: str, is_used: bool) -> None:
    warnings = [text for text in configure([*MODEL, *shlex.split(flags)]).typed.warnings if "ema" in text]
    assert warnings == ([] if is_used else [UNUSED])


def test_evaluated_averages_need_averages() -> None:
    warnings = configure([*MODEL, "--eval-ema"]).typed.warnings
    assert "--eval-ema changes nothing here: without --ema-decay there are no averages" in warnings


@pytest.mark.parametrize(("kind", "is_read"), [("none", False), ("rope", True)])
def test_latents_that_do_not_rotate_have_no_base(kind: str, is_read: bool) -> None:
    flags = f"--multi-latent-attention --kv-lora-rank 8 --rotary-base 500 --position-embedding-type {kind}"
    found = [text for text in configure([*MODEL, *flags.split()]).typed.warnings if "--rotary-base" in text]
    unread = "--rotary-base changes nothing here: there are no rotary positions"
    assert found == ([] if is_read else [unread])


@pytest.mark.parametrize("pattern", ["M-", "G-", "B-", "*-"])
def test_sizes_of_a_mixer_are_read_where_a_letter_names_it(pattern: str) -> None:
    """Sizes of Mamba-2 belong to M and B, those of a delta rule to G, the convolution's kernel to all three."""
    sizes = {"--mamba-norm none": "MB", "--mamba-num-groups 1": "MB", "--linear-key-head-dim 4": "G"}
    sizes |= {"--linear-num-key-heads 1": "G", "--linear-conv-kernel-dim 3": "GMB"}
    model = f"--disable-bias-linear --normalization RMSNorm --hybrid-layer-pattern {pattern} {' '.join(sizes)}"
    warnings = configure(
        [*MODEL, *model.split(), "--linear-num-value-heads", "2", "--mamba-head-dim", "8"]
    ).typed.warnings
    unread = {text.split()[0] for text in warnings if text.startswith(("--mamba", "--linear"))}
    expected = {flag.split()[0] for flag, letters in sizes.items() if pattern[0] not in letters}
    assert unread >= expected
    assert not unread & ({flag.split()[0] for flag in sizes} - expected)
