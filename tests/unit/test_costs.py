"""What a run costs, how it scales and what limits it: against simulated failures, and the planner itself."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.cli import plan as plan_cli
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan import economics, limits, scaling
from megatron_ext.plan.costs import Prices, cost, count_of_tokens
from megatron_ext.plan.goodput import LLAMA_3_HOURS, Failures, daly, goodput, useful_share, young
from megatron_ext.plan.hardware import Machine, hardware
from megatron_ext.plan.question import question
from megatron_ext.plan.search import Question, search
from tools import plan

TOOL = Path(__file__).parents[2] / "tools" / "plan.py"
FLAGS = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16 "
    "--global-batch-size 64 --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 "
    "--position-embedding-type rope --pipeline-model-parallel-size 1 --use-distributed-optimizer"
)


def asked(world_size: int = 8, **given: float) -> Question:
    machine = Machine(hardware("h100", **given), gpus_per_node=8, efficiency=0.5, link_efficiency=0.8)
    return question(parse(FLAGS.split()).values, Facts(), world_size, machine, memory_share=0.92)


def simulated_share(interval: float, failures: Failures, devices: int, work: float, seed: int) -> float:
    """Train for `work` useful seconds with failures from an exponential distribution; return the share of the time."""
    draw, between = random.Random(seed), failures.seconds_between(devices)
    clock, done = 0.0, 0.0
    fails = draw.expovariate(1.0 / between)
    while done < work:
        end = clock + interval + failures.stall
        if end <= fails:
            clock, done = end, done + interval
            continue
        # A restart may fail as well, and begins once more then.
        clock = fails
        while (fails := clock + draw.expovariate(1.0 / between)) < clock + failures.restart:
            clock = fails
        clock += failures.restart
    return done / clock


@pytest.mark.parametrize(("stall", "restart"), [(5.0, 300.0), (60.0, 900.0), (400.0, 1800.0)])
@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_the_useful_share_is_that_of_simulated_failures(stall: float, restart: float, factor: float) -> None:
    failures = Failures(device_hours=50_000.0, stall=stall, restart=restart)
    interval = factor * daly(stall, failures.seconds_between(16384))
    simulated = simulated_share(interval, failures, 16384, work=1e8, seed=7)
    assert useful_share(interval, failures, 16384) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(("stall", "between"), [(1.0, 1e4), (30.0, 1e4), (600.0, 1e4), (3000.0, 1e4)])
def test_dalys_interval_is_the_best_and_youngs_nearly(stall: float, between: float) -> None:
    failures = Failures(between / 3600.0, stall, restart=0.0)
    shares = {
        interval: useful_share(interval, failures, 1) for interval in (between * k / 2000 for k in range(1, 4000))
    }
    best = max(shares, key=lambda interval: shares[interval])
    assert daly(stall, between) == pytest.approx(best, rel=0.02, abs=between / 2000)
    assert useful_share(daly(stall, between), failures, 1) >= 0.9999 * shares[best]
    assert young(stall, between) == math.sqrt(2 * stall * between)


def test_a_stall_longer_than_two_failures_apart() -> None:
    assert daly(200.0, 100.0) == 100.0


def test_llama_3s_failures() -> None:
    """54 days on 16,384 GPUs had an interruption every three hours; more than 90% of the time was useful."""
    good = goodput(Failures(LLAMA_3_HOURS, stall=5.0, restart=600.0), 16384)
    assert good.seconds_between / 3600 == pytest.approx(54 * 24 / 419)
    assert 0.90 < good.share < 0.95


def test_the_cost_is_the_product_of_its_parts() -> None:
    never = Failures(device_hours=1e15, stall=1e-6, restart=0.0)
    found = cost(10**12, 4 * 10**6, 10.0, 1024, never, Prices(2.0, 700.0))
    assert found.steps == 250_000
    assert found.days == pytest.approx(250_000 * 10 / 86400, rel=1e-3)
    assert found.device_hours == pytest.approx(found.days * 24 * 1024)
    assert found.dollars == pytest.approx(2 * found.device_hours)
    assert found.kilowatt_hours == pytest.approx(0.7 * found.device_hours)
    assert cost(10**12 + 1, 4 * 10**6, 10.0, 8, never, Prices()).steps == 250_001


@pytest.mark.parametrize(
    ("text", "number"),
    [("15T", 15 * 10**12), ("1.5e12", 1_500_000_000_000), ("300B", 3 * 10**11), ("2_000", 2000), ("0.5M", 500_000)],
)
def test_numbers_of_tokens(text: str, number: int) -> None:
    assert count_of_tokens(text) == number


@pytest.mark.parametrize("text", ["", "T", "15t", "-3B", "0", "1e99", "nan", "1e400T"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write for example 300B"):
        count_of_tokens(text)


def test_limits_are_the_times_with_other_devices() -> None:
    wanted = asked()
    best = search(wanted, 3).best
    found = {limit.part: limit for limit in limits.limits(wanted, best)}
    assert set(found) == {*limits.PARTS, limits.MEMORY}
    devices = wanted.machine.devices
    faster = asked(**{name: 1.1 * getattr(devices, name) for name in limits.PARTS["matrix products"]})
    again = {str(candidate.choice): candidate.seconds for candidate in search(faster, 50).best}
    change = again[str(best[0].choice)] / best[0].seconds - 1
    assert found["matrix products"].faster == pytest.approx(change, rel=1e-9)
    assert found["matrix products"].faster < -0.03
    for part in limits.PARTS:
        assert found[part].faster <= 0.0 <= found[part].slower
    # All that is fast is one of them: together they make the step a tenth faster.
    together = sum(found[part].slower for part in limits.PARTS)
    assert together == pytest.approx(1 / 0.9 - 1, rel=0.1)


def test_scaling_is_the_search_at_each_number() -> None:
    wanted = scaling.Wanted(tokens=10**12)
    points = scaling.over_devices(asked(), [8, 16], wanted)
    for point in points:
        own = search(asked(point.number), 1).best[0]
        assert point.best is not None
        assert (point.best.choice, point.best.seconds) == (own.choice, own.seconds)
        assert point.tokens_per_second == 64 * 2048 / own.seconds
        assert point.cost is not None
        assert point.cost.device_hours == pytest.approx(24 * point.cost.days * point.number)
    lengths = scaling.over_lengths(asked(), [1024, 4096, 10**6], wanted)
    tokens = [point.step_tokens for point in lengths if point.best is not None]
    assert tokens[:2] == [64 * 2048] * 2


def test_what_does_not_fit_is_said_in_the_table() -> None:
    points = scaling.over_devices(asked(memory_gb=0.2), [8], scaling.Wanted())
    assert scaling.table(points, "devices")[1].endswith("nothing fits")
    points = scaling.over_devices(asked(), [7], scaling.Wanted())
    assert scaling.table(points, "devices")[1].endswith("no layout is legal with a global batch of 64")


def run(folder: Path, words: str) -> tuple[list[str], dict[str, Any]]:
    arguments = [sys.executable, str(TOOL), "--world-size", "8", "--json", str(folder / "plan.json"), *words.split()]
    done = subprocess.run([*arguments, "--", *FLAGS.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines(), json.loads((folder / "plan.json").read_text())


def test_flags_reach_the_question() -> None:
    words = "--world-size 8 --memory-share 0.5 --processor-cores 7 --restart-minutes 2 --mtbf-hours 9 --stall 4"
    options = plan_cli._parser().parse_args(words.split())
    found = plan_cli._question(options, parse(FLAGS.split()), 8)
    assert found.usable_bytes == pytest.approx(0.5 / 0.92 * asked().usable_bytes)
    assert found.machine.constants.cores == 7
    best: Any = SimpleNamespace(memory=SimpleNamespace(weights=0.0, optimizer=0.0))
    assert economics._wanted(found, best, options).failures == Failures(9.0, 4.0, 120.0)


def test_the_tool_says_all_of_it(tmp_path: Path) -> None:
    page = tmp_path / "scaling.html"
    words = (
        "--tokens 1T --dollars-per-hour 2 --watts 1000 --stall 4 --limits --over-devices 8 4 --over-seq-lengths 4096"
    )
    lines, found = run(tmp_path, f"{words} --html {page}")
    text = "\n".join(lines)
    assert found["cost"]["tokens"] == 10**12
    assert found["cost"]["dollars"] == pytest.approx(2 * found["cost"]["device_hours"])
    assert f"${found['cost']['dollars']:,.0f}" in text
    assert "a checkpoint stops training for 4 s" in text
    assert "what limits 1 (" in text
    assert [row["number"] for row in found["over_devices"]] == [4, 8]
    assert found["over_devices"][1]["step_seconds"] == found["best"][0]["seconds"]["total"]
    assert [row["number"] for row in found["over_sequence_length"]] == [4096]
    assert page.read_text().count("<svg") == 8
    assert "http" not in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "many"], "no number of tokens"),
        (["--over-devices", "0"], "--over-devices 0 is not above 0"),
        (["--html", "x.html"], "--over-devices or --over-seq-lengths"),
        (["--mtbf-hours", "0"], "--mtbf-hours 0"),
        (["--efficiency", "1.5"], "--efficiency 1.5 is above 1, a share of the whole"),
        (["--link-efficiency", "1.5"], "--link-efficiency 1.5 is above 1, a share of the whole"),
        (["--memory-share", "1.5"], "--memory-share 1.5 is above 1, a share of the whole"),
        (["--watts", "700"], "--watts is part of what a whole run costs; add --tokens"),
    ],
)
def test_wrong_values_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan.main(["--world-size", "8", *words, "--", *FLAGS.split()])


def test_a_question_is_not_changed_by_another_memory() -> None:
    wanted = asked()
    limits.limits(wanted, search(wanted, 1).best)
    assert wanted == replace(asked(), facts=wanted.facts)
