"""Absurd values of flags, and sizes that the configuration counts up to, are answered at once."""

import importlib
import json
import pkgutil
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import rules
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import resolve
from megatron_ext.cost.dry_run import describe
from megatron_ext.cost.flops import active_parameters
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.catalogue import count, count_per_rank, count_per_stage, parameters, stages, tensor_size
from megatron_ext.parts.stack import stack
from megatron_ext.rules.suggest import divisors
from megatron_ext.rules.validate import RULES
from megatron_ext.train.configure import configure, gather_facts
from tests.support.errors_page import combinations, errors_page
from tests.support.near_flags import advice, around, lines, spoken_near, title
from tests.support.wrong_flags import BASE, EXAMPLES

_BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 64 "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --dry-run --world-size 1 "
)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--num-layers 1000000000", "--num-layers: 1000000000 is above 10000; use 10000 or less"),
        ("--num-layers -1000000000", "--num-layers: -1000000000 is above 10000"),
        (f"--hidden-size {'9' * 4000}", "--hidden-size: this number is above 1000000000000000"),
        (f"--hidden-size {'9' * 5000}", "'999999"),
        ("--world-size 10000000", "--world-size: 10000000 is above 1048576"),
        ("--num-experts 10000000", "--num-experts: 10000000 is above 65536"),
        (
            "--rampup-batch-size 1 1 1000000000 --global-batch-size 1000000000",
            "grows to --global-batch-size 1000000000 in 999999999 phases, more than 10000; use an increment of 333667",
        ),
        ("--hidden-size 999999999999989 --num-attention-heads 2", "is not divisible by"),
    ],
)
def test_absurd_sizes_are_refused_at_once(flags: str, problem: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        configure((_BASE + flags).split())
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.process_time() - started < 2


def test_a_saved_or_a_yaml_value_is_bounded_too(tmp_path) -> None:
    (tmp_path / "flags.yaml").write_text("num_layers: 1000000000\n")
    with pytest.raises(ConfigurationError, match="num_layers: 1000000000 is above 10000"):
        parse(["--config", str(tmp_path / "flags.yaml")])


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers 10000",
        "--num-layers 1000 --num-experts 65536 --disable-bias-linear",
        "--world-size 1048576",
        "--world-size 8192 --pipeline-model-parallel-size 8192 --num-layers 8192 --global-batch-size 8192",
        "--world-size 128 --pipeline-model-parallel-size 128 --num-layers 128 --global-batch-size 128",
    ],
)
def test_the_largest_sizes_are_described_at_once(flags: str) -> None:
    started = time.process_time()
    assert describe(configure((_BASE + flags).split()).config)
    assert time.process_time() - started < 5


def test_few_divisors_of_an_absurd_number() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(10**10)[-1] == 10**10
    started = time.process_time()
    assert divisors(10**15)[:4] == [1, 2, 4, 5]
    assert time.process_time() - started < 0.5


_EXPERTS = (
    "--num-layers 4 --num-experts 8 --moe-ffn-hidden-size 32 --disable-bias-linear --moe-router-topk 3 "
    "--moe-shared-expert-intermediate-size 48 --world-size 4 --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4"
)


@pytest.mark.parametrize(
    "flags",
    ["", "--world-size 4 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --swiglu", _EXPERTS],
    ids=["dense", "TP2 PP2", "experts PP2 EP2 interleaved"],
)
def test_counting_by_kinds_is_counting(flags: str) -> None:
    """The sums that --dry-run shows, against the parameters listed one by one."""
    config = configure((_BASE + flags).split()).config
    every = parameters(config)
    assert count(config) == sum(parameter.size for parameter in every)
    held = [[p for p in every if stage in stages(config, p)] for stage in range(len(count_per_stage(config)))]
    assert count_per_stage(config) == [sum(p.size for p in stage) for stage in held]

    def local(stage: list, routed: bool) -> int:
        sizes = [p.local_shape(tensor_size(config, p)) for p in stage if (p.expert is not None) == routed]
        total = sum(size[0] * (size[1] if len(size) > 1 else 1) for size in sizes)
        return total // config.layout.expert_model_parallel_size if routed else total

    assert count_per_rank(config, experts=False) == [local(stage, False) for stage in held]
    assert count_per_rank(config, experts=True) == [local(stage, True) for stage in held]
    assert count_per_rank(config) == [local(stage, False) + local(stage, True) for stage in held]
    top_k = config.model.moe_router_topk
    assert active_parameters(config) == sum(p.size for p in every if p.expert is None or p.expert < top_k)
    assert len(stack(config).kinds) == 1


GOLDEN = Path(__file__).resolve().parents[2] / "golden/near_flags.json"
REGENERATE = "python tests/golden/regenerate.py"

NOT_ALONE = (
    # Two steps, of which each is advised with the other; and what a fact of the machine says, which stays here.
    "--no-position-embedding with --position-embedding-type none",
    "--load a: nothing is there",
    "--load None: nothing is there",
)
"""Beginnings of messages whose advice, one part of it followed by itself, changes nothing."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def test_the_record_is_of_all_lines(golden: dict[str, Any]):
    assert [title(line, given) for line, _, given in lines()] == list(golden), REGENERATE


@pytest.mark.parametrize("part", range(2))
def test_next_to_every_wrong_command_line_the_rules_say_what_is_recorded(part: int, golden: dict[str, Any]):
    for number in range(part, len(lines()), 2):
        line, _, given = lines()[number]
        name, row = title(line, given), around(number)
        assert row == golden[name], f"{name!r}: {REGENERATE}, and read the diff"


def test_every_rule_speaks_in_the_record(golden: dict[str, Any]):
    """One that never does is not tested there. That of a missing value stands before all others, --load-hf reads a
    file, a matrix without a rule is a user's own, and all plugins are installed."""
    spoken = {name for row in golden.values() for names in [row["rules"], *row["near"].values()] for name in names}
    silent = {rule.__name__ for rule in RULES} - spoken
    of_others = {"model_is_the_one_to_load", "matrices_have_a_rule", "plugins_are_installed"}
    assert silent == {"nothing_needed_is_missing", *of_others}


@pytest.mark.parametrize("part", range(2))
def test_a_rule_takes_what_its_message_advises(part: int):
    """Beyond the examples, whose way out is written down: with every number in the list of a message."""
    followed, wrong = 0, []
    for number in range(part, len(lines()), 2):
        line, facts, _ = lines()[number]
        for what, moved, names, texts in spoken_near(number):
            for name, text in zip(names, texts, strict=True):
                for words, added, left_out in advice(text):
                    rule = next(rule for rule in RULES if rule.__name__ == name)
                    fixed = {key: value for key, value in {**moved, **added}.items() if key not in left_out}
                    followed += 1
                    if text in rule(resolve(fixed, facts), facts) and not text.startswith(NOT_ALONE):
                        wrong.append((line, what, text, words))
    assert followed > 200
    assert wrong == []


# Rules about one flag by itself, or about the machine.
NO_COMBINATION = {"matrices_have_a_rule", "ranks_are_those_of_the_launch", "timeout_is_a_time"}
ABOUT_OTHER_THINGS = {
    "model_rules",
    "training_rules",
    "curve_rules",
    "run_rules",
    "reads",
    "suggest",
    "validate",
    "warnings",
}


def layout_rules() -> list[Any]:
    found = []
    for module in pkgutil.iter_modules(rules.__path__):
        if module.name not in ABOUT_OTHER_THINGS:
            found += importlib.import_module(f"{rules.__name__}.{module.name}").RULES
    return [rule for rule in found if rule.__name__ not in NO_COMBINATION]


@pytest.fixture(scope="module")
def broken() -> set[str]:
    """Names of the rules that some example breaks."""
    names: set[str] = set()
    for example in EXAMPLES.values():
        typed = parse(shlex.split(f"{BASE} {example.flags}"))
        facts = gather_facts(typed)
        config = resolve(typed.values, facts)
        names |= {rule.__name__ for rule in layout_rules() if list(rule(config, facts))}
    return names


@pytest.mark.parametrize("rule", layout_rules(), ids=lambda rule: rule.__name__)
def test_a_wrong_command_line_shows_the_rule(rule: Any, broken: set[str]) -> None:
    assert rule.__name__ in broken, f"add a command line that breaks {rule.__name__} to tests/support/wrong_flags.py"


def test_the_page_lists_the_combinations() -> None:
    page = errors_page()
    assert len(combinations()) >= 12
    for rule in combinations():
        assert f"| [{rule}](#" in page
