"""tools/make_schedule.py: a file for --pipeline-schedule from times that are given or recorded."""

import json
from pathlib import Path

import pytest

from megatron_ext.cli.make_schedule import main
from megatron_ext.config.derived.pipeline_table import flaws
from megatron_ext.errors import ConfigurationError
from megatron_ext.untrusted.schedule_csv import read_schedule


def test_the_file_is_a_schedule_of_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "table.csv", tmp_path / "page.html"
    assert main(f"--stages 4 --microbatches 8 --memory 4 --output {file} --html {page}".split()) == 0
    assert list(flaws(read_schedule(str(file)), 4, 2, 8, v_shaped=True)) == []
    said = capsys.readouterr().out
    assert said.rstrip().endswith("The busiest rank waits 6.2% of the time that it works; most held: 4 microbatches.")
    assert "<svg" in page.read_text()


@pytest.mark.parametrize(
    "change", ["--forward-ms 2", "--inputs-ms 2", "--weights-ms 2", "--send-ms 1", "--memory 2", "--loop", "--chunks 3"]
)
def test_each_flag_changes_the_schedule(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for words in ("", change):
        main(f"--stages 3 --microbatches 6 --width 90 {words}".split())
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]


def test_times_of_a_recorded_run_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second stage is three times as slow, and whole backward passes count half and half."""
    for rank, slow in enumerate((1.0, 3.0)):
        place = {"rank": rank, "world_size": 2, "stage": rank, "stages": 2, "chunks": 1, "microbatch_group_size": 1}
        step = {"ph": "X", "cat": "step", "ts": 0, "dur": 9e6, "args": {"iteration": 1}}
        passes = [
            {
                "ph": "X",
                "cat": "pass",
                "ts": 1e6 * (microbatch + 4 * back),
                "dur": 2.1e3 * slow * (1 + back),
                "args": {"iteration": 1, "forward": not back, "chunk": 0, "microbatch": microbatch},
            }
            for back in (0, 1)
            for microbatch in range(4)
        ]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"schedule": place, "traceEvents": [step, *passes]}))
    assert main(f"--run {tmp_path} --microbatches 4 --width 90".split()) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("stage ")]
    assert [row[2:6] for row in rows[-2:]] == [["2.1", "ms", "4.2", "ms"], ["6.3", "ms", "12.6", "ms"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--microbatches 4", "give --stages N or --run DIR"),
        ("--stages 1 --microbatches 4", "there must be two stages"),
        ("--stages 2 --microbatches 4 --memory 0.5", "--memory 0.5"),
        ("--stages 2 --microbatches 4 --weights-ms 0", "--weights-ms 0 is no time"),
    ],
)
def test_what_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        main(words.split())
