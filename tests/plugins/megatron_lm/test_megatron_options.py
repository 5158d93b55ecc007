"""No option of Megatron falls through: each is supported, accepted with a warning, or refused by name."""

import shlex

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options_by_flag, options_by_name
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.megatron_lm.megatron_options import earlier_options, megatron_options
from megatron_ext.plugins.megatron_lm.old_spellings import EARLIER_FLAGS, FLAGS, VALUES, VALUES_OF_FORKS
from megatron_ext.plugins.megatron_lm.reference import OTHER_DEFAULTS, OTHER_MEANINGS
from megatron_ext.plugins.migrate import other_programs
from tests.support.megatron_wheel import UNREADABLE, wheel_options

FEWER_CHOICES = {
    "--transformer-impl": "the inference variant is not for training",
    "--fp8-recipe": "scales of past steps, and recipes of one's own, are not in this version; rowwise is ours",
    "--fp4-recipe": "recipes of one's own are not in this version; mxfp4 is ours",
    "--rope-type": "longrope and dynamic are of Hugging Face's models",
    "--position-embedding-type": "mrope and relative ones are not in this version; alibi is Megatron-DeepSpeed's",
    "--optimizer": "soap follows rounding; adafactor, ademamix and schedule_free are ours",
    "--lr-decay-style": "power is ours",
    "--experimental-attention-variant": "sparse attention by an indexer of keys is not in this version",
    "--muon-fp32-matmul-prec": "torch has no low",
    "--muon-coefficient-type": "any name there, of which its package takes these",
    "--exp-avg-dtype": "16 bits with the range of fp32 need no scale of their own",
    "--exp-avg-sq-dtype": "16 bits with the range of fp32 need no scale of their own",
    "--moe-token-dispatcher-type": "flex is taken as alltoall",
    "--moe-router-load-balancing-type": "what is averaged over a step, or over steps, depends on the layout",
    "--non-persistent-ckpt-type": "snapshots that all machines share are checkpoints; in memory is the folder's matter",
    "--ckpt-format": "torch_dist is the one that reshards",
    "--tokenizer-type": "six kinds that need no torch; ByteTokenizer is ours",
}


def test_the_wheel_is_read_in_full():
    assert len(wheel_options()) >= 790


def test_every_option_is_in_exactly_one_class():
    """Those that are ours alone are not Megatron's."""
    classes = set(options_by_flag()) & set(wheel_options()), set(FLAGS), set(megatron_options())
    assert sorted(flag for flags in classes for flag in flags) == sorted(wheel_options())


def test_an_option_takes_as_many_values_as_megatrons():
    ours = {flag: {0: "0", 1: "1"}.get(known.most_values, "many") for flag, known in megatron_options().items()} | {
        flag: "0" if option.is_switch else "many" if option.many else "1" for flag, option in options_by_flag().items()
    }
    ours |= {flag: "0" if value else "1" for flag, (_, value) in FLAGS.items()}
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
            different[flag] = wheel.default
    assert different == {flag: known.theirs for flag, known in OTHER_DEFAULTS.items()}
    assert not set(OTHER_MEANINGS) & set(OTHER_DEFAULTS)
    assert set(OTHER_MEANINGS) <= set(options_by_flag()) & set(wheel_options())


def test_choices_are_megatrons_but_for_the_ones_listed():
    different = {
        flag
        for flag, ours in options_by_flag().items()
        if flag in wheel_options() and set(ours.choices or ()) != set(wheel_options()[flag].choices or ())
    }
    assert different == set(FEWER_CHOICES)
    for flag in FEWER_CHOICES:
        extra = set(options_by_flag()[flag].choices or ()) - set(wheel_options()[flag].choices or ())
        any_there = wheel_options()[flag].choices is None  # of a text, ours are those that are known
        ours = {
            "ByteTokenizer",
            "rowwise",
            "mxfp4",
            "alibi",
            "longrope",
            "dynamic",
            "highest",
            "adafactor",
            "ademamix",
            "schedule_free",
            "kda",
            "power",
        }
        assert any_there or extra <= ours


def test_a_value_that_passes_silently_is_megatrons_default_or_asks_for_nothing():
    asks_for_nothing = {
        "--expert-tensor-parallel-size": "1",  # as the tensor-parallel size that a model without experts has
        "--recompute-modules": "core_attn",  # what selective recomputation covers
        "--rope-type": "rope",
        "--dataloader-type": "single",
        "--dist-ckpt-format": "torch_dist",
        "--exit-signal": "SIGTERM",
        "--megatron-fsdp-main-grads-dtype": "fp32",  # what gradients are summed and kept in
        "--megatron-fsdp-grad-comm-dtype": "fp32",
    }
    for flag, known in megatron_options().items():
        default = wheel_options()[flag].default
        if known.neutral is None or (default == UNREADABLE and flag not in asks_for_nothing):
            continue
        plain = default[0] if isinstance(default, list) else default
        silent = set(known.neutral.split(";"))
        assert silent <= {str(plain), asks_for_nothing.get(flag)}, flag


def test_an_old_value_is_one_of_megatrons_and_is_taken_as_one_of_ours():
    for (name, old), (new, _) in VALUES.items():
        option = options_by_name()[name]
        assert option.choices is None or new in option.choices
        theirs = wheel_options()[option.flag].choices
        assert theirs is None or old in theirs or old == "zarr", (name, old)


def test_a_value_of_a_fork_is_none_of_megatrons_and_is_taken_as_one_of_ours():
    for (name, old), (new, _) in VALUES_OF_FORKS.items():
        option = options_by_name()[name]
        choices = option.choices or {"cp_comm_type": ("p2p", "a2a", "all_gather")}[name]
        assert new in choices
        assert old not in (wheel_options()[option.flag].choices or ()) or old not in choices
        assert parse([option.flag, old]).values == {name: (new,) if option.many else new}


def test_an_option_of_an_earlier_release_is_in_no_other_class():
    """Where Megatron has it again, the list read from its wheel says what becomes of it."""
    earlier = [*earlier_options(), *EARLIER_FLAGS]
    others = set(wheel_options()) | set(options_by_flag()) | set(FLAGS) | set(other_programs.FLAGS)
    assert len(earlier) == len(set(earlier))
    assert not others & set(earlier)


def test_an_earlier_spelling_stands_for_a_field_and_what_it_implies():
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert parse(["--checkpoint-activations"]).values == whole
    assert parse(["--checkpoint-num-layers", "4", "--checkpoint-activations"]).values == {
        **whole,
        "recompute_num_layers": 4,
    }
    block = "--activations-checkpoint-method block --activations-checkpoint-num-layers 2"
    assert parse(block.split()).values == {**whole, "recompute_method": "block", "recompute_num_layers": 2}
    assert parse(["--override-lr-scheduler"]).values == {"override_opt_param_scheduler": True}
    assert parse(["--layernorm-epsilon", "1e-6", "--tokenizer_name_or_path", "x"]).values == {
        "norm_epsilon": 1e-6,
        "tokenizer_model": "x",
    }


def test_of_a_flag_that_changes_nothing_one_value_may_be_refused():
    assert parse(["--dataloader-type", "single"]).warnings == ()
    [warning] = parse(["--dataloader-type", "cyclic"]).warnings
    assert warning.startswith("--dataloader-type changes nothing here: all samples are shuffled once an epoch")
    with pytest.raises(ConfigurationError, match=r"--dataloader-type external is not .*pretrain\(datasets=...\)"):
        parse(["--dataloader-type", "external"])


def test_a_script_of_an_earlier_release_is_taken_with_a_warning_for_each():
    words = "--data-impl lazy --DDP-impl torch --no-async-tensor-model-parallel-allreduce --partition_activations"
    typed = parse(words.split())
    assert [warning.partition(" changes")[0] for warning in typed.warnings] == [
        *("--data-impl", "--DDP-impl", "--no-async-tensor-model-parallel-allreduce", "--partition-activations")
    ]


def test_tokenizers_of_forks_are_refused_with_what_to_use():
    with pytest.raises(ConfigurationError, match=r"Llama3Tokenizer.* use HuggingFaceTokenizer with --tokenizer-model"):
        parse(["--tokenizer-type", "Llama3Tokenizer"])


@pytest.mark.parametrize("flag", ["--delay-wgrad-compute", "--enable-zbh1-pipeline", "--cpu-offloading-num-layers 4"])
def test_what_would_save_time_or_memory_is_said_to_save_none(flag: str):
    (warning,) = parse(shlex.split(flag)).warnings
    assert warning.startswith(f"{flag.split()[0]} saves nothing here: ")
