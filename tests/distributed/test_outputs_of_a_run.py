"""One run of the whole program: its banner, its lines, the ranges of its trace, its tags, its last record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.program import Ended, run_program, tiny

OWN = """
    --micro-batch-size 2 --train-iters 3 --log-interval 1 --pipeline-model-parallel-size 2 --log-format short
    --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --cuda-graph-impl full_iteration
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    folder = tmp_path_factory.mktemp("run")
    where = ["--save", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]
    ranks = run_ranks(2, run_program, [*tiny(OWN), *where])
    assert [end.code for end in ranks] == [0, 0], ranks
    return folder, ranks


def test_the_banner_is_rank_0s_and_the_lines_are_the_last_ranks(ended: tuple[Path, list[Ended]]) -> None:
    _, (first, last) = ended
    assert "layout  TP 1 x PP 2 x CP 1 x DP 1\n" in first.output
    assert "to go   192 tokens in 12 sequences\n" in first.output
    assert "layout" not in last.output
    lines = [line.split("   ") for line in last.output.splitlines() if line.startswith("step ")]
    assert [line[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert [line[-1].endswith("left") for line in lines] == [True, True, False]
    assert lines[-1][-1] == "done"


def test_a_flag_that_is_about_speed_alone_is_taken_and_rank_0_says_what_becomes_of_it(
    ended: tuple[Path, list[Ended]],
) -> None:
    folder, (first, last) = ended
    said = "warning: --cuda-graph-impl full_iteration changes nothing here: steps run without CUDA graphs"
    assert (first.errors.count(said), last.errors.count(said)) == (1, 0)
    assert "--pipeline-model-parallel-size 2 (" in first.errors
    kept = (folder / "iter_0000003/config.yaml").read_text()
    assert "cuda_graph_impl: none\n" in kept


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trace_has_steps_with_their_forward_and_backward_passes(rank: int, ended: tuple[Path, list[Ended]]) -> None:
    events = json.loads((ended[0] / "profile" / f"rank{rank}.json").read_text())["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    named = {name: [event for event in ranges if event["name"] == name] for name in ("forward", "backward")}
    steps = sorted(event["name"] for event in ranges if event["name"].startswith("step "))
    assert steps == ["step 2", "step 3"]
    assert {name: len(found) for name, found in named.items()} == {"forward": 4, "backward": 4}
    [step] = [event for event in ranges if event["name"] == "step 2"]
    inside = [one for one in named["backward"] if step["ts"] <= one["ts"] < step["ts"] + step["dur"]]
    assert len(inside) == 2, "two microbatches a step"


def test_the_rate_is_among_tensorboards_tags(ended: tuple[Path, list[Ended]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(ended[0] / "tensorboard"))
    events.Reload()
    rates = [event.value for event in events.Scalars("tokens-per-second")]
    seconds = [event.value for event in events.Scalars("iteration-time")]
    assert [rate * second for rate, second in zip(rates, seconds, strict=True)] == pytest.approx([64] * 3)


def test_the_end_is_recorded(ended: tuple[Path, list[Ended]]) -> None:
    record = json.loads((ended[0] / "exit.json").read_text())
    assert (record["code"], record["rank"], record["iteration"]) == (0, 0, 3)
    assert record["message"] == "rank 0: done at iteration 3"


PROGRAM = """
from megatron_ext.forkserver.ranks import run_ranks
if __name__ == "__main__":
    print(run_ranks(2, abs, -1))
"""


# Slow: an interpreter and its fork server; tests of collector_freeze have the same of a small process.
@pytest.mark.slow
def test_who_asks_ranks_hears_nothing_of_their_servers_end(tmp_path: Path) -> None:
    """tools/parity.py ended with a page of what Triton's library had kept."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("[1, 1]\n", "")
    imports = [sys.executable, "-c", "import megatron_ext.forkserver.preload; raise SystemExit(3)"]
    assert subprocess.run(imports, env=environment, stderr=subprocess.DEVNULL, check=False).returncode == 3
