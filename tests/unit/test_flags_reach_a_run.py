"""Every flag of the tools for a model, a run and its launch arrives at the parameter that it is meant for."""

import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.cli import compare_runs, generate, generate_sample, parity, show_run, tasks
from megatron_ext.cli import doctor as cli_doctor
from megatron_ext.config.parse.eval_tasks import EvalTask
from megatron_ext.doctor import collectives, flight_recorder
from megatron_ext.doctor.finding import Launch, error, ok, warning
from megatron_ext.errors import ConfigurationError
from megatron_ext.inference import leader
from megatron_ext.inference import tasks as inference_tasks
from megatron_ext.inference.sampling import Sampling
from megatron_ext.parallel import groups
from megatron_ext.train import configure as train_configure
from megatron_ext.train import replay as train_replay
from megatron_ext.train import trained_model
from tests.support.command_lines import line_of, main_of
from tests.support.requests import Requests
from tests.support.small_models import small_config


def _model(rank: int = 0) -> Any:
    config = small_config(training={"micro_batch_size": 3})
    return SimpleNamespace(rank=rank, config=config, iteration=70, tokenizer="tokenizer")


@pytest.fixture
def trained(requests: Requests) -> Requests:
    """The stand-ins of what loads a model."""
    requests.take(trained_model, "configure_trained", "configured")
    requests.take(trained_model, "load_trained", _model())
    requests.take(groups, "destroy")
    return requests


def test_tasks(trained: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).touch()
    listed = [EvalTask("one", "LAMBADA", ("a.jsonl",)), EvalTask("two", "LAMBADA", ("b.jsonl",))]
    trained.take(tasks, "read_eval_tasks", listed)
    trained.take(tasks, "_write")
    trained.take(inference_tasks, "evaluate_task", {"loss": 2.5})
    harness = SimpleNamespace(evaluate=lambda *given: {"arc": {"given": given}})  # the module needs lm_eval
    monkeypatch.setattr(tasks, "table", lambda results: "")
    monkeypatch.setitem(sys.modules, "megatron_ext.inference.harness", harness)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "lm_eval")
    monkeypatch.setattr(
        leader, "Leader", lambda model: SimpleNamespace(close=lambda: trained.made.append(("close", {})))
    )
    asked = [
        [EvalTask("lambada", "LAMBADA", ("a.jsonl", "b.jsonl"), None, True)],
        [EvalTask("perplexity", "PERPLEXITY", ("a.jsonl",), 5, False)],
        listed,
    ]
    for number, wanted in enumerate(asked):
        trained.made.clear()
        assert tasks.main(line_of("tasks", number)) == 0
        made = dict(trained.made)
        assert made["configure_trained"] == {"argv": ["--micro-batch-size", "8", "--load", "ckpt"]}
        assert made["load_trained"] == {"argv": "configured"}
        evaluated = [given for name, given in trained.made if name == "evaluate_task"]
        assert [{**given, "model": None} for given in evaluated] == [
            {"model": None, "task": task, "rows": 3} for task in wanted
        ]
        assert made.get("read_eval_tasks") == ({"path": "tasks.yaml"} if number == 2 else None)
        written = {"lambada": {"loss": 2.5}} if number == 0 else None
        assert (made["_write"]["path"], made["_write"]["results"]) == ("out.json", written) if written else True
        assert ("_write" in made) == (number == 0)
        assert trained.made[-1] == ("destroy", {})
    trained.made.clear()
    options = tasks._parser().parse_args(line_of("tasks", 3)[:-2])
    assert tasks._tasks(options) == []
    found: Any = tasks._harness(_model(), options)["arc"]["given"]
    assert found[1:] == (["arc", "boolq"], 3, "folder", 0, 70)
    assert trained.made == [("close", {})]


def test_what_follows_the_first_rank(trained: Requests) -> None:
    """Only rank 0 leads, prints and writes; the others follow it, and have no results."""
    trained.take(leader, "follow")
    trained.take(leader, "Leader")
    trained.take(trained_model, "load_trained", _model(1))
    trained.take(tasks, "_own", {"a": {"b": 1.0}})
    trained.take(tasks, "_write")
    Path("a.jsonl").touch()
    assert tasks.main(["--task", "LAMBADA", "--valid-data", "a.jsonl", "--results", "out.json"]) == 0
    assert [name for name, _ in trained.made] == ["configure_trained", "load_trained", "_own", "destroy"]
    trained.made.clear()
    assert tasks._harness(_model(1), None) == {}
    assert [name for name, _ in trained.made] == ["follow"]
    trained.made.clear()
    assert generate.main(["--prompts", "one", "--load", "ckpt"]) == 0
    assert [name for name, _ in trained.made] == ["configure_trained", "load_trained", "follow", "destroy"]


def test_generate(trained: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [SimpleNamespace(text=text, tokens=[1, 2], reason="stop") for text in ("two", "four")]
    asked: list[Any] = []

    class Leader:
        def __init__(self, model: Any):
            self.model = model

        def generate(self, *given: Any) -> Any:
            asked.append(given)
            return made

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr(leader, "Leader", Leader)
    trained.take(generate, "encoder", lambda prompt: [len(prompt)])
    trained.take(generate, "_answer_streaming", made[0])
    assert generate.main(line_of("generate")) == 0
    sampling = Sampling(0.7, 11, 0.9, 0.2, 1.3, 21, 5, ("END", "STOP"), True)
    assert asked == [([[3], [5]], sampling, 6), "closed"]
    assert dict(trained.made)["configure_trained"] == {"argv": ["--load", "ckpt"]}
    assert trained.of("encoder")["template"] == "chatml"
    assert Path("made.jsonl").read_text().splitlines() == [
        '{"prompt": "one", "text": "two", "tokens": [1, 2], "reason": "stop"}',
        '{"prompt": "three", "text": "four", "tokens": [1, 2], "reason": "stop"}',
    ]
    trained.made.clear()
    Path("prompts.txt").write_text("from a file\n")
    assert generate.main(line_of("generate", 1)) == 0
    answered = trained.of("_answer_streaming")
    assert (answered["prompt"], answered["sampling"], "number" in answered) == ("from a file", Sampling(), False)
    assert trained.of("encoder")["template"] is None
    for flags in (
        "--prompts a --prompt-file prompts.txt",
        "--prompt-file nowhere.txt",
        "--prompts a --max-batch-size 0",
    ):
        with pytest.raises(ConfigurationError):
            generate.main(shlex.split(flags))


def test_sample(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("folder/config.json").touch()
    requests.take(generate_sample, "sample", "the text")
    assert generate_sample.main(line_of("sample")) == 0
    wanted = {"folder": "folder", "prompt": "if", "count": 5, "temperature": 0.0, "seed": 21}
    assert requests.made == [("sample", wanted)]
    assert capsys.readouterr().out == "the text\n"
    for wrong in ("--max-new-tokens 0", "--temperature -0.1", "--model elsewhere"):
        with pytest.raises(ConfigurationError):
            generate_sample.main(["--model", "folder", *wrong.split()])


def test_show(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").mkdir()
    requests.take(show_run, "read_history", "history")
    requests.take(show_run, "loss_chart", "chart")
    requests.take(show_run, "summary", ["line"])
    requests.take(show_run, "runs_page", "page of both")
    requests.take(show_run, "run_page", "page of one")
    requests.take(show_run, "_pipeline", "pipeline")
    assert show_run.main(line_of("show")) == 0
    assert [given["run"] for name, given in requests.made if name == "read_history"] == [Path("a"), Path("b")]
    assert requests.of("runs_page") == {"runs": {"a": "history", "b": "history"}}
    assert Path("page.html").read_text() == "page of both"
    shown = "== {}\nchart\n\nline\n"
    assert capsys.readouterr().out == f"{shown.format('a')}\n{shown.format('b')}page             page.html\n"
    assert show_run.main(line_of("show", 1)) == 0
    assert requests.of("run_page") == {"history": "history", "title": "a", "pipeline": "pipeline"}
    assert requests.of("_pipeline") == {"run": Path("a")}
    assert Path("page.html").read_text() == "page of one"


@pytest.mark.parametrize(("second", "code"), [([{"iteration": 1}], 0), ([{"iteration": 2}], 1), ([], 1)])
def test_compare(second: list[Any], code: int, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"a.jsonl": [{"iteration": 1}], "b.jsonl": second}
    monkeypatch.setattr(compare_runs, "read_rows", lambda path, *_, **__: rows[path])
    assert compare_runs.main(line_of("compare")) == code


def test_replay_step(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    step = train_replay.Step(7, range(16, 20), 3.0, 1.0, 2.0, 1.0)  # half of 2.0 away
    requests.take(train_replay, "replay", train_replay.Replayed(small_config(), 3, [step], []))
    main = main_of("replay-step")
    assert main(line_of("replay-step")) == 0
    assert requests.made == [
        ("replay", {"folder": Path("run"), "step": 7, "metrics": Path("m.jsonl"), "device": "cuda"}),
    ]
    assert capsys.readouterr().out.endswith("away, tolerance 0.5\n")
    assert main(["run", "7", "--tolerance", "0.1"]) == 1
    assert requests.made[-1] == ("replay", {"folder": Path("run"), "step": 7, "metrics": None, "device": "cpu"})


@pytest.mark.parametrize(("difference", "code"), [(None, 0), ("something", 1)])
def test_parity(difference: str | None, code: int, requests: Requests) -> None:
    proof = SimpleNamespace(first_difference=lambda: difference)
    both = SimpleNamespace(world_size=8)
    requests.take(parity, "comparison", both)
    requests.take(parity, "_start_device")
    requests.take(parity, "prove", proof)
    requests.take(parity, "report", "the report")
    assert parity.main(line_of("parity")) == code
    flags = {"argv": ["--num-layers", "2"], "world_size": 6}
    assert requests.of("comparison") == flags
    assert requests.of("_start_device") == {"kind": "cuda", "ranks": 8}
    assert requests.of("prove") == {**flags, "steps": 5, "tolerance": 0.25, "device": "cuda"}
    assert requests.of("report") == {"both": both, "proof": proof}


def test_doctor(requests: Requests, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("SLURM_NNODES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    findings = [ok("one"), warning("two", "", ""), error("three", "", "", 74), error("four", "", "", 65)]
    requests.take(train_configure, "configure", SimpleNamespace(config="config"))
    requests.take(cli_doctor, "examine", findings)
    requests.take(cli_doctor, "_gpus", 7)
    requests.take(collectives, "check_collectives", [ok("fast")])
    requests.take(flight_recorder, "read_dumps", "dumps")
    requests.take(flight_recorder, "explain", ["explained"])
    assert cli_doctor.main(line_of("doctor")) == 74, "the exit code of the first error"
    assert requests.made == [
        ("configure", {"argv": ["--num-layers", "2", "--world-size", "15", "--dry-run"]}),
        ("examine", {"launch": Launch(os.environ, 3, 5, "config")}),  # pyright: ignore[reportArgumentType]
    ]
    assert capsys.readouterr().out.splitlines()[-1] == "2 errors, 1 warnings"
    requests.made.clear()
    assert cli_doctor.main(line_of("doctor", 1)) == 0
    assert requests.made == [("check_collectives", {"kind": "cpu", "seconds": 7.0, "megabytes": 11.0})]
    requests.made.clear()
    assert cli_doctor.main(line_of("doctor", 2)) == 0
    assert requests.made == [("read_dumps", {"folder": Path("hang-7")}), ("explain", {"dumps": "dumps"})]
    assert capsys.readouterr().out == "ok       fast\nexplained\n"


@pytest.mark.parametrize(
    ("flags", "here", "machines", "ranks", "nodes"),
    [
        ("", "", "", 7, 1),
        ("", "5", "3", 5, 3),
        ("--nproc-per-node 2 --nnodes 4", "5", "3", 2, 4),
        ("", "x", "-1", 7, 1),
    ],
)
def test_the_launch_that_is_examined(
    flags: str, here: str, machines: str, ranks: int, nodes: int, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags say how many ranks; else the launcher, else the machine has one for each GPU."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setenv("SLURM_NNODES", machines)
    requests.take(cli_doctor, "examine", [])
    requests.take(cli_doctor, "_gpus", 7)
    assert cli_doctor.main(flags.split()) == 0
    assert requests.of("examine") == {"launch": Launch(os.environ, ranks, nodes, None)}
