"""tools/replay_step.py: one process takes the steps of a layout again, and finds one that was recorded otherwise."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prove.commands.replay_step import main
from tests.support.program import run_program, tiny

FLAGS = tiny("""
    --hidden-dropout 0 --attention-dropout 0 --eval-interval 2 --eval-iters 1 --lr-warmup-iters 5 --train-iters 6
    --save-interval 3 --log-interval 2 --clip-grad 0.5 --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer
""")


def _replay(commands: list[list[str]]) -> list[tuple[int, str]]:
    found = []
    for words in commands:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = main(words)
        found.append((code, output.getvalue()))
    return found


def test_a_step_of_a_layout_is_repeated_by_one_process(tmp_path: Path) -> None:
    save = tmp_path / "run"
    assert {ended.code for ended in run_ranks(2, run_program, [*FLAGS, "--save", str(save)])} == {0}
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["iteration"] == 6 and "lm_loss" in row:
            row["grad_norm"] *= 1.0 + 1e-5
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = str(save)
    changed = [folder, "6", "--metrics", str(wrong)]
    asked = [[folder, "6"], changed, [*changed, "--tolerance", "1e-4"], [folder, "2"], [folder, "5"]]
    [(good, other, tolerated, first, unlogged)] = run_ranks(1, _replay, asked)

    assert good[0] == 0, good[1]
    assert "one process, from iteration 3\n" in good[1]
    lines = {int(line.split()[0]): line.split() for line in good[1].splitlines()[2:-1]}
    assert list(lines) == [4, 5, 6]
    assert lines[6][1] == "20-23"
    recorded = next(row for row in rows if row["iteration"] == 4 and "lm_loss" in row)
    assert float(lines[4][3]) == float(f"{recorded['lm_loss']:.9g}"), "a mean of two steps, one of before the save"
    assert abs(float(lines[4][2]) / recorded["lm_loss"] - 1.0) < 1e-6
    assert lines[5][3] == "-", "a step that was not logged"

    assert other[0] == 1
    found = re.search(r"step 6 IS NOT AS the run recorded it: (\S+) away, tolerance 1e-06", other[1])
    assert found is not None, other[1]
    assert float(found[1]) == pytest.approx(1e-5, rel=0.1)  # what was planted, and the rounding of the layout
    assert tolerated[0] == 0, tolerated[1]
    assert first[0] == 0, "from the seed"
    assert "one process, from iteration 0\n" in first[1]
    assert unlogged[0] == 1
    assert "no row of step 5" in unlogged[1]
