"""Third stage of the configuration: every problem of a resolved configuration, before any process group is made.

One function per rule. A rule that needs a value which is missing or out of range stays silent: the rule about
that value speaks. Each problem names flags, their values, and a setting that works.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.registry import brought
from megatron_ext.rules import (
    curve_rules,
    layout_rules,
    model_rules,
    moe_rules,
    observation_rules,
    operation_rules,
    part_rules,
    pipeline_rules,
    run_rules,
    sharding_rules,
    training_rules,
)
from megatron_ext.rules.reads import rules_that_read

Rule = Callable[[Config, Facts], Iterable[str]]

RULES: tuple[Rule, ...] = (
    *run_rules.RULES,
    *model_rules.RULES,
    *layout_rules.RULES,
    *moe_rules.RULES,
    *part_rules.RULES,
    *pipeline_rules.RULES,
    *sharding_rules.RULES,
    *training_rules.RULES,
    *curve_rules.RULES,
    *operation_rules.RULES,
    *observation_rules.RULES,
    *brought("rules"),
)

RULES_OF_RECOMPUTATION = rules_that_read("recomputation", RULES)
"""All rules that read the recomputation: where nothing else changes, a search asks only these."""

RULES_OF_MICRO_BATCHES = rules_that_read("micro batch", RULES)
"""All rules that read the micro batch size."""

RULES_OF_LAYOUTS = rules_that_read("layout", RULES)
"""All rules that read anything that a search of layouts chooses, in their order. The bounds of single values are not
among them: a search chooses no value that is out of them."""


def problems(config: Config, facts: Facts) -> list[str]:
    """Return all problems of the configuration, in the order of the rules; empty where the run may start.

    A problem that names a flag whose value could not be read may follow from that alone, and is left out; why a file
    could not be read is always reported.
    """
    texts = [problem for rule in RULES for problem in rule(config, facts)]
    unread = [re.compile(rf"{flag_of(name)}(?![\w-])") for name in facts.unread]
    causes = {*facts.huggingface_problems, facts.tokenizer_error, facts.load_problem}
    return [problem for problem in texts if problem in causes or not any(flag.search(problem) for flag in unread)]


def broken_rule(config: Config, facts: Facts, rules: Sequence[Rule] = RULES) -> Rule | None:
    """Return a rule that the configuration breaks, or None; once one is found no other is asked. Those about layouts,
    which a search breaks most, come first."""
    return next((rule for rule in reversed(rules) if any(rule(config, facts))), None)
