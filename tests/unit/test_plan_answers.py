"""What the planner says: the costs of a whole run, units, names of layouts, and why the first is first."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan import economics
from megatron_ext.plan.costs import Prices, _hours, cost, count_of_tokens, lines
from megatron_ext.plan.evaluation import _alike, _communication, as_candidate, evaluate_config
from megatron_ext.plan.goodput import Failures, daly, useful_share, young
from megatron_ext.plan.hardware import Machine, hardware
from megatron_ext.plan.memory import MemoryEstimate
from megatron_ext.plan.presentation import _gb, name, simpler, why
from megatron_ext.plan.question import question
from megatron_ext.plan.timeline import duration, size
from tests.support.planner_numbers import CASES, config_of, machine_of


def test_tokens_are_rounded_up_to_whole_steps_and_failures_cost() -> None:
    failures = Failures(1e12, 1e-6, 0.0)
    found = cost(1001, 100, 7200.0, 4, failures, Prices(2.0, 500.0))
    assert (found.steps, found.tokens) == (11, 1001)
    assert found.goodput.share == pytest.approx(1.0)
    hours = 11 * 2.0 / found.goodput.share
    assert (found.days, found.device_hours) == (pytest.approx(hours / 24), pytest.approx(hours * 4))
    assert (found.dollars, found.kilowatt_hours) == (pytest.approx(hours * 8), pytest.approx(hours * 2))
    assert cost(1000, 100, 1.0, 4, failures, Prices()).steps == 10
    assert cost(1000, 100, 1.0, 4, failures, Prices()).dollars is None
    assert cost(1000, 100, 1.0, 4, failures, Prices(0.0, 0.0)).dollars == 0.0
    assert cost(1000, 100, 1.0, 4, failures, Prices(0.0, 0.0)).kilowatt_hours == 0.0


def test_the_cost_in_words() -> None:
    failures = Failures(50000.0, 30.0, 600.0)
    found = cost(10**12, 2**22, 5.0, 1024, failures, Prices(2.0, None))
    text = lines(found, failures, 5.0, (0.5, 2.0))
    assert text[0].startswith(
        f"1,000,000,000,000 tokens are 238,419 steps: {found.days:,.1f} days ({found.days / 2:,.1f} to "
        f"{found.days * 2:,.1f}), {found.device_hours:,.0f} device-hours, ${found.dollars:,.0f}"
    )
    assert text[1].startswith(f"    of that time {found.goodput.share:.1%} is useful: something breaks every 2.03 days")
    assert f"(--save-interval {round(found.goodput.interval / 5.0)})" in text[2]
    assert "kWh" not in text[0]
    assert "(--save-interval 1)" in lines(found, failures, 1e9)[2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(172800, "2 days"), (172799, "48 hours"), (7200, "2 hours"), (7199, "120 minutes"), (90, "1.5 minutes")],
)
def test_times_have_the_unit_of_their_size(seconds: float, text: str) -> None:
    assert _hours(seconds) == text


def test_numbers_of_tokens_have_suffixes() -> None:
    known = {"1": 1, "4096": 4096, "2K": 2000, "1.5M": 1_500_000, "300B": 3 * 10**11, "15T": 15 * 10**12}
    known |= {"1,000": 1000, "1_000": 1000, "1.5e12": 1_500_000_000_000, "1e+3": 1000}
    for text, number in known.items():
        assert count_of_tokens(text) == number
    for text in ("0", "0.9", "1e18", "-1", "15 T", "T", "", "nan", "1e-3", "1P"):
        with pytest.raises(ConfigurationError):
            count_of_tokens(text)


def test_daly_is_young_with_more_terms_and_bounded() -> None:
    assert young(50.0, 1e4) == 1000.0
    x = math.sqrt(50.0 / 2e4)
    assert daly(50.0, 1e4) == pytest.approx(1000.0 * (1 + x / 3 + x * x / 9) - 50.0)
    assert daly(2e4, 1e4) == 1e4 == daly(3e4, 1e4)
    failures = Failures(1.0, 30.0, 600.0)
    between = 3600.0 / 2
    expected = 100.0 / (between * math.exp(600.0 / between) * (math.exp(130.0 / between) - 1))
    assert useful_share(100.0, failures, 2) == pytest.approx(expected)


def options(**given: Any) -> Any:
    names = ("tokens", "dollars_per_hour", "watts", "stall", "over_devices", "over_seq_lengths", "html")
    rest = {"mtbf_hours": 100.0, "restart_minutes": 10.0, "evaluate": False, "limits": False}
    return SimpleNamespace(**{**dict.fromkeys(names), **rest, **given})


def test_what_was_not_said_of_a_run_is_taken_from_the_layout() -> None:
    memory = MemoryEstimate(4e9, 9e9, 8e9, 9e9, 9e9, 9e9)
    best: Any = SimpleNamespace(memory=memory)
    asked: Any = SimpleNamespace(machine=Machine(hardware("h100")))
    wanted = economics._wanted(asked, best, options(tokens="2K"))
    assert (wanted.tokens, wanted.failures) == (2000, Failures(100.0, 6.0, 600.0)), "12 GB at 2 GB/s"
    assert wanted.prices == Prices(None, 700.0)
    wanted = economics._wanted(asked, best, options(stall=0.0, watts=0.0, dollars_per_hour=0.0, restart_minutes=2.0))
    assert (wanted.tokens, wanted.failures, wanted.prices) == (None, Failures(100.0, 0.0, 120.0), Prices(0.0, 0.0))


def test_numbers_to_plan_for_are_above_0_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for over in ("over_devices", "over_lengths"):
        monkeypatch.setattr(
            economics, over, lambda _question, numbers, _wanted, over=over: asked.append((over, numbers))
        )
    economics._groups(None, options(over_devices=[8, 1, 8], over_seq_lengths=[3, 2]), None)  # pyright: ignore
    assert asked == [("over_devices", [1, 8]), ("over_lengths", [2, 3])]
    with pytest.raises(ConfigurationError, match="--over-seq-lengths 0 is not above 0"):
        economics._groups(None, options(over_seq_lengths=[5, 0]), None)  # pyright: ignore[reportArgumentType]


def test_costs_without_tokens_and_searches_without_a_choice_are_refused() -> None:
    for given, words in (
        ({"stall": 0.0}, "--stall is part of what a whole run costs"),
        ({"watts": 1.0}, "--watts is part"),
        ({"evaluate": True, "over_devices": [1]}, "search, but --evaluate chooses nothing"),
        ({"evaluate": True, "html": Path("x")}, "search, but --evaluate chooses nothing"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            economics.economics(None, [None], options(**given))  # pyright: ignore[reportArgumentType]


def test_times_and_sizes_change_their_unit_at_its_bound() -> None:
    assert [duration(seconds) for seconds in (1.0, 0.9994, 0.001, 0.0009994, 999.0, 1000.0)] == [
        "1 s", "999 ms", "1 ms", "999 us", "999 s", "1,000 s",
    ]  # fmt: skip
    assert (size(1e9), size(0.9994e9), duration(1.2345, "")) == ("1 GB", "999 MB", "1.23")


def test_bytes_are_written_with_two_digits_where_there_are_few() -> None:
    assert [_gb(held) for held in (0.0, 0.1e9, 0.0999e9, 0.00123e9, 12.34e9)] == ["0.0", "0.1", "0.1", "0.0012", "12.3"]


def test_stages_that_need_the_same_are_in_one_row() -> None:
    one, two = MemoryEstimate(1, 1, 1, 1, 1, 1), MemoryEstimate(1, 1, 1, 1, 1, 2)
    assert _alike([one, one, one, two, one, one]) == [("0-2", one), ("3", two), ("4-5", one)]


def test_hidden_traffic_is_named_also_where_none_is_exposed() -> None:
    time: Any = SimpleNamespace(
        parts={"tp": 0.0, "cp": 0.0, "ep": 0.5, "pp": 0.0, "dp": 0.25}, hidden_by_axis={"tp": 0.125, "dp": 0.5}
    )
    assert _communication(time) == "tp 0 s exposed, 0.125 hidden; ep 0.5 s exposed; dp 0.25 s exposed, 0.5 hidden"
    nothing: Any = SimpleNamespace(parts=dict.fromkeys(time.parts, 0.0), hidden_by_axis={})
    assert _communication(nothing) == "none"


@pytest.mark.parametrize(
    ("case", "sizes", "rest"),
    [
        ("one device", "TP1 CP1 PP1 DP1", ""),
        ("PP4 VPP2, ZeRO-1, TP2 SP", "TP2+SP CP1 PP4x2 DP2", ""),
        ("CP2, a2a", "TP2+SP CP2 PP1 DP4", ""),
        ("TP2, tied, dropout", "TP2 CP1 PP1 DP2", ""),
        ("EP4, all-to-all", "TP1 CP1 PP1 DP16 EP4", ""),
        ("experts on one device", "TP1 CP1 PP1 DP1 EP1", ""),
        ("host memory", "TP1 CP1 PP1 DP8", ", optimizer in host memory"),
        ("FSDP2 in host memory", "TP1 CP1 PP1 DP8", ", weights and optimizer in host memory"),
    ],
)
def test_a_layout_is_named_by_its_sizes(case: str, sizes: str, rest: str) -> None:
    found = as_candidate(evaluate_config(config_of(CASES[case]), machine_of(CASES[case]), 1.0))
    assert name(found) == f"{sizes}, as given, recompute as given, micro batch 1{rest}"
    assert name(replace(found, recomputation="none", sharding="DDP")) == f"{sizes}, DDP, micro batch 1{rest}"


def test_what_fits_exactly_is_said_to_fit() -> None:
    found = as_candidate(evaluate_config(config_of(CASES["one device"]), machine_of(CASES["one device"]), 1.0))
    asked = question({"global_batch_size": 4}, Facts(), 1, Machine(hardware("h100")), 0.5)
    for usable, words in ((found.memory.total, "fits"), (found.memory.total - 1, "does not fit")):
        said = simpler([replace(found, recomputation="full")], replace(asked, usable_bytes=usable))
        assert said[1].startswith(f"    {'as given, recompute full':<24}{words}, 4.0 GB: ")
    assert simpler([found], asked)[1].startswith(f"    {'as given':<24}")


def test_why_the_first_is_first() -> None:
    case = CASES["one device"]
    found = as_candidate(evaluate_config(config_of(case), machine_of(case), 1.0))
    assert found.time is not None
    asked = question({"global_batch_size": 4}, Facts(), 1, Machine(hardware("h100")), 0.5)
    slower = {
        share: replace(found, time=replace(found.time, pp=found.seconds * share)) for share in (0.0009, 0.005, 0.02)
    }
    assert why([found], asked).endswith("% of its time is matrix products")
    assert why([found, slower[0.0009]], asked).endswith("is matrix products. 2 takes as long, and is less simple")
    assert ". 2 takes 0.5% longer: pp 0 s -> 0.000114" in why([found, slower[0.005]], asked)
    assert ". 2 takes 2.0% longer: pp 0 s -> 0.000456" in why([found, slower[0.02]], asked)
