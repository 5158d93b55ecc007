"""One command makes a model of a folder of text, with everything that belongs to it."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.huggingface.saved_model import SavedModel
from megatron_ext.plugins.prepare.commands import new_run
from tests.support.warm_python import warm_python

# Of the second tier: its parts have tests of their own in tests/plugins/prepare.
pytestmark = pytest.mark.full

DOCS = Path(__file__).resolve().parents[4] / "docs"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some pages of text."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("glossary", "tour", "data", "symptoms"):
        shutil.copy(DOCS / f"{name}.md", folder / f"{name}.txt")
    return folder


def test_a_model_of_a_folder_of_text(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In almost no time: the smallest model and the fewest steps, and all parts of it; without the document that is
    bad, by Muon."""
    run = tmp_path / "mine"
    (text / "bad.jsonl").write_text('{"text": "good"}\n{"body": "of another key"}\n')
    monkeypatch.setattr(sys, "executable", warm_python(tmp_path / "bin")["PYTHON_EXEC"])
    words = [str(run), "--text", str(text), "--minutes", "0.01", "--device", "cpu", "--extensions", ".txt", ".jsonl"]
    assert new_run.main([*words, "--on-error", "skip", "--optimizer", "muon"]) == 0
    said, warned = capfd.readouterr()
    assert re.search(r"--minutes 0\.01 is too few for a training here: .* takes about [1-9]?\d\.\d minutes", warned)
    assert [line.split("] ")[1].split(":")[0] for line in said.splitlines() if line.startswith("== [")] == [
        f"{number}/7 {part}" for number, part in enumerate(new_run._PARTS, 1)
    ]
    values = yaml.safe_load((run / "run.yaml").read_text())
    assert (values["hidden_size"], values["train_iters"]) == (64, 20)
    assert (values["optimizer"], values["lr"], values["muon_nesterov"]) == ("muon", 8e-3, True)
    assert ", 1 left out" in warned
    assert (run / "hf/model.safetensors").is_file()
    assert (run / "checkpoints/exit.json").is_file()
    page = (run / "report.html").read_text()
    assert "4 layers of width 64" in page
    assert "muon, learning rate 0.008" in page
    assert '<span class="prompt">The</span>' in page, "a text after half of the steps"
    assert saved_iterations(run / "checkpoints")[-1] == 20, "however long they take"
    for command in ("generate --load", "pretrain --config", "new another-run", "compare"):
        assert f"<pre>megatron-ext {command} " in page.partition("<h2>Next</h2>")[2]
        assert f"\n  megatron-ext {command} " in said
    assert "largest difference of logits to transformers" in said
    assert said.count("\nvalidation loss  ") == 1
    assert re.search(r"== \[ *\d+ s, \d+ s over --minutes\] 7/7 the page", said)


def test_it_ends_in_time_and_an_unfinished_try_is_taken_up(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the steps that were measured are a thousand times as fast as those of the training."""
    run = tmp_path / "mine"
    words = [str(run), "--minutes", "0.01", "--device", "cpu", "--text"]
    monkeypatch.setattr(sys, "executable", warm_python(tmp_path / "bin")["PYTHON_EXEC"])
    monkeypatch.setattr(new_run._Making, "_steps", lambda self, shape, step, tokens: 20_000)
    assert new_run.main([*words, str(text)]) == 0
    assert "training is slower than was measured: it stops here" in capfd.readouterr().err
    assert yaml.safe_load((run / "run.yaml").read_text())["train_iters"] == 20_000
    [*_, stopped] = saved_iterations(run / "checkpoints")
    assert 0 < stopped < 20_000
    with pytest.raises(ConfigurationError, match="mine exists; name a folder that does not"):
        new_run.main([*words, str(text)])
    (run / "report.html").unlink()  # as where a later part has failed
    with pytest.raises(ConfigurationError, match="an unfinished training on other text than --text"):
        new_run.main([*words, str(text / "data.txt")])

    def fails(*_: object) -> None:
        raise SystemExit(74)

    with monkeypatch.context() as here:
        here.setattr(new_run._Making, "_part", fails)
        with pytest.raises(SystemExit):
            new_run.main([*words, str(text)])
    told = f"{run} has a checkpoint of iteration {stopped}: the same command again goes on from it"
    assert told in capfd.readouterr().err

    def is_interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as here:
        here.setattr(new_run._Making, "_part", is_interrupted)
        assert new_run.main([*words, str(text)]) == 128 + signal.SIGINT
    assert capfd.readouterr().err.strip().endswith(told)
    with pytest.raises(ConfigurationError, match="with --optimizer adam, and this command asks for --optimizer muon"):
        new_run.main([*words, str(text), "--optimizer", "muon"])
    with pytest.raises(ConfigurationError, match=r"--load .*mine holds no checkpoint; use .*mine/checkpoints, which d"):
        SavedModel(run)
    assert new_run.main([*words, str(text)]) == 0
    assert "4/7 training: going on from the newest checkpoint" in capfd.readouterr().out
    assert stopped < saved_iterations(run / "checkpoints")[-1] < 20_000
    assert (run / "report.html").exists()


def test_a_training_that_is_too_slow_goes_on_with_fewer_steps(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twenty thousand in the place of the steps that fit in half a minute."""
    run, flags = tmp_path / "mine", new_run._Making._flags
    monkeypatch.setattr(sys, "executable", warm_python(tmp_path / "bin")["PYTHON_EXEC"])
    monkeypatch.setattr(new_run, "SIZES", new_run.SIZES[:1])
    monkeypatch.setattr(new_run._Making, "_steps", lambda self, shape, step, tokens: 20_000)
    monkeypatch.setattr(
        new_run._Making, "_flags", lambda self, shape, steps: flags(self, shape, steps) | {"log_interval": 5}
    )
    assert new_run.main([str(run), "--text", str(text), "--minutes", "0.8", "--device", "cpu"]) == 0
    warned = capfd.readouterr().err
    told = re.search(r"the training goes on with ([\d,]+) steps in the place of 20,000", warned)
    assert told is not None, warned
    values = yaml.safe_load((run / "run.yaml").read_text())
    assert 20 < values["train_iters"] < 20_000
    assert values["override_opt_param_scheduler"]
    starts = [json.loads(line)["command"] for line in (run / "checkpoints/commands.jsonl").read_text().splitlines()]
    assert len(starts) > 1
    assert "--load" not in starts[0]
    assert "--load" in starts[1]
    if "it stops here" not in warned:  # and the machine did not become slower once more
        rows = [json.loads(line) for line in (run / "checkpoints/metrics.jsonl").read_text().splitlines()]
        last = [row for row in rows if "lm_loss" in row][-1]
        assert saved_iterations(run / "checkpoints")[-1] == values["train_iters"]
        assert last["learning_rate"] < 3e-4, "it has fallen to its end"


def test_commands_to_go_on_with_repeat_the_flags_and_name_a_new_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("another-run").mkdir()
    shown: list[str] = []
    monkeypatch.setattr(new_run._Making, "_tool", lambda self, *words, quiet=False: shown.extend(map(str, words)))
    monkeypatch.setattr(new_run._Making, "_train", lambda self, goes_on: None)
    monkeypatch.setattr(new_run._Making, "_planned", lambda self: "")
    Path("mine").mkdir()
    Path("mine/run.yaml").write_text("train_iters: 30\n")
    monkeypatch.setattr(new_run, "_require_unfinished", lambda run, files: None)
    monkeypatch.setattr(new_run._Making, "_require_the_same_training", lambda self: None)
    words = ["mine", "--text", str(text), "--minutes", "3", "--on-error", "skip", "--optimizer", "muon"]
    assert new_run.main([*words, "--extensions", ".txt"]) == 0
    following = shown[shown.index("--next") + 1 :]
    again = f"megatron-ext new another-run-2 --text {text} --minutes 6 --extensions .txt --on-error skip"
    assert following[2] == f"{again} --optimizer muon"
    assert following[3] == "megatron-ext compare mine/checkpoints another-run-2/checkpoints"
    assert "--train-iters 60 " in following[1]


def test_too_little_text_is_said_before_anything_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "line.txt").write_text("A line.\n")
    with pytest.raises(
        ConfigurationError, match=r"line\.txt has \d tokens, and the smallest model here needs 128: give"
    ):
        new_run.main([str(tmp_path / "mine"), "--text", str(tmp_path / "line.txt"), "--device", "cpu"])
    assert "nothing had been trained: " in capfd.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_a_try_that_fails_leaves_no_folder(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And each flag that its error names is a flag here."""
    (text / "a.jsonl").write_text('{"body": "of another key"}\n')
    with pytest.raises(SystemExit) as ended:
        new_run.main([str(tmp_path / "mine"), "--text", str(text), "--minutes", "0.01", "--device", "cpu"])
    assert ended.value.code == 65
    assert not (tmp_path / "mine").exists()
    named = set(re.findall(r"--[a-z-]+", capfd.readouterr().err))
    assert "--json-keys" in named
    with pytest.raises(SystemExit):
        new_run.main(["--help"])
    assert named <= set(re.findall(r"--[a-z-]+", capfd.readouterr().out))


def test_a_try_that_is_stopped_leaves_no_folder(text: Path, tmp_path: Path) -> None:
    """A scheduler or `timeout` ends it by SIGTERM; the same command then begins anew."""
    run = tmp_path / "mine"
    command = [sys.executable, "-m", "megatron_ext", "new", str(run), "--text", str(text), "--device", "cpu"]
    with subprocess.Popen(command) as trying:
        end = time.monotonic() + 60
        while not run.exists():
            assert trying.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        trying.terminate()
        assert trying.wait(60) == 128 + signal.SIGTERM
    assert not run.exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["here", "--text", "text"], "here exists; name a folder that does not"),
        (["new", "--text", "nowhere"], "nowhere"),
        (["new", "--text", "text", "--minutes", "0"], "--minutes 0.0 must be above 0"),
    ],
)
@pytest.mark.usefixtures("text")
def test_what_cannot_be_begun_is_refused_and_makes_nothing(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ConfigurationError, match=problem):
        new_run.main(words)
    assert not (tmp_path / "new").exists()
