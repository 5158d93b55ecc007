"""--help: the usual flags, all flags, or the flags that have to do with words."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.config.parse.help_text import about
from megatron_ext.config.parse.options import flag_of, options, options_by_flag
from megatron_ext.config.parse.other_flags import find_spelling
from megatron_ext.config.parse.usual_flags import COUNTED, FIRST_TRY, USUAL
from tests.support.megatron_launches import Recorded, other_launches

ROOT = Path(__file__).resolve().parents[4]


def program(*words: str, python: str = sys.executable, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([python, *words], cwd=ROOT, env=environment, text=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]


def test_help_with_a_word_names_what_speaks_of_it() -> None:
    text = about(["rope"])
    assert "--rope-scaling-factor X" in text
    assert "--position-embedding-type" in text  # by its choices
    assert "--num-layers " not in text
    assert about(["gloabl-batch"]) == (
        "no flag speaks of 'gloabl-batch'; near it: --global-batch-size, --eval-global-batch-size. "
        "--help all lists every flag."
    )
    ended = program("pretrain_gpt.py", "--help", "rope", stdout=subprocess.PIPE)
    assert ended.communicate()[0] == text + "\n"


def test_help_calls_the_program_by_its_one_name() -> None:
    assert about([]).startswith("usage: megatron-ext pretrain [--config run.yaml] [flags]\n")
    assert "pretrain_gpt.py" not in about(["all"])


def test_words_are_looked_up_each_and_in_any_order() -> None:
    assert about(["every", "save"]) == about(["save every"])
    assert "--save-interval" in about(["save every"])
    assert about(["scaling", "rope"]) == about(["rope scaling"])
    assert about(["rope_scaling"]) == about(["rope-scaling"])
    assert "--rope-scaling-factor" not in about(["caling"])


def test_help_shows_the_flags_that_most_launches_use_and_help_all_shows_every_flag() -> None:
    shown = {one.flag for one in options() if f"\n  {one.flag}" in about([])}
    assert shown == {f"--{name}" for name in USUAL}
    assert len(shown) == 80
    assert all(f"\n  {one.flag}" in about(["all"]) for one in options())


def test_usual_flags_are_counted_from_recorded_launches() -> None:
    """Configurations of Megatron-LM differ little from each other: they and other groups' scripts count half each."""
    recorded = Recorded.read()
    shares: dict[str, float] = defaultdict(float)
    for launches in (recorded.configurations | recorded.examples, other_launches()):
        for words in launches.values():
            for flag in _fields_of(words) - FIRST_TRY:
                shares[flag] += 1 / len(launches)
    most = sorted(shares, key=lambda flag: (-shares[flag], flag))
    assert frozenset(most[: len(COUNTED)]) == COUNTED


def _fields_of(words: Sequence[str]) -> set[str]:
    """Return the flags of a launch by their present names, without hyphens."""
    flags = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    named = {options_by_flag()[flag].flag for flag in flags if flag in options_by_flag()}
    named |= {flag_of(old[0]) for flag in flags - named if (old := find_spelling(flag)) is not None}
    return {flag.removeprefix("--") for flag in named}


def test_help_with_a_word_says_what_becomes_of_megatrons_other_flags() -> None:
    text = about(["tp-comm-overlap"])
    own, _, without_effect = text.partition("taken, without effect:\n")
    assert "--tp-comm-overlap  " in own
    assert "--tp-comm-overlap-cfg" in without_effect
    assert "which have none of Transformer\n" in without_effect
    assert "not supported:" not in text
    assert "\n  --spec  " in about(["spec"]).rpartition("not supported:")[2]
    assert "--rope-scaling-factor X" in about(["rope-scaling"])


def test_flags_of_megatron_deepspeed_are_explained() -> None:
    text = about(["zero-stage"])
    assert text.startswith("taken as scripts of Megatron-DeepSpeed mean it:\n  --zero-stage N")
    assert "--use-torch-fsdp2. DeepSpeed's file wins" in text
