"""tasks/main.py: what it refuses, and its table; tests/distributed/test_inference_tools.py runs it."""

import importlib.util
import re

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.commands import tasks


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--load x --taks LAMBADA", "--taks; did you mean --task?"),
        ("--task WIKITEXT103 --load x", "WIKITEXT103 is --task PERPLEXITY here"),
        ("--load x", "give --task with its files, or --eval-tasks FILE: one of them"),
        ("--task LAMBADA --valid-data nowhere.jsonl --load x", "--task LAMBADA: lambada: nowhere.jsonl is no file"),
    ],
)
def test_flags_that_cannot_work_are_named(line: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        tasks.main(line.split())


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_the_harness_its_tasks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--task LM_EVAL needs lm-evaluation-harness: pip install lm_eval"):
        tasks.main(["--task", "LM_EVAL", "--lm-eval-tasks", "arc", "--load", "x"])


def test_a_table_shows_counts_with_commas_and_no_decimals() -> None:
    results = {"LAMBADA": {"accuracy": 0.25, "items": 12345}, "P": {"perplexity": 1.5}}
    assert tasks.table(results) == (
        "LAMBADA  accuracy    0.250000\nLAMBADA  items         12,345\nP        perplexity      1.50"
    )
    assert tasks.table({}) == ""
