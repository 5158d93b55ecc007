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

RULES_OF_RECOMPUTATION: tuple[Rule, ...] = (
    training_rules.recomputation_is_complete,
    training_rules.recomputed_parts_are_known,
    part_rules.parts_are_computed_again,
    layout_rules.kept_gathers_are_those_of_plain_layers,
)
"""All rules that ask what is recomputed: where nothing else changes, a search asks no others."""

RULES_OF_MICRO_BATCHES: tuple[Rule, ...] = (
    pipeline_rules.interleaving_needs_stages,
    pipeline_rules.microbatches_pass_in_whole_groups,
    pipeline_rules.schedule_suits_the_layout,
    training_rules.global_batch_divides,
    training_rules.rampup_is_well_formed,
    training_rules.schedule_of_batches_is_well_formed,
    training_rules.evaluation_batch_divides,
    operation_rules.fp8_sums_over_whole_blocks_of_tokens,
)
"""All rules that ask for the micro batch size."""

_OF_LAYOUTS = {
    *layout_rules.RULES,
    *moe_rules.RULES,
    *part_rules.RULES,
    *pipeline_rules.RULES,
    *sharding_rules.RULES,
    *RULES_OF_RECOMPUTATION,
    *RULES_OF_MICRO_BATCHES,
    run_rules.compiling_is_possible,
    model_rules.heads_divide_by_tensor_size,
    model_rules.query_groups_fit_tensor_size,
    model_rules.mlp_divides_by_tensor_size,
    model_rules.vocabulary_fits_its_padding,
    training_rules.products_can_be_bounded,
    training_rules.gradients_have_one_precision,
    training_rules.averages_are_kept_once,
    training_rules.offloading_offloads_something,
    operation_rules.products_add_to_main_gradients,
    operation_rules.fp8_has_layers_of_its_own,
    operation_rules.fp8_takes_whole_blocks,
    observation_rules.communication_can_be_timed,
}
RULES_OF_LAYOUTS: tuple[Rule, ...] = tuple(rule for rule in RULES if rule in _OF_LAYOUTS)
"""All rules that ask for anything that a search chooses, in the order of the rules. The bounds of single values are not
among them: a search chooses no value that is out of them."""


def problems(config: Config, facts: Facts) -> list[str]:
    """Return all problems of the configuration, in the order of the rules; empty where the run may start.

    A problem that names a flag whose value could not be read may follow from that alone, and is left out; why a file
    could not be read is always said.
    """
    texts = [problem for rule in RULES for problem in rule(config, facts)]
    unread = [re.compile(rf"{flag_of(name)}(?![\w-])") for name in facts.unread]
    causes = {*facts.huggingface_problems, facts.tokenizer_error, facts.load_problem}
    return [problem for problem in texts if problem in causes or not any(flag.search(problem) for flag in unread)]


def broken_rule(config: Config, facts: Facts, rules: Sequence[Rule] = RULES) -> Rule | None:
    """Return a rule that the configuration breaks, or None; once one is found no other is asked. Those about layouts,
    which a search breaks most, come first."""
    return next((rule for rule in reversed(rules) if any(rule(config, facts))), None)
