"""What limits a layout, against searches with other devices, and flags of the planner that it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts
from megatron_ext.cost.hardware import Machine, hardware
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner import sensitivity
from megatron_ext.plugins.planner.commands import plan
from megatron_ext.plugins.planner.commands import plan as plan_cli
from megatron_ext.plugins.planner.search import Question, search
from megatron_ext.plugins.planner.search_input import question

TOOL = Path(__file__).parents[3] / "tools" / "plan.py"
FLAGS = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16 "
    "--global-batch-size 64 --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 "
    "--position-embedding-type rope --pipeline-model-parallel-size 1 --use-distributed-optimizer"
)


def asked(world_size: int = 8, **given: float) -> Question:
    machine = Machine(hardware("h100", **given), gpus_per_node=8, efficiency=0.5, link_efficiency=0.8)
    return question(parse(FLAGS.split()).values, Facts(), world_size, machine, memory_share=0.92)


def test_limits_are_the_times_with_other_devices() -> None:
    wanted = asked()
    best = search(wanted, 3).best
    found = {limit.part: limit for limit in sensitivity.limits(wanted, best)}
    assert set(found) == {*sensitivity.PARTS, sensitivity.MEMORY}
    devices = wanted.machine.devices
    faster = asked(**{name: 1.1 * getattr(devices, name) for name in sensitivity.PARTS["matrix products"]})
    again = {str(candidate.choice): candidate.seconds for candidate in search(faster, 50).best}
    change = again[str(best[0].choice)] / best[0].seconds - 1
    assert found["matrix products"].faster == pytest.approx(change, rel=1e-9)
    assert found["matrix products"].faster < -0.03
    for part in sensitivity.PARTS:
        assert found[part].faster <= 0.0 <= found[part].slower
    # All that is fast is one of them: together they make the step a tenth faster.
    together = sum(found[part].slower for part in sensitivity.PARTS)
    assert together == pytest.approx(1 / 0.9 - 1, rel=0.1)


def run(folder: Path, words: str) -> tuple[list[str], dict[str, Any]]:
    arguments = [sys.executable, str(TOOL), "--world-size", "8", "--json", str(folder / "plan.json"), *words.split()]
    done = subprocess.run([*arguments, "--", *FLAGS.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines(), json.loads((folder / "plan.json").read_text())


def test_flags_reach_the_question() -> None:
    words = "--world-size 8 --memory-share 0.5 --processor-cores 7"
    options = plan_cli._parser().parse_args(words.split())
    found = plan_cli._question(options, parse(FLAGS.split()), 8)
    assert found.usable_bytes == pytest.approx(0.5 / 0.92 * asked().usable_bytes)
    assert found.machine.constants.cores == 7


def test_the_tool_says_what_limits_the_first_layout(tmp_path: Path) -> None:
    lines, found = run(tmp_path, "--limits")
    assert any(line.startswith("what limits 1 (") for line in lines)
    assert found["limits"][0]["faster"] < 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "15T"], "--tokens was removed: multiply the seconds a step that --json - has by the steps"),
        (["--mtbf-hours=9"], "--mtbf-hours was removed"),
        (["--over-devices", "8", "16"], "--over-devices was removed: run the planner for each --world-size"),
        (["--efficiency", "1.5"], "--efficiency 1.5 is above 1, a share of the whole"),
        (["--link-efficiency", "1.5"], "--link-efficiency 1.5 is above 1, a share of the whole"),
        (["--memory-share", "1.5"], "--memory-share 1.5 is above 1, a share of the whole"),
    ],
)
def test_wrong_values_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan.main(["--world-size", "8", *words, "--", *FLAGS.split()])


def test_a_question_is_not_changed_by_another_memory() -> None:
    wanted = asked()
    sensitivity.limits(wanted, search(wanted, 1).best)
    assert wanted == replace(asked(), facts=wanted.facts)
