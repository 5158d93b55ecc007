"""What the planner says: units, names of layouts, and why the first is first."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts
from megatron_ext.cost.hardware import Machine, hardware
from megatron_ext.cost.memory import MemoryEstimate
from megatron_ext.plugins.planner.layout_evaluation import _alike, _communication, as_candidate, evaluate_config
from megatron_ext.plugins.planner.plan_report import _gb, name, simpler, why
from megatron_ext.plugins.planner.search_input import question
from megatron_ext.plugins.planner.timeline import duration, size
from tests.support.planner_numbers import CASES, config_of, machine_of


def test_times_and_sizes_change_their_unit_at_its_bound() -> None:
    assert [duration(seconds) for seconds in (0.0, 1.0, 0.9994, 0.001, 0.0009994, 75.25, 999.0, 1000.0)] == [
        "0 us", "1 s", "999 ms", "1 ms", "999 us", "75.2 s", "999 s", "1,000 s",
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
