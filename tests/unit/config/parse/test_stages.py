"""--stages: what the file may say, and what is refused before the start."""

from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.commands.plan import main as plan
from megatron_ext.train.configure import configure
from tests.support.small_runs import MODEL


def _problems(tmp_path: Path, text: str, *flags: str) -> list[str]:
    path = tmp_path / "stages.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        configure([*MODEL, "--stages", str(path), "--save", str(tmp_path / "save"), *flags])
    return [problem.replace(str(tmp_path), "DIR") for problem in caught.value.problems]


WRONG = {
    "": "--stages DIR/stages.yaml has 0 stages; give 1 to 64",
    "a: {seq_length: 4}": "--stages DIR/stages.yaml: expected lines of the form `1000: {seq_length: 8192",
    "2: 32": "--stages DIR/stages.yaml: 2 is no stage",
    "-2: {seq_length: 4}": "--stages DIR/stages.yaml: -2 is no stage",
    "2: {hidden_size: 64}": "--stages DIR/stages.yaml, from iteration 2: hidden_size: a stage cannot change it; it can",
    "2: {seq_length: long}": "--stages DIR/stages.yaml, from iteration 2: seq_length: 'long' is not an integer",
    "2: {seq_length: 0}": "--stages DIR/stages.yaml, from iteration 2: --seq-length 0 ",
    "2: {data_path: none}": "--stages DIR/stages.yaml, from iteration 2: ",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named_with_file_stage_and_key(text: str, tmp_path: Path) -> None:
    assert _problems(tmp_path, text)[0].startswith(WRONG[text])


def test_every_stage_has_to_suit_the_layout(tmp_path: Path) -> None:
    flags = ["--context-parallel-size", "2", "--world-size", "2", "--dry-run"]
    text = "1: {seq_length: 32}\n2: {seq_length: 18}"
    problems = _problems(tmp_path, text, *flags)
    assert problems
    assert all(problem.startswith("--stages DIR/stages.yaml, from iteration 2: ") for problem in problems)
    assert "--seq-length 18" in problems[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-save-optim"], "with --no-save-optim: no stage could go on from another"),
        (["--step-batch-size-schedule", "0:2 64:4"], "--step-batch-size-schedule, whose thresholds in tokens move"),
    ],
)
def test_what_a_stage_goes_on_from(flags: list[str], words: str, tmp_path: Path) -> None:
    assert any(words in problem for problem in _problems(tmp_path, "2: {seq_length: 32}", *flags))


def test_the_largest_stage_is_judged_by_a_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text("1: {seq_length: 64}\n2: {seq_length: 32}\n9: {rotary_base: 7}")
    flags = [*MODEL, "--stages", str(path), "--save", str(tmp_path)]
    judged = configure([*flags, "--dry-run"])
    assert judged.config.model.seq_length == 64
    assert any("from iteration 1: this stage, the largest, is" in text for text in judged.typed.warnings)
    assert any("from iteration 9: the run ends before, after 3 it" in text for text in judged.typed.warnings)
    begun = configure(flags)
    assert (begun.config.model.seq_length, begun.stage_end) == (16, 1)


def test_the_planner_judges_the_largest_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text("1: {seq_length: 64}\n2: {seq_length: 32}")
    plan(["--world-size", "1", "--device", "h100", "--evaluate", "--", *MODEL, "--stages", str(path)])
    staged = capsys.readouterr().out
    plan(["--world-size", "1", "--device", "h100", "--evaluate", "--", *MODEL, "--seq-length", "64"])
    assert staged == capsys.readouterr().out
