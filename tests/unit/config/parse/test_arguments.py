"""The command line: every kind of value, every kind of mistake, and that it never changes by accident."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.config.parse.arguments import Typed, parse
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.megatron_lm.reference import pinned_command_line

ROOT = Path(__file__).resolve().parents[4]


def problems_of(line: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse(shlex.split(line))
    return caught.value.problems


def test_each_kind_of_value_is_read_as_its_field_has_it():
    typed = parse(
        shlex.split(
            "--num-layers 4 --lr 1e-3 --bf16 --tokenizer-type ByteTokenizer --rampup-batch-size 8 8 1000 "
            "--data-path 0.3 a 0.7 b --seed=-1 --swiglu=false --save a --persistent-save-interval 5 --dry-run"
        )
    )
    assert typed == Typed(
        values={
            "num_layers": 4,
            "lr": 0.001,
            "bf16": True,
            "tokenizer_type": "ByteTokenizer",
            "rampup_batch_size": (8, 8, 1000),
            "data_path": ("0.3", "a", "0.7", "b"),
            "seed": -1,
            "swiglu": False,
            "save": "a",
            "save_interval": 5,
        },
        dry_run=True,
        spellings={"--save-interval": "--persistent-save-interval"},
    )
    assert type(parse(["--lr", "1"]).values["lr"]) is float


def test_only_what_was_typed_is_in_the_values():
    assert parse([]) == Typed(values={})


def test_the_last_of_a_repeated_flag_counts():
    assert parse(shlex.split("--num-layers 4 --num-layers 8")).values == {"num_layers": 8}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--hiden-size 4", "unknown flag --hiden-size; did you mean --hidden-size?"),
        ("--zzz", "unknown flag --zzz; see --help all for every flag, or add --allow-unknown-flags to leave it out"),
        ("--num-layers 4.5", "--num-layers: '4.5' is not an integer"),
        ("--lr fast", "--lr: 'fast' is not a number"),
        ("--lr nan", "--lr: 'nan' is not a finite number"),
        (
            "--optimizer adam8",
            "--optimizer: 'adam8' is not one of adam, sgd, muon, lion, adaptive_muon, adafactor, ademamix, "
            "schedule_free; did you mean adam?",
        ),
        (
            "--optimizer other",
            "--optimizer: 'other' is not one of adam, sgd, muon, lion, adaptive_muon, adafactor, ademamix, "
            "schedule_free",
        ),
        (
            "--lr-decay-style wsd",
            "--lr-decay-style: 'wsd' is not one of constant, linear, cosine, inverse-square-root, WSD, power; did you "
            "mean WSD?",
        ),
        (
            "--optimizer soap",
            "--optimizer: 'soap' is not supported: its bases follow the rounding of a gradient, so that each layout "
            "would train another curve; use one of adam, sgd, muon, lion, adaptive_muon, adafactor, ademamix, "
            "schedule_free",
        ),
        ("--timing-log-level 3", "--timing-log-level: '3' is not one of 0, 1, 2"),
        (
            "--exp-avg-dtype fp8",
            "--exp-avg-dtype: 'fp8' is not supported: it would need a scale for each tensor, which differs between the "
            "shards of different layouts; use one of fp32, bf16, fp16",
        ),
        ("--bf16=yes", "--bf16: 'yes' is not true or false"),
    ],
)
def test_a_mistake_is_named(line: str, problem: str):
    assert problems_of(line) == [problem]


def test_all_mistakes_are_reported_at_once():
    assert len(problems_of("--hiden-size 4 --lr fast --moe-single-grouped-weight --num-layers")) == 4


def test_refused_flags_are_named_with_their_values_and_neutral_ones_pass():
    (problem,) = problems_of("--mask-prob 0.7 --num-layers 4")
    assert problem.startswith("--mask-prob 0.7 is not supported: ")
    (problem,) = problems_of("--spec some.module Spec --num-layers 4")
    assert problem.startswith("--spec some.module Spec is not supported: ")
    neutral = "--mask-prob 0.150 --fim-eod-token=<|endoftext|> --muon-scalar-optimizer adam"
    assert parse(shlex.split(neutral)) == Typed(values={})


def test_accepted_flags_are_consumed_with_one_warning_each():
    typed = parse(shlex.split("--use-flash-attn --local-rank 3 --use-flash-attn --num-layers 4"))
    assert typed.values == {"num_layers": 4}
    assert [warning.split()[0] for warning in typed.warnings] == ["--use-flash-attn", "--local-rank"]


def test_text_that_looks_like_code_stays_text():
    code = "__import__('os').system('touch canary')"
    assert parse(["--save", code, f"--wandb-project={code}"]).values == {"save": code, "wandb_project": code}
    assert problems_of(f'--num-layers "{code}"') == [f"--num-layers: {code!r} is not an integer"]


def test_help_names_every_flag_and_exits_with_0(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse(["--num-layers", "4", "--help", "all"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    flags = [line.split(" | ")[0] for line in pinned_command_line().splitlines() if " | " in line]
    assert [flag for flag in flags if flag not in shown] == []
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_the_command_line_is_the_pinned_one():
    pinned = (ROOT / "tests/golden/cli.txt").read_text()
    assert pinned_command_line() == pinned, "a flag changed; if on purpose: python tests/golden/regenerate.py"
