"""No option of Megatron falls through: each is supported, accepted with a warning, or refused by name."""

from typing import Any

from megatron_ext.config.megatron_options import megatron_options
from megatron_ext.config.options import options_by_flag
from tests.support.megatron_wheel import UNREADABLE, wheel_options

OUR_OWN = {
    "--world-size",
    "--tiktoken-special-tokens",  # Megatron's spelling before --tokenizer-special-tokens
    "--load-hf",
    "--data-order",
    "--verify-data",
    "--log-sample-ids",
    "--accept-changed-data",
    "--accept-other-tokenizer",
    "--device",
    "--eval-at-start",
    "--metrics-file",
    "--keep-last-checkpoints",
    "--no-fallback",
    "--tf32",
    "--log-communication-share",
    "--lr-scale-rule",
    "--lr-scale-base-batch-size",
    "--torch-compile",
    "--torch-fsdp2-cpu-offload",
    "--check-replicated-weights-interval",
    "--norm-position",
    "--qk-layernorm-over",
    # megatron-core hard-codes these three for Llama 3.1.
    "--rope-scaling-low-freq-factor",
    "--rope-scaling-high-freq-factor",
    "--rope-scaling-original-max-position-embeddings",
}

OTHER_DEFAULTS: dict[str, tuple[Any, Any, str]] = {
    "--num-query-groups": (None, 1, "resolved: 1 with --group-query-attention as Megatron has it, else the heads"),
    "--transformer-impl": ("local", "transformer_engine", "runs without a build"),
    "--data-parallel-sharding-strategy": (None, "optim_grads_params", "resolved, where --use-megatron-fsdp reads it"),
    "--distributed-backend": (None, "nccl", "resolved: gloo on CPU processes"),
    "--eval-interval": (1000, None, "Megatron evaluates never or by the interval; here 0 says never"),
    "--moe-router-load-balancing-type": (None, "aux_loss", "the same, read as one of a list"),
    "--moe-aux-loss-coeff": (None, 0.0, "the same, read as one of a list"),
    "--split": ("969,30,1", None, "Megatron fills in the same value later"),
}

FEWER_CHOICES = {
    "--transformer-impl": "the inference variant is not for training",
    "--position-embedding-type": "yarn, mrope and relative positions are not in this version",
    "--optimizer": "muon and soap are not in this version",
    "--moe-router-score-function": "the square root of the softplus is not in this version",
    "--moe-router-load-balancing-type": "the loss of each microbatch, and none",
    "--ckpt-format": "torch_dist is the one that reshards",
    "--tokenizer-type": "six kinds that need no torch; ByteTokenizer is ours",
}


def test_the_wheel_is_read_in_full():
    assert len(wheel_options()) >= 790


def test_every_option_is_in_exactly_one_class():
    supported, others = set(options_by_flag()), megatron_options()
    accepted = {flag for flag, known in others.items() if known.accepted}
    refused = set(others) - accepted
    assert not supported & set(others)
    counts = {
        "supported": len(supported & set(wheel_options())),
        "accepted": len(accepted),
        "refused": len(refused),
    }
    assert set(wheel_options()) == (supported - OUR_OWN) | accepted | refused
    assert sum(counts.values()) == len(wheel_options())


def test_what_is_ours_alone_is_what_we_say():
    assert set(options_by_flag()) - set(wheel_options()) == OUR_OWN


def test_an_option_takes_as_many_values_as_megatrons():
    ours = {flag: {0: "0", 1: "1"}.get(known.most_values, "many") for flag, known in megatron_options().items()} | {
        flag: "0" if option.is_switch else "many" if option.many else "1" for flag, option in options_by_flag().items()
    }
    assert {flag: ours[flag] for flag in wheel_options()} == {
        flag: option.values for flag, option in wheel_options().items()
    }


def test_defaults_are_megatrons_but_for_the_ones_listed():
    different = {}
    for flag, ours in options_by_flag().items():
        wheel = wheel_options().get(flag)
        default = list(ours.default) if isinstance(ours.default, tuple) else ours.default
        # A switch stands for the action that it switches on, `--no-...` included: off by default in both.
        if wheel is not None and not ours.is_switch and default != wheel.default:
            different[flag] = (default, wheel.default)
    assert different == {flag: (ours, theirs) for flag, (ours, theirs, _) in OTHER_DEFAULTS.items()}


def test_choices_are_megatrons_but_for_the_ones_listed():
    different = {
        flag
        for flag, ours in options_by_flag().items()
        if flag in wheel_options() and set(ours.choices or ()) != set(wheel_options()[flag].choices or ())
    }
    assert different == set(FEWER_CHOICES)
    for flag in FEWER_CHOICES:
        extra = set(options_by_flag()[flag].choices or ()) - set(wheel_options()[flag].choices or ())
        assert extra <= {"ByteTokenizer"}


def test_a_value_that_passes_silently_is_megatrons_default_or_asks_for_nothing():
    asks_for_nothing = {
        "--expert-tensor-parallel-size": "1",  # as the tensor-parallel size that a model without experts has
        "--recompute-modules": "core_attn",  # what selective recomputation covers
        "--rope-type": "rope",
        "--dataloader-type": "single",
        "--dist-ckpt-format": "torch_dist",
        "--exit-signal": "SIGTERM",
    }
    for flag, known in megatron_options().items():
        default = wheel_options()[flag].default
        if known.neutral is None or (default == UNREADABLE and flag not in asks_for_nothing):
            continue
        plain = default[0] if isinstance(default, list) else default
        assert known.neutral in (str(plain), asks_for_nothing.get(flag)), flag
