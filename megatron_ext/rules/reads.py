"""Lets a rule declare which choices of the layout search it reads: for a new choice the search asks only the rules that
read it.

    @reads("micro batch")
    def global_batch_divides(config, facts): ...

    rules_that_read("micro batch", RULES)

A rule that reads more than it declares fails tests/plugins/planner/test_search.py, which watches the fields.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

Chosen = Literal["layout", "recomputation", "micro batch"]
"""A choice of the layout search: any field of the layout, the recomputation, or the micro batch size."""

_READ: dict[Callable[..., Any], set[Chosen]] = defaultdict(set)


def reads[Rule: Callable[..., Any]](*chosen: Chosen) -> Callable[[Rule], Rule]:
    """Declare that a rule reads these. Whatever a rule reads of them is part of the layout."""

    def declared(rule: Rule) -> Rule:
        _READ[rule] |= {"layout", *chosen}
        return rule

    return declared


def all_read_the_layout[Rules: Iterable[Callable[..., Any]]](rules: Rules) -> Rules:
    """Declare that all of these rules read the layout, and return them."""
    for rule in rules:
        reads()(rule)
    return rules


def rules_that_read[Rule: Callable[..., Any]](chosen: Chosen, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules that have declared to read it, in their order."""
    return tuple(rule for rule in rules if chosen in _READ.get(rule, ()))
