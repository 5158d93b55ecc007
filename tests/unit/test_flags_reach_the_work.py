"""Every flag of every tool, with a value that is not its default, arrives at the parameter that it is meant for.

A flag that no line of tests/support/command_lines.py has, and a tool without a line, fail.
"""

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import device
from megatron_ext.checkpoint.huggingface import exporter, importer, saved_model
from megatron_ext.cli import (
    api,
    compare_runs,
    completion,
    convert_checkpoint,
    draw_pipeline,
    generate,
    generate_sample,
    import_config,
    inspect_checkpoint,
    inspect_dataset,
    merge_datasets,
    parity,
    plan,
    prepare_cache,
    preprocess_data,
    show_run,
    tasks,
    train_tokenizer,
)
from megatron_ext.cli import doctor as cli_doctor
from megatron_ext.cli.main import COMMANDS
from megatron_ext.commandline import ToolParser
from megatron_ext.config.eval_tasks import EvalTask
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema.data import DataConfig
from megatron_ext.data.prepare.journal import Progress
from megatron_ext.data.prepare.preprocess import EncodeJob
from megatron_ext.doctor import collectives, flight_recorder
from megatron_ext.doctor.finding import Launch, error, ok, warning
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.inference import leader
from megatron_ext.inference import tasks as inference_tasks
from megatron_ext.inference.sampling import Sampling
from megatron_ext.parallel import groups
from megatron_ext.plan.hardware import TABLE, Machine, constants_of
from megatron_ext.plan.search import Question
from megatron_ext.train import configure as train_configure
from megatron_ext.train import datasets, trained_model
from megatron_ext.train import replay as train_replay
from megatron_ext.verify import exported_tokenizer, huggingface
from tests.support.command_lines import LINES, TOKENIZER_VALUES, WITHOUT_FLAGS_OF_THEIR_OWN
from tests.support.requests import Requests
from tests.support.small_models import small_config


def _words(program: str, number: int = 0) -> list[str]:
    return shlex.split(LINES[program][number])


def _main(program: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"megatron_ext.cli.{COMMANDS[program][0]}").main


class _ParsedError(Exception):
    """Raised in place of what a tool does with its flags."""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Requests:
    """What the stand-ins of a test note; the files that lines name are in the current folder."""
    monkeypatch.chdir(tmp_path)
    return Requests(monkeypatch)


def test_every_tool_has_lines() -> None:
    assert LINES.keys() == COMMANDS.keys() - WITHOUT_FLAGS_OF_THEIR_OWN


@pytest.mark.parametrize("program", LINES)
def test_no_flag_is_left_out_and_no_value_is_a_default(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_known_args
    parsed: list[tuple[ToolParser, argparse.Namespace]] = []

    def parse_alone(parser: ToolParser, *given: Any) -> Any:
        parsed.append((parser, parse(parser, *given)[0]))
        raise _ParsedError

    monkeypatch.setattr(ToolParser, "parse_known_args", parse_alone)
    for number in range(len(LINES[program])):
        with pytest.raises(_ParsedError):
            _main(program)(_words(program, number))
    given: dict[str, set[str]] = {}
    flags: dict[str, set[str]] = {}
    for parser, options in parsed:
        kind = str(parser.description)
        shown = [each for each in parser._actions if each.dest != "help" and each.help is not argparse.SUPPRESS]
        flags[kind] = {each.dest for each in shown}
        values = {each.dest: getattr(options, each.dest) for each in shown}
        changed = {dest for dest, value in values.items() if value != parser.get_default(dest)}
        given.setdefault(kind, set()).update(changed)
        numbers = [values[dest] for dest in changed if type(values[dest]) in (int, float)]
        assert len(numbers) == len(set(numbers)), "two flags of one line have the same number"
    assert given == flags
    source = Path(importlib.import_module(f"megatron_ext.cli.{COMMANDS[program][0]}").__file__ or "").read_text()
    assert len(flags) == source.count("ToolParser("), "a parser of this tool is not used by any line"


def test_preprocess(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    requests.take(preprocess_data, "encode_files", Progress())
    assert preprocess_data.main(_words("preprocess")) == 0
    [(_, given)] = requests.made
    assert given["job"] == EncodeJob(
        inputs=("a", "b"),
        output_prefix="out",
        **TOKENIZER_VALUES,
        json_keys=("turns",),
        data_format="messages",
        chat_template="chatml",
        seq_length=64,
        train_on_inputs=True,
        append_eod=True,
        split_on="<>",
        workers=3,
        on_error="log",
        fast_tokenizer=False,
        commit_interval=7.0,
    )
    assert given["report"]._interval == 50


def test_train_tokenizer(requests: Requests) -> None:
    record = SimpleNamespace(texts=lambda keys: [f"texts of {keys}"])
    files = [SimpleNamespace(size=lambda: 100), SimpleNamespace(size=lambda: 20)]
    requests.take(train_tokenizer, "find_files", files)
    requests.take(train_tokenizer, "read_documents", [record])
    requests.take(train_tokenizer, "sample_texts", "a quarter")
    requests.take(train_tokenizer, "train_sentencepiece")
    requests.take(train_tokenizer, "train_bytelevel_bpe")
    assert train_tokenizer.main(_words("train-tokenizer")) == 0
    assert requests.of("find_files") == {"inputs": ["a", "b"]}
    assert requests.of("read_documents") == {"files": files, "keys": ["body"]}
    sampled = requests.of("sample_texts")
    assert (list(sampled["texts"]), sampled["share"]) == (["texts of ['body']"], 0.25)
    expected = {"texts": "a quarter", "vocab_size": 300, "folder": Path("out"), "model_type": "unigram"}
    assert requests.made[-1] == ("train_sentencepiece", expected)
    requests.made.clear()
    assert train_tokenizer.main(_words("train-tokenizer", 1)) == 0
    assert [name for name, _ in requests.made] == ["find_files", "read_documents", "train_bytelevel_bpe"], "all of it"
    made = requests.of("train_bytelevel_bpe")
    assert list(made.pop("texts")) == ["texts of ['text']"]
    assert made == {"vocab_size": 301, "folder": Path("out")}


def test_merge_datasets(requests: Requests) -> None:
    requests.take(merge_datasets, "find_prefixes", ["x", "y"])
    requests.take(merge_datasets, "merge_indexed_files", SimpleNamespace(documents=1, sequences=2, token_bytes=3))
    assert merge_datasets.main(_words("merge-datasets")) == 0
    merged = {"prefixes": ["x", "y"], "output": "out", "accept_other_tokenizer": True}
    assert requests.made == [("find_prefixes", {"folder": "parts"}), ("merge_indexed_files", merged)]


def test_inspect_dataset(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("show", "verify", "made_with"):
        requests.take(inspect_dataset, name)
    requests.take(inspect_dataset, "document_tokens", [5, 6])
    tokenizer = SimpleNamespace(decode=lambda ids: f"text of {ids}")
    requests.take(inspect_dataset, "tokenizer_from_flags", tokenizer)
    assert [inspect_dataset.main(_words("inspect-dataset", number)) for number in range(4)] == [0, 0, 0, 0]
    assert requests.made == [
        ("show", {"prefix": "data"}),
        ("verify", {"prefix": "data", "vocab_size": 0}),
        ("document_tokens", {"prefix": "data", "document": 4}),
        ("tokenizer_from_flags", {"flags": DataConfig(**TOKENIZER_VALUES)}),
        ("made_with", {"prefix": "data"}),
        ("document_tokens", {"prefix": "data", "document": 0}),
    ]
    assert capsys.readouterr().out == "text of [5, 6]\n5 6\n"
    with pytest.raises(ConfigurationError, match="give the number of the document behind the prefix"):
        inspect_dataset.main(["document", "data"])


class _Samples:
    """Samples of a run, ten of them, which are their positions."""

    sources = (SimpleNamespace(name="first"), SimpleNamespace(name="second"))

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"tokens": [position, position + 1]}

    def place(self, position: int) -> SimpleNamespace:
        """Return a window of the second source."""
        return SimpleNamespace(number=position + 100, source=1)


def test_inspect_dataset_samples(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config()
    instructed = replace(config, data=replace(config.data, assistant_only_loss=True))
    tokenizer = SimpleNamespace(decode=lambda ids: f"text of {ids}")
    monkeypatch.setattr(device, "install", lambda kind: None)
    requests.take(datasets, "tokenizer_of_run", tokenizer)
    requests.take(datasets, "datasets_of_run", SimpleNamespace(train=_Samples()))
    requests.take(datasets, "samples_of_step", range(8, 10))
    requests.take(inspect_dataset, "shown", "in green")
    requests.take(inspect_dataset, "configure", SimpleNamespace(config=instructed, resume="resume"))
    assert inspect_dataset.main(_words("inspect-dataset", 4)) == 0
    assert requests.made == [
        ("configure", {"argv": ["--seed", "3", "--dry-run"]}),
        ("tokenizer_of_run", {"config": instructed}),
        ("datasets_of_run", {"config": instructed, "tokenizer": tokenizer, "resume": "resume"}),
        ("shown", {"tokenizer": tokenizer, "sample": {"tokens": [0, 1]}, "in_color": True}),
    ]
    assert capsys.readouterr().out == "--- sample 0: window 100 of second\nin green\n"
    requests.take(inspect_dataset, "configure", SimpleNamespace(config=config, resume="resume"))
    assert inspect_dataset.main(_words("inspect-dataset", 5)) == 0
    assert requests.of("samples_of_step") == {"config": config, "step": 2}
    shown = capsys.readouterr().out.splitlines()
    assert shown[1::2] == ["text of [8, 9]", "text of [9, 10]"]
    for wrong in ("-1", "10"):
        with pytest.raises(ConfigurationError, match=f"sample {wrong}: the training has samples 0 to 9"):
            inspect_dataset.main(["sample", f"--sample={wrong}"])


@pytest.fixture
def conversion(requests: Requests) -> tuple[Requests, Any]:
    """The stand-ins of what converts, and the checkpoint's."""
    source = SimpleNamespace(dtype=lambda: "F32", config=small_config())
    exported = SimpleNamespace(
        path=Path("made"), family=SimpleNamespace(architecture="Llama"), size=7, files=3, tokenizer=True
    )
    logits = SimpleNamespace(largest_difference=0.0, tokens=5, largest_logit=1.0, holds=True)
    losses = SimpleNamespace(tokens=5, ours=1.0, theirs=1.0, relative_difference=0.0, holds=True)
    requests.take(saved_model, "SavedModel", source)
    requests.take(exporter, "export_huggingface", exported)
    requests.take(importer, "import_huggingface", Path("made"))
    requests.take(huggingface, "compare_logits", logits)
    requests.take(huggingface, "compare_losses", losses)
    return requests, source


def test_convert(conversion: tuple[Requests, Any]) -> None:
    requests, source = conversion
    assert convert_checkpoint.main(_words("convert")) == 0
    written = {"source": source, "destination": "theirs", "dtype": "BF16", "max_shard_size": 7 * 10**6}
    compared = {"source": source, "folder": Path("made"), "dtype": "BF16"}
    check = convert_checkpoint._check_tokenizer
    assert requests.made == [
        ("SavedModel", {"folder": "ours"}),
        ("export_huggingface", {**written, "with_tokenizer": False, "check_tokenizer": check}),
        ("compare_logits", compared),
        ("compare_losses", {**compared, "prefix": "corpus", "samples": 5}),
    ]
    requests.made.clear()
    assert convert_checkpoint.main(_words("convert", 1)) == 0
    written |= {"dtype": "F32", "max_shard_size": 5 * 10**9, "with_tokenizer": True, "check_tokenizer": None}
    assert requests.made == [("SavedModel", {"folder": "ours"}), ("export_huggingface", written)]
    requests.made.clear()
    assert convert_checkpoint.main(_words("convert", 2)) == 0
    assert requests.made == [("import_huggingface", {"source": "theirs", "destination": "ours"})]


@pytest.mark.parametrize(("name", "flags"), [("compare_logits", ""), ("compare_losses", "--no-verify --check-loss c")])
def test_a_conversion_that_changes_the_model_is_an_error(
    name: str, flags: str, conversion: tuple[Requests, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = SimpleNamespace(
        holds=False, tokens=5, largest_difference=1.0, largest_logit=1.0, ours=1.0, theirs=2.0, relative_difference=0.5
    )
    monkeypatch.setattr(huggingface, name, lambda *given: away)
    with pytest.raises(DataError, match=r"more than rounding\. Do not use made"):
        convert_checkpoint.main(["to-hf", "--load", "ours", "--save", "theirs", *flags.split()])


def test_the_tokenizer_that_is_checked(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    same = SimpleNamespace(probes=3, documents=4, by=("tokenizers",), note="why")
    requests.take(exported_tokenizer, "check_ids", same)
    convert_checkpoint._check_tokenizer(Path("made"), "config", "tokenizer")
    assert requests.made == [("check_ids", {"folder": Path("made"), "config": "config", "tokenizer": "tokenizer"})]
    assert capsys.readouterr().out.splitlines() == [
        "tokenizer: the ids of training on 3 probe texts and 4 documents, read by tokenizers",
        "tokenizer: no validation data was compared: why",
        "tokenizer: transformers is not installed, and did not read it",
    ]


def test_inspect_checkpoint(requests: Requests) -> None:
    codes = {"list_checkpoints": 3, "show": 5, "verify": 7, "diff": 11}
    for name, code in codes.items():
        requests.take(inspect_checkpoint, name, code)
    assert [inspect_checkpoint.main(_words("inspect-checkpoint", number)) for number in range(4)] == [3, 5, 7, 11]
    assert requests.made == [
        ("list_checkpoints", {"folder": Path("a")}),
        ("show", {"path": Path("a")}),
        ("verify", {"path": Path("a")}),
        ("diff", {"first": Path("a"), "second": Path("b")}),
    ]
    for line in ("ls a b", "show a b", "verify a b", "diff a", "diff a b c"):
        with pytest.raises(ConfigurationError, match=r" takes (1 path|2 paths), not [123]$"):
            inspect_checkpoint.main(shlex.split(line))


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
        assert tasks.main(_words("tasks", number)) == 0
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
    options = tasks._parser().parse_args(_words("tasks", 3)[:-2])
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
    assert generate.main(_words("generate")) == 0
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
    assert generate.main(_words("generate", 1)) == 0
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
    assert generate_sample.main(_words("sample")) == 0
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
    assert show_run.main(_words("show")) == 0
    assert [given["run"] for name, given in requests.made if name == "read_history"] == [Path("a"), Path("b")]
    assert requests.of("runs_page") == {"runs": {"a": "history", "b": "history"}}
    assert Path("page.html").read_text() == "page of both"
    shown = "== {}\nchart\n\nline\n"
    assert capsys.readouterr().out == f"{shown.format('a')}\n{shown.format('b')}page             page.html\n"
    assert show_run.main(_words("show", 1)) == 0
    assert requests.of("run_page") == {"history": "history", "title": "a", "pipeline": "pipeline"}
    assert requests.of("_pipeline") == {"run": Path("a")}
    assert Path("page.html").read_text() == "page of one"


@pytest.mark.parametrize(("second", "code"), [([{"iteration": 1}], 0), ([{"iteration": 2}], 1), ([], 1)])
def test_compare(second: list[Any], code: int, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"a.jsonl": [{"iteration": 1}], "b.jsonl": second}
    monkeypatch.setattr(compare_runs, "read_rows", lambda path: rows[path])
    assert compare_runs.main(_words("compare")) == code


def test_replay_step(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    step = train_replay.Step(7, range(16, 20), 3.0, 1.0, 2.0, 1.0)  # half of 2.0 away
    requests.take(train_replay, "replay", train_replay.Replayed(small_config(), 3, [step], []))
    main = _main("replay-step")
    assert main(_words("replay-step")) == 0
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
    assert parity.main(_words("parity")) == code
    flags = {"argv": ["--num-layers", "2"], "world_size": 6}
    assert requests.of("comparison") == flags
    assert requests.of("_start_device") == {"kind": "cuda", "ranks": 8}
    assert requests.of("prove") == {**flags, "steps": 5, "tolerance": 0.25, "device": "cuda"}
    assert requests.of("report") == {"both": both, "proof": proof}


@pytest.fixture
def planned(requests: Requests) -> tuple[Requests, Question]:
    """The stand-ins of what plans, and what is asked of it."""
    facts = Facts(huggingface={"hidden_size": 5})
    asked = Question({"num_layers": 2}, facts, 24, Machine(TABLE["h200"]), 1.0)
    requests.take(plan, "hardware", TABLE["h200"])
    requests.take(plan, "gather_facts", facts)
    requests.take(plan, "read_hf_config", ("family", {"num_layers": 7, "ffn_hidden_size": 48}))
    requests.take(plan, "question", asked)
    requests.take(plan, "read_metrics", "measured")
    requests.take(plan, "placeholders", {"micro_batch_size": 21})
    requests.take(plan, "corrected", Machine(TABLE["a100"]))
    requests.take(plan, "saved_values", {"num_layers": 11})
    requests.take(plan, "_search", 3)
    requests.take(plan, "_evaluate", 5)
    return requests, asked


def test_plan(planned: tuple[Requests, Question]) -> None:
    requests, asked = planned
    assert plan.main(_words("plan")) == 3
    assert requests.of("hardware") == {
        "name": "a100",
        "given": {
            "memory_gb": 33.0,
            "peak_16bit_tflops": 210.0,
            "peak_tf32_tflops": 210.0,
            "peak_fp32_tflops": 210.0,
            "memory_bandwidth_gb_s": 1234.0,
            "intra_node_gb_s": 77.0,
            "inter_node_gb_s": 11.0,
        },
    }
    machine = Machine(TABLE["h200"], 3, 0.41, 0.52, replace(constants_of(TABLE["h200"]), cores=13))
    model = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": 48}
    assert requests.of("question") == {
        "values": {**model, "num_layers": 2, "bf16": True, "grad_reduce_in_bf16": True},
        "facts": asked.facts,
        "world_size": 24,
        "machine": machine,
        "memory_share": 0.7,
    }
    assert [given["folder"] for name, given in requests.made if name == "read_hf_config"] == ["hf", "hf"]
    assert requests.of("read_metrics") == {"path": Path("m.jsonl")}
    assert requests.of("corrected") == {
        "machine": asked.machine,
        "values": {"hidden_size": 5, **model, "num_layers": 9, "micro_batch_size": 21},
        "facts": asked.facts,
        "measured": "measured",
    }
    found = requests.of("_search")
    assert found["asked"] == replace(asked, machine=Machine(TABLE["a100"]))
    assert (found["options"].number, found["options"].json) == (6, "found.json")
    assert found["typed"] == {"num_layers": 2, "bf16": True, "grad_reduce_in_bf16": True}


def test_plan_of_one_layout(planned: tuple[Requests, Question]) -> None:
    """The ranks may be named among the training flags; a calibration has the flags of the run's own checkpoint."""
    requests, asked = planned
    assert plan.main(_words("plan", 1)) == 5
    assert (requests.of("question")["world_size"], requests.of("question")["values"]) == (12, {"num_layers": 2})
    assert requests.of("_evaluate")["asked"] == asked
    assert plan.main(["--calibrate", "m.jsonl", *_words("plan", 1)]) == 5
    assert requests.of("corrected")["values"] == {"num_layers": 11}
    assert requests.of("saved_values") == {"metrics": Path("m.jsonl")}


@pytest.mark.parametrize("output", [None, "-", "found.json"])
@pytest.mark.parametrize("fits", [True, False])
def test_a_search_ends_with_whether_something_fits(
    fits: bool, output: str | None, monkeypatch: pytest.MonkeyPatch, requests: Requests
) -> None:
    best = [SimpleNamespace(choice="choice")] if fits else []
    answer = SimpleNamespace(best=best, nearest="nearest", fitting=3, legal=4)
    beyond = SimpleNamespace(lines=["economics"], json={"cost": 1})
    requests.take(plan, "search", answer)
    requests.take(plan, "economics", beyond)
    for name in ("fewest_ranks", "with_offloads", "with_short_gradients", "flags", "placeholders"):
        requests.take(plan, name)
    for name in ("hinges", "simpler_layouts", "alternatives"):
        requests.take(plan, name, [])
    requests.take(plan.report, "as_json", {"layouts": 2})
    for name in ("head", "nothing_fits", "table", "with_short_gradients", "simpler"):
        requests.take(plan.report, name, [name])
    for name in ("speed", "why", "command"):
        requests.take(plan.report, name, name)
    options = argparse.Namespace(number=6, json=output)
    asked: Any = SimpleNamespace(world_size=5, machine="machine")
    assert plan._search(options, asked, {}) == (0 if fits else 1)
    assert requests.of("search") == {"question": asked, "number": 6}
    looked = [name for name, _ in requests.made if name in ("fewest_ranks", "with_offloads", "nothing_fits")]
    assert looked == ([] if fits or output == "-" else ["fewest_ranks", "with_offloads", "nothing_fits"])
    if looked:
        assert list(requests.of("fewest_ranks").values()) == [asked, 16 * 5]
    if output == "found.json":
        written = Path("found.json").read_text()
        assert written == ('{\n "layouts": 2,\n "cost": 1\n}\n' if fits else '{\n "layouts": 2\n}\n')


def test_draw_pipeline(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    requests.take(draw_pipeline, "equal_stages", SimpleNamespace(lanes="lanes"))
    requests.take(draw_pipeline, "preview", SimpleNamespace(lanes="lanes"))
    requests.take(draw_pipeline, "as_text", ["text"])
    requests.take(draw_pipeline, "as_page", "page")
    requests.take(draw_pipeline, "slow_stages", ["slow"])
    requests.take(draw_pipeline.schedule_record, "read", "records")
    requests.take(draw_pipeline.schedule_record, "timeline", SimpleNamespace(lanes="lanes"))
    requests.take(draw_pipeline.schedule_record, "merged", "trace")
    assert draw_pipeline.main(_words("draw-pipeline")) == 0
    assert requests.of("equal_stages") == {"stages": 3, "chunks": 2, "microbatches": 11, "group": 4}
    assert requests.of("as_text")["width"] == 90
    assert (Path("page.html").read_text(), requests.of("as_page")["remarks"]) == ("page", [])
    requests.made.clear()
    assert draw_pipeline.main(_words("draw-pipeline", 1)) == 0
    assert requests.of("read") == {"run": Path("run")}
    assert requests.of("timeline") == {"records": "records", "iteration": 7, "pipeline": 1}
    assert requests.of("merged") == {"records": "records"}
    assert Path("trace.json").read_text() == "trace"
    model = "--num-layers 5 --hidden-size 24 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24 "
    model += "--vocab-size 100 --micro-batch-size 1 --global-batch-size 60 --attention-dropout 0 "
    layout = shlex.split(
        f"{model} --tensor-model-parallel-size 2 --context-parallel-size 3 --pipeline-model-parallel-size 5"
    )
    for words, ranks in ((_words("draw-pipeline", 2), 60), (["--microbatches", "9", "--"], 30)):
        requests.made.clear()
        assert draw_pipeline.main([*words, *layout]) == 0
        drawn = requests.of("preview")
        assert (drawn["microbatches"], drawn["config"].layout.world_size) == (9, ranks)
        devices, each = (TABLE["a100"], 6) if ranks == 60 else (TABLE["h100"], 8)
        assert drawn["machine"] == Machine(devices, each, constants=constants_of(devices))


@pytest.mark.parametrize("flag", ["--stages", "--chunks", "--microbatches", "--group"])
def test_nothing_to_draw_is_no_default(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=r"are numbers from 1$"):
        draw_pipeline.main([*(["--stages", "3"] if flag != "--stages" else []), flag, "0"])


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
    assert cli_doctor.main(_words("doctor")) == 74, "the exit code of the first error"
    assert requests.made == [
        ("configure", {"argv": ["--num-layers", "2", "--world-size", "15", "--dry-run"]}),
        ("examine", {"launch": Launch(os.environ, 3, 5, "config")}),  # pyright: ignore[reportArgumentType]
    ]
    assert capsys.readouterr().out.splitlines()[-1] == "2 errors, 1 warnings"
    requests.made.clear()
    assert cli_doctor.main(_words("doctor", 1)) == 0
    assert requests.made == [("check_collectives", {"kind": "cpu", "seconds": 7.0, "megabytes": 11.0})]
    requests.made.clear()
    assert cli_doctor.main(_words("doctor", 2)) == 0
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


def test_import_config(requests: Requests) -> None:
    requests.take(import_config, "read", {"content": 1})
    requests.take(import_config, "translate", "translation")
    requests.take(import_config, "report", "report")
    assert import_config.main(_words("import-config")) == 0
    assert requests.of("read") == {"path": "config.yaml"}
    given = requests.of("translate")
    count = given.pop("samples_of_epoch")
    assert isinstance(count, partial)
    assert (count.func, count.args, count.keywords) == (import_config.samples_of_epoch, ("data",), {})
    assert given == {"source": "axolotl", "content": {"content": 1}, "world_size": 6}
    assert requests.of("report") == {"translation": "translation"}


def test_api(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    requests.take(api, "page", "page")
    requests.take(api, "index", "index")
    requests.take(api, "rooms", {"train": [], "data": []})
    assert (api.main(_words("api")), capsys.readouterr().out) == (0, "page")
    assert requests.made == [("page", {"room": "train"})]
    assert (api.main([]), capsys.readouterr().out) == (0, "index")
    assert api.main(_words("api", 1)) == 0
    assert {path.name: path.read_text() for path in Path("pages").iterdir()} == {
        "README.md": "index",
        "train.md": "page",
        "data.md": "page",
    }
    assert capsys.readouterr().out == "wrote 3 files to pages\n"


def test_completion(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    requests.take(completion, "words", ["a", "b"])
    assert completion.main(_words("completion")) == 0
    assert completion.main(["words", "convert", "--dtype"]) == 0
    assert completion.main(["words"]) == 0
    assert requests.made == [
        ("words", {"command": "convert", "flag": None}),
        ("words", {"command": "convert", "flag": "--dtype"}),
        ("words", {"command": "commands", "flag": None}),
    ]
    assert capsys.readouterr().out == "a b\n" * 3
    assert completion.main(_words("completion", 1)) == 0
    assert "typeset -A _megatron_ext_known" in capsys.readouterr().out
    assert completion.main(["bash"]) == 0
    assert "declare -A _megatron_ext_known" in capsys.readouterr().out


def test_prepare_cache(requests: Requests, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config()
    samples = SimpleNamespace(train=_Samples(), valid=None, test=_Samples())
    monkeypatch.setattr(device, "install", lambda kind: None)
    requests.take(prepare_cache, "configure", SimpleNamespace(config=config, resume="resume"))
    requests.take(datasets, "tokenizer_of_run", "tokenizer")
    requests.take(datasets, "datasets_of_run", samples)
    assert prepare_cache.main(["--world-size", "6"]) == 0
    assert requests.made == [
        ("configure", {"argv": ["--world-size", "6", "--dry-run"]}),
        ("tokenizer_of_run", {"config": config}),
        ("datasets_of_run", {"config": config, "tokenizer": "tokenizer", "resume": "resume"}),
    ]
    assert capsys.readouterr().out == "train: 10 samples of first, second\ntest: 10 samples of first, second\n"
