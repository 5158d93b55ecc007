"""Datasets in other programs' configuration files become the commands that make them, and epochs become steps."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import open_index
from megatron_ext.plugins.migrate.commands.import_config import main as import_config
from megatron_ext.plugins.migrate.commands.import_config import report, samples_of_epoch
from megatron_ext.plugins.migrate.translate import translate
from megatron_ext.plugins.prepare.commands.preprocess_data import main as preprocess
from tests.support.foreign_keys import by_name

ALPACA = {
    "base_model": "models/tiny",
    "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
    "val_set_size": 0.1,
    "sequence_len": 64,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
}


def test_the_data_of_an_axolotl_file() -> None:
    result = translate("axolotl", ALPACA, 1)
    assert result.preparing == (
        "megatron-ext preprocess --input 'hf://datasets/tatsu-lab/alpaca/**/train*' --output-prefix data/train "
        "--data-format alpaca --seq-length 64 --on-error skip --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        "models/tiny",
    )
    assert result.command["--data-path"] == "data/train_alpaca_document"
    assert result.command["--assistant-only-loss"] == ""
    assert result.command["--split"] == "90,10,0"
    assert by_name(result)["datasets.0.type"] == "data"
    assert by_name(result)["val_set_size"] == "flags"
    assert by_name(result)["num_epochs"] == "none"
    assert report(result).startswith("before\n    megatron-ext preprocess")


def test_several_datasets_and_their_settings() -> None:
    datasets = [
        {"path": "./chats.jsonl", "type": "chat_template", "field_messages": "turns", "chat_template": "chatml"},
        {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "completion", "field": "body"},
        {"path": "org/chats", "type": "sharegpt", "split": "test", "shards": 4},
        {"path": "org/other", "type": "orpo.chat_template"},
    ]
    content = {"datasets": datasets, "chat_template": "tokenizer_default", "train_on_inputs": True}
    result = translate("axolotl", content)
    assert [re.findall(r"data/[\w-]+", command) for command in result.preparing] == [
        [f"data/train-{n}"] for n in range(3)
    ]
    assert result.command["--data-path"] == (
        "data/train-0_messages_document data/train-1_completion_document data/train-2_sharegpt_document"
    )
    assert "--assistant-only-loss" not in result.command
    became = by_name(result)
    assert became["datasets.3.type"] == "refused"
    assert became["datasets.2.shards"] == "refused"
    assert became["train_on_inputs"] == "data"


def test_epochs_become_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed command runs on a file of this machine, and its data says how many steps three epochs are."""
    lines = [json.dumps({"instruction": f"say {n}", "input": "", "output": "x" * (n % 7 + 1)}) for n in range(50)]
    (tmp_path / "alpaca.jsonl").write_text("\n".join(lines))
    content = {**ALPACA, "sequence_len": 512, "datasets": [{"path": str(tmp_path / "alpaca.jsonl"), "type": "alpaca"}]}
    del content["base_model"]
    (command,) = translate("axolotl", content, 2).preparing
    words = shlex.split(command)[2:]
    words[words.index("--output-prefix") + 1] = str(tmp_path / "train")
    assert preprocess([*words, "--tokenizer-type", "ByteTokenizer"]) == 0
    prefix = f"{tmp_path}/train_alpaca_document"
    sequences = len(open_index(prefix).lengths)
    assert sequences > 16
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    capsys.readouterr()
    flags = ["--from", "axolotl", "--world-size", "2", "--data-path", prefix, str(tmp_path / "config.yaml")]
    assert import_config(flags) == 0
    steps = math.ceil(3 * round(sequences * 0.9) / 16)
    assert f"num_epochs: 3 -> --train-iters {steps}; 3 x {round(sequences * 0.9)} samples" in capsys.readouterr().out
    one_epoch = translate("axolotl", {**content, "num_epochs": 1}, 2, lambda *_: 17)
    assert one_epoch.command["--train-iters"] == "2", "16 samples, and the one that is left"
    assert translate("axolotl", {**content, "max_steps": 7}, 2, lambda *_: 100).command["--train-iters"] == "7"
    assert by_name(translate("axolotl", content, None, lambda *_: 100))["num_epochs"] == "none"


@pytest.mark.parametrize(
    ("share", "split"),
    [
        (0, "100,0,0"),
        (0.0, "100,0,0"),
        (0.05, "95,5,0"),
        (0.005, "99.5,0.5,0"),
        (1 / 3, "66.6667,33.3333,0"),
        (1, None),
        (500, None),
        (-0.1, None),
        ("0.1", "90,10,0"),
        (None, None),
    ],
)
def test_a_share_that_is_held_out_becomes_a_split(share: Any, split: str | None) -> None:
    """A number of samples from 1 on is no share."""
    result = translate("axolotl", {**ALPACA, "val_set_size": share}, 1)
    assert result.command.get("--split") == split
    became = "flags" if split is not None else "default" if share is None else "refused"
    assert by_name(result)["val_set_size"] == became


COMMAND = "megatron-ext preprocess --input x.jsonl --output-prefix data/train --data-format "


@pytest.mark.parametrize(
    ("dataset", "content", "command"),
    [
        ({"type": "alpaca"}, {}, "alpaca"),
        ({"type": "alpaca:chat"}, {}, "alpaca"),
        ({"type": "alpaca.load_open_orca"}, {}, "alpaca"),
        ({"type": "alpaca", "chat_template": "chatml"}, {"chat_template": "llama3"}, "alpaca"),
        ({"type": "chat_template"}, {}, "messages"),
        ({"type": "chat_template"}, {"chat_template": "llama3"}, "messages --chat-template llama3"),
        (
            {"type": "chat_template", "chat_template": "chatml"},
            {"chat_template": "llama3"},
            "messages --chat-template chatml",
        ),
        ({"type": "sharegpt", "chat_template": "mine.jinja"}, {}, "sharegpt --chat-template mine.jinja"),
        ({"type": "sharegpt"}, {"chat_template": "tokenizer_default"}, "sharegpt --chat-template tokenizer"),
        ({"type": "chat_template", "field_messages": "messages"}, {}, "messages"),
        ({"type": "chat_template", "field_messages": "turns"}, {}, "messages --json-keys turns"),
        ({"type": "completion"}, {}, "completion --append-eod"),
        ({"type": "completion", "field": "text"}, {}, "completion --append-eod"),
        ({"type": "completion", "field": "body"}, {}, "completion --json-keys body --append-eod"),
        ({"type": "alpaca", "field": "body"}, {}, "alpaca"),
        ({"type": "alpaca"}, {"sequence_len": 64}, "alpaca"),
        ({"type": "alpaca"}, {"sample_packing": True}, "alpaca"),
        ({"type": "alpaca"}, {"sample_packing": False, "sequence_len": 64}, "alpaca"),
        ({"type": "alpaca"}, {"sample_packing": True, "sequence_len": 64}, "alpaca --seq-length 64 --on-error skip"),
        ({"type": "alpaca"}, {"train_on_inputs": True}, "alpaca --train-on-inputs"),
        ({"type": "alpaca"}, {"train_on_inputs": False}, "alpaca"),
        (
            {"type": "alpaca"},
            {"base_model": "a model"},
            "alpaca --tokenizer-type HuggingFaceTokenizer --tokenizer-model 'a model'",
        ),
    ],
)
def test_the_command_that_makes_a_dataset(dataset: dict[str, Any], content: dict[str, Any], command: str) -> None:
    result = translate("axolotl", {"datasets": [{"path": "x.jsonl", **dataset}], **content})
    assert result.preparing == (COMMAND + command,)
    assert ("--assistant-only-loss" in result.command) == (content.get("train_on_inputs") is not True)


@pytest.mark.parametrize(
    ("dataset", "inputs"),
    [
        ({"path": "json", "data_files": "a.jsonl"}, "a.jsonl"),
        ({"path": "parquet", "data_files": ["a", "b"]}, "a b"),
        ({"path": "arrow", "data_files": ["a"]}, "a"),
        ({"path": "text", "data_files": ["a"]}, "a"),
        ({"path": "json"}, "json"),
        ({"path": "org/name"}, "'hf://datasets/org/name/**/train*'"),
        ({"path": "org/name", "split": "test"}, "'hf://datasets/org/name/**/test*'"),
        ({"path": "org/name", "data_files": "x/a.json"}, "hf://datasets/org/name/x/a.json"),
        ({"path": "org/name", "data_files": ["a", "b"]}, "hf://datasets/org/name/a hf://datasets/org/name/b"),
        ({"path": "folder/a.jsonl"}, "folder/a.jsonl"),
        ({"path": "folder/deeper/name"}, "folder/deeper/name"),
        ({"path": "./folder/name"}, "./folder/name"),
        ({"path": "/folder/name"}, "/folder/name"),
        ({"path": "~/name"}, "'~/name'"),
        ({"path": "name"}, "name"),
        ({"path": "s3://bucket/name"}, "s3://bucket/name"),
    ],
)
def test_where_a_dataset_is_read_from(dataset: dict[str, Any], inputs: str) -> None:
    [command] = translate("axolotl", {"datasets": [{"type": "alpaca", **dataset}]}).preparing
    assert command.split(" --output-prefix ")[0] == f"megatron-ext preprocess --input {inputs}"


def test_of_many_datasets_one_that_cannot_be_read_is_left_out_alone() -> None:
    """Number 1 is not 10 and 11."""
    datasets: list[dict[str, Any]] = [{"path": f"{number}.jsonl", "type": "alpaca"} for number in range(12)]
    datasets[1]["type"] = "nonsense"
    result = translate("axolotl", {"datasets": datasets})
    assert result.command["--data-path"].split() == [
        f"data/train-{number}_alpaca_document" for number in range(12) if number != 1
    ]
    became = by_name(result)
    assert [name for name in became if became[name] in ("none", "refused")] == ["datasets.1.path", "datasets.1.type"]
    [problem] = translate("axolotl", {"datasets": datasets[1:2]}).problems()
    assert problem.startswith("datasets.0.type: nonsense is not translated: the formats are ")


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "steps"),
    [(16, 16, 1, 1), (17, 16, 1, 2), (32, 16, 1, 2), (33, 16, 3, 7), (5, 16, 1, 1), (100, 16, 0.01, 1), (0, 16, 1, 1)],
)
def test_steps_of_epochs_are_rounded_up(samples: int, batch: int, epochs: float, steps: int) -> None:
    """And are one at least."""
    asked: list[tuple[int, str]] = []
    content = {
        "sequence_len": 64, "num_epochs": epochs, "micro_batch_size": batch, "datasets": []
    }  # fmt: skip
    result = translate("axolotl", content, 1, lambda *given: asked.append(given) or samples)
    assert result.command["--train-iters"] == str(steps)
    assert asked == [(64, "969,30,1")], "without data of its own the default"
    content["val_set_size"] = 0.1
    translate("axolotl", content, 1, lambda *given: asked.append(given) or samples)
    assert asked[1:] == [(64, "90,10,0")]


@pytest.mark.parametrize(
    ("content", "world_size", "missing"),
    [
        ({"micro_batch_size": 2, "sequence_len": 64}, None, "--world-size"),
        ({"micro_batch_size": 2}, 1, "sequence_len"),
        ({}, 1, "--world-size"),
    ],
)
def test_missing_numbers_for_steps_of_epochs_are_named(
    content: dict[str, Any], world_size: int | None, missing: str
) -> None:
    result = translate("axolotl", {**content, "num_epochs": 2}, world_size, lambda *_: 100)
    assert result.keys[-1].reason == f"the steps of an epoch follow from the batch and the length: give {missing}"


@pytest.mark.parametrize(("tokens", "samples"), [(5, 1), (100, 9), (101, 10), (110, 10), (111, 11)])
def test_the_last_sample_of_an_epoch_needs_the_token_after_it(tokens: int, samples: int, tmp_path: Path) -> None:
    """Of samples of 10 tokens: each predicts the next token, too."""
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_tokens(bytes(2 * tokens), [tokens])
    assert samples_of_epoch(str(tmp_path / "data"), 10, "1") == samples
