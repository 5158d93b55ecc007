"""An option that is given by two of its names: equal values are one, different ones are refused with both names."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse, read
from megatron_ext.config.parse.options import Option, options, options_by_name
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.megatron_lm.old_spellings import EARLIER_FLAGS, FLAGS
from megatron_ext.train.configure import configure
from tests.support.wrong_flags import BASE

PAIRS: dict[str, tuple[str, str | None]] = {
    **FLAGS,
    **EARLIER_FLAGS,
    **{alias: (option.name, None) for option in options() for alias in option.aliases},
}
"""Old spelling, or another name -> field, and the value that it stands for."""


def _texts(option: Option) -> list[str]:
    """Return two values of an option, as words of a command line."""
    if option.is_switch:
        return ["true", "false"]
    if option.choices:
        return [str(choice) for choice in option.choices[:2]]
    return {int: ["3", "4"], float: ["0.25", "0.5"], str: ["p2p", "a2a"]}[option.type]


def _words(flag: str, text: str | None) -> list[str]:
    return [flag] if text is None else [f"{flag}={text}"]


@pytest.mark.parametrize("old", PAIRS)
def test_two_names_of_an_option(old: str, tmp_path: Path) -> None:
    name, stands_for = PAIRS[old]
    option = options_by_name()[name]
    one, other = _texts(option)
    if stands_for is not None:
        one, other = stands_for, next(text for text in map(str, option.choices or ()) if text != stands_for)
    typed = _words(old, None if stands_for else one)
    alone = parse(typed)
    for same in ([*typed, *_words(option.flag, one)], [*_words(option.flag, one), *typed]):
        assert parse(same).values == alone.values
    for different in ([*typed, *_words(option.flag, other)], [*_words(option.flag, other), *typed]):
        [problem] = read(different).problems
        assert old in problem
        assert option.flag in problem
        assert problem.endswith("are the same option; keep one of them")
        assert name in read(different).unread

    def in_file(*lines: tuple[str, Any]) -> list[str]:
        path = tmp_path / "run.yaml"
        path.write_text("".join(f"{key.removeprefix('--').replace('-', '_')}: {value}\n" for key, value in lines))
        return ["--config", str(path)]

    if old in FLAGS or old in EARLIER_FLAGS:
        line = old, "true" if stands_for else one
        assert parse(in_file(line, (option.flag, one))).values == alone.values
        with pytest.raises(ConfigurationError, match="are the same option; keep one of them"):
            parse(in_file(line, (option.flag, other)))
        # The command line wins, by whichever name.
        read_with = ["--recompute-granularity=full"] if name in ("recompute_method", "recompute_num_layers") else []
        over = [*_words(option.flag, other), *read_with]
        assert _value([*in_file(line), *over], name) == _value(over, name)
        assert _value([*in_file((option.flag, other)), *typed], name) == alone.values.get(name)


def _value(argv: list[str], name: str) -> Any:
    """Return the value of a field; None where it has no effect by itself, and is dropped."""
    return parse(argv).values.get(name)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--warmup 4", "--warmup 4 is not at least 0 and below 1; use --warmup 0.1"),
        ("--lr-warmup-fraction 4", "--lr-warmup-fraction 4 is not at least 0 and below 1; use --lr-warmup-fraction"),
        (
            "--encoder-seq-length 63 --world-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            "; use --encoder-seq-length 62 or 64",
        ),
        ("--checkpoint-activations --recompute-num-layers 9", "--recompute-num-layers 9 is more than"),
        (
            "--use-rotary-position-embeddings --rotary-percent 2",
            "--rotary-percent 2 is not above 0 and at most 1",
        ),
        ("--save a --persistent-save-interval 10 --save-retain-interval 25", "multiple of --persistent-save-interval"),
        ("--warmup 0.1 --lr-warmup-iters 5", "--warmup 0.1 and --lr-warmup-iters 5 both give the warmup"),
    ],
)
def test_a_problem_names_the_flag_that_was_typed(flags: str, problem: str) -> None:
    """Both, where the option was given by both."""
    base = BASE.replace("--seq-length 64 ", "") if "--encoder-seq-length" in flags else BASE
    with pytest.raises(ConfigurationError) as caught:
        configure([*base.split(), *flags.split()])
    assert [problem in found for found in caught.value.problems] == [True], caught.value.problems


def test_a_warning_names_the_flag_that_was_typed() -> None:
    assert [warning.partition(" ")[0] for warning in parse(["--persistent-save-interval", "5"]).warnings] == [
        "--persistent-save-interval"
    ]


def test_two_values_of_one_option_are_the_only_problem() -> None:
    """What follows from either of them is not said."""
    with pytest.raises(ConfigurationError) as caught:
        configure(
            [*BASE.split(), *["--encoder-num-layers", "7", "--world-size", "2", "--pipeline-model-parallel-size", "2"]]
        )
    assert caught.value.problems == ["--num-layers 8 and --encoder-num-layers 7 are the same option; keep one of them"]
