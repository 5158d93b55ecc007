"""Every flag of every tool, with a value that is not its default, arrives at the parameter that it is meant for: here
those of the tools for data, checkpoints and configurations.

A flag that no line of tests/support/command_lines.py has, and a tool without a line, fail.
"""

import argparse
import importlib
import shlex
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
    completion,
    convert_checkpoint,
    import_config,
    inspect_checkpoint,
    inspect_dataset,
    merge_datasets,
    prepare_cache,
    preprocess_data,
    train_tokenizer,
)
from megatron_ext.cli.main import COMMANDS
from megatron_ext.commandline import ToolParser
from megatron_ext.config.schema.data import DataConfig
from megatron_ext.data.prepare.journal import Progress
from megatron_ext.data.prepare.preprocess import EncodeJob
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.train import datasets
from megatron_ext.verify import exported_tokenizer, huggingface
from tests.support.command_lines import LINES, TOKENIZER_VALUES, WITHOUT_FLAGS_OF_THEIR_OWN, line_of, main_of
from tests.support.requests import Requests
from tests.support.small_models import small_config


class _ParsedError(Exception):
    """Raised in place of what a tool does with its flags."""


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
            main_of(program)(line_of(program, number))
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
    assert preprocess_data.main(line_of("preprocess")) == 0
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
    assert train_tokenizer.main(line_of("train-tokenizer")) == 0
    assert requests.of("find_files") == {"inputs": ["a", "b"]}
    assert requests.of("read_documents") == {"files": files, "keys": ["body"]}
    sampled = requests.of("sample_texts")
    assert (list(sampled["texts"]), sampled["share"]) == (["texts of ['body']"], 0.25)
    expected = {"texts": "a quarter", "vocab_size": 300, "folder": Path("out"), "model_type": "unigram"}
    assert requests.made[-1] == ("train_sentencepiece", expected)
    requests.made.clear()
    assert train_tokenizer.main(line_of("train-tokenizer", 1)) == 0
    assert [name for name, _ in requests.made] == ["find_files", "read_documents", "train_bytelevel_bpe"], "all of it"
    made = requests.of("train_bytelevel_bpe")
    assert list(made.pop("texts")) == ["texts of ['text']"]
    assert made == {"vocab_size": 301, "folder": Path("out")}


def test_merge_datasets(requests: Requests) -> None:
    requests.take(merge_datasets, "find_prefixes", ["x", "y"])
    requests.take(merge_datasets, "merge_indexed_files", SimpleNamespace(documents=1, sequences=2, token_bytes=3))
    assert merge_datasets.main(line_of("merge-datasets")) == 0
    merged = {"prefixes": ["x", "y"], "output": "out", "accept_other_tokenizer": True}
    assert requests.made == [("find_prefixes", {"folder": "parts"}), ("merge_indexed_files", merged)]


def test_inspect_dataset(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("show", "verify", "made_with"):
        requests.take(inspect_dataset, name)
    requests.take(inspect_dataset, "document_tokens", [5, 6])
    tokenizer = SimpleNamespace(decode=lambda ids: f"text of {ids}")
    requests.take(inspect_dataset, "tokenizer_from_flags", tokenizer)
    assert [inspect_dataset.main(line_of("inspect-dataset", number)) for number in range(4)] == [0, 0, 0, 0]
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
    assert inspect_dataset.main(line_of("inspect-dataset", 4)) == 0
    assert requests.made == [
        ("configure", {"argv": ["--seed", "3", "--dry-run"]}),
        ("tokenizer_of_run", {"config": instructed}),
        ("datasets_of_run", {"config": instructed, "tokenizer": tokenizer, "resume": "resume"}),
        ("shown", {"tokenizer": tokenizer, "sample": {"tokens": [0, 1]}, "in_color": True}),
    ]
    assert capsys.readouterr().out == "--- sample 0: window 100 of second\nin green\n"
    requests.take(inspect_dataset, "configure", SimpleNamespace(config=config, resume="resume"))
    assert inspect_dataset.main(line_of("inspect-dataset", 5)) == 0
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
    assert convert_checkpoint.main(line_of("convert")) == 0
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
    assert convert_checkpoint.main(line_of("convert", 1)) == 0
    written |= {"dtype": "F32", "max_shard_size": 5 * 10**9, "with_tokenizer": True, "check_tokenizer": None}
    assert requests.made == [("SavedModel", {"folder": "ours"}), ("export_huggingface", written)]
    requests.made.clear()
    assert convert_checkpoint.main(line_of("convert", 2)) == 0
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
    assert [inspect_checkpoint.main(line_of("inspect-checkpoint", number)) for number in range(4)] == [3, 5, 7, 11]
    assert requests.made == [
        ("list_checkpoints", {"folder": Path("a")}),
        ("show", {"path": Path("a")}),
        ("verify", {"path": Path("a")}),
        ("diff", {"first": Path("a"), "second": Path("b")}),
    ]
    for line in ("ls a b", "show a b", "verify a b", "diff a", "diff a b c"):
        with pytest.raises(ConfigurationError, match=r" takes (1 path|2 paths), not [123]$"):
            inspect_checkpoint.main(shlex.split(line))


def test_import_config(requests: Requests) -> None:
    requests.take(import_config, "read", {"content": 1})
    requests.take(import_config, "translate", "translation")
    requests.take(import_config, "report", "report")
    assert import_config.main(line_of("import-config")) == 0
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
    assert (api.main(line_of("api")), capsys.readouterr().out) == (0, "page")
    assert requests.made == [("page", {"room": "train"})]
    assert (api.main([]), capsys.readouterr().out) == (0, "index")
    assert api.main(line_of("api", 1)) == 0
    assert {path.name: path.read_text() for path in Path("pages").iterdir()} == {
        "README.md": "index",
        "train.md": "page",
        "data.md": "page",
    }
    assert capsys.readouterr().out == "wrote 3 files to pages\n"


def test_completion(requests: Requests, capsys: pytest.CaptureFixture[str]) -> None:
    requests.take(completion, "words", ["a", "b"])
    assert completion.main(line_of("completion")) == 0
    assert completion.main(["words", "convert", "--dtype"]) == 0
    assert completion.main(["words"]) == 0
    assert requests.made == [
        ("words", {"command": "convert", "flag": None}),
        ("words", {"command": "convert", "flag": "--dtype"}),
        ("words", {"command": "commands", "flag": None}),
    ]
    assert capsys.readouterr().out == "a b\n" * 3
    assert completion.main(line_of("completion", 1)) == 0
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
