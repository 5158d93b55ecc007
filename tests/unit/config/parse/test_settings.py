"""Settings of Python become the words of a command line: what these say, the parser says in the same words."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import read
from megatron_ext.config.parse.settings import words_of
from megatron_ext.errors import ConfigurationError


def test_values_are_read_as_on_a_command_line() -> None:
    settings = {
        "num-layers": 4,
        "lr": 1e-05,
        "swiglu": True,
        "bf16": False,
        "save": Path("run") / "one",
        "data_path": [0.5, "data/a", "0.5", Path("data/b")],
        "window_size": "-1,0",
        "full_attn_idxs": [1],
        "load": None,
    }
    values = read(words_of(settings, {"num_layers": 6})).values
    assert values == {
        "num_layers": 6,
        "lr": 1e-5,
        "swiglu": True,
        "bf16": False,
        "save": "run/one",
        "data_path": ("0.5", "data/a", "0.5", "data/b"),
        "window_size": "-1,0",
        "full_attn_idxs": (1,),
    }


@pytest.mark.parametrize(
    "given", ["--num-layers 4 --bf16", ["--num-layers", "4", "--bf16"], {"num_layers": 4, "bf16": True}]
)
def test_flags_may_be_words_a_text_or_a_dict(given: Any) -> None:
    assert read(words_of(given, {"lr": 1})).values == {"num_layers": 4, "bf16": True, "lr": 1.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layer": 4}, "unknown flag --num-layer; did you mean --num-layers?"),
        ({"num_layer": False}, "unknown flag --num-layer; did you mean --num-layers?"),
        ({"num_layers": 4.5}, "--num-layers: '4.5' is not an integer"),
        ({"num_layers": True}, "--num-layers needs a value: --num-layers N"),
        ({"bf16": "yes"}, "--bf16: 'yes' is not true or false"),
        ({"lr": [1, 2]}, "unexpected argument '2' after --lr"),
    ],
)
def test_a_wrong_setting_is_named_as_its_flag_is(settings: dict[str, Any], said: str) -> None:
    assert read(words_of(settings, {})).problems == (said,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layers": {}}, "--num-layers: {} is of type dict; give a number, a text, a path"),
        ({"num_layers": [[1]]}, "--num-layers: \\[1\\] is of type list"),
        ({"data_path": ["a", "-b"]}, "--data-path: '-b' begins with a hyphen"),
        ({"help": True}, "--help prints a text and ends the process"),
        ("--version", "--version prints a text and ends the process"),
    ],
)
def test_what_no_command_line_can_say_is_refused(settings: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        words_of(settings, {})


def test_a_program_with_flags_of_its_own_reads_them() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", nargs="+")
    parser.add_argument("--strict", action="store_true")
    words = words_of({"files": ["a", "b"], "strict": False}, {}, lambda flag: flag in ("--files", "--strict"))
    assert vars(parser.parse_args(words)) == {"files": ["a", "b"], "strict": False}
    assert vars(parser.parse_args(words_of({"files": "-a"}, {"strict": True}))) == {"files": ["-a"], "strict": True}
