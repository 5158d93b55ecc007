"""--help with a word."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_ext.config.parse.help_text import about

ROOT = Path(__file__).resolve().parents[4]


def program(*words: str, python: str = sys.executable, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([python, *words], cwd=ROOT, env=environment, text=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]


def test_help_with_a_word_names_what_speaks_of_it() -> None:
    text = about("rope")
    assert "--rope-scaling-factor X" in text
    assert "--position-embedding-type" in text  # by its choices
    assert "--num-layers " not in text
    assert about("gloabl-batch") == (
        "no flag speaks of 'gloabl-batch'; near it: --global-batch-size, --eval-global-batch-size. "
        "--help lists all of them."
    )
    ended = program("pretrain_gpt.py", "--help", "rope", stdout=subprocess.PIPE)
    assert ended.communicate()[0] == text + "\n"


def test_help_with_a_word_says_what_becomes_of_megatrons_other_flags() -> None:
    text = about("tp-comm-overlap")
    own, _, without_effect = text.partition("taken, without effect:\n")
    assert "--tp-comm-overlap  " in own
    assert "--tp-comm-overlap-cfg" in without_effect
    assert "which have none of Transformer\n" in without_effect
    assert "not supported:" not in text
    assert about("spec").rpartition("not supported:\n")[2].startswith("  --spec  ")
    assert "--rope-scaling-factor X" in about("rope-scaling")


def test_flags_of_megatron_deepspeed_are_explained() -> None:
    text = about("zero-stage")
    assert text.startswith("taken as scripts of Megatron-DeepSpeed mean it:\n  --zero-stage N")
    assert "--use-torch-fsdp2. DeepSpeed's file wins" in text
