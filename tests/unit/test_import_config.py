"""Other programs' configuration files become flags that our parser takes, and no key of them is dropped."""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.cli.import_config import main as import_config
from megatron_ext.cli.import_config import report, samples_of_epoch
from megatron_ext.cli.preprocess_data import main as preprocess
from megatron_ext.config.arguments import parse
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import open_index
from megatron_ext.errors import ConfigurationError
from megatron_ext.foreign.meanings import MIXED_PRECISION, Fact, Flags
from megatron_ext.foreign.parallel_sizes import Layout, solve
from megatron_ext.foreign.translate import KINDS, SOURCES, Translation, leaves, read, split_flags, translate
from megatron_ext.train.configure import configure
from tests.support.foreign_keys import golden_text, nested

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
EXAMPLES = GOLDEN / "import_config"
FILES = sorted(path for path in EXAMPLES.rglob("*") if path.is_file())


def translated(name: str, world_size: int | None = None) -> Translation:
    """The translation of an example by its path below EXAMPLES."""
    return translate(name.split("/")[0], read(str(EXAMPLES / name)), world_size)


def by_name(translation: Translation) -> dict[str, str]:
    return {key.name: key.became for key in translation.keys}


def test_there_is_an_example_of_every_program() -> None:
    assert {path.parent.name for path in FILES} == set(SOURCES)
    assert len(FILES) >= 38


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_key_is_accounted_for_and_every_flag_is_read(path: Path) -> None:
    content = read(str(path))
    result = translate(path.parent.name, content)
    names = [name for name, _ in leaves(content)]
    assert [key.name for key in result.keys][: len(names)] == names
    for key in result.keys:
        assert key.became in KINDS
        assert key.flags or key.reason, f"{key.name}: not a word about it"
        assert (key.became == "flags") == bool(key.flags)
        # Texts of a formula where a number belongs are the one thing in these files that nobody can read.
        assert key.became != "unknown" or "sqrt" in str(key.value)
    text = report(result)
    assert all(name in text for name in names)
    values = parse(result.words()).values
    assert len(values) >= len(result.command) - 1


@pytest.mark.parametrize(
    ("name", "world_size", "batch"),
    [
        ("axolotl/mesh_tp_fsdp.yaml", 8, None),
        ("axolotl/mesh_tp_fsdp_ddp.yaml", 16, None),
        ("axolotl/tp_fsdp_70b.yaml", 8, 64),
        ("axolotl/tp_fsdp_ddp_70b.yaml", 16, 128),
        ("axolotl/recommended_13b.yaml", 8, 128),
        ("axolotl/scene_tp_fsdp_70b.yaml", 8, 64),
        ("axolotl/scene_tp_fsdp_ddp_70b.yaml", 16, 128),
        ("axolotl/quick_tp_fsdp_70b.yaml", 8, 64),
        ("axolotl/quick_tp_fsdp_ddp_70b.yaml", 16, 128),
        ("accelerate/multi_gpu.yaml", 4, None),
        ("accelerate/fsdp.yaml", 4, None),
    ],
)
def test_the_layout_is_the_one_that_the_file_describes(name: str, world_size: int, batch: int | None) -> None:
    layout = translated(name).layout
    assert (layout.world_size, layout.global_batch_size) == (world_size, batch)


@pytest.mark.parametrize(
    ("name", "batch"),
    [("fsdp_13b", 128), ("scene_fsdp_13b", 128), ("scene_ddp_8b", 128), ("quick_ddp_8b", 128), ("quick_fsdp_13b", 128)],
)
def test_ranks_that_the_file_leaves_open_come_from_the_command_line(name: str, batch: int) -> None:
    assert translated(f"axolotl/{name}.yaml").layout.global_batch_size is None
    assert translated(f"axolotl/{name}.yaml", 8).command["--global-batch-size"] == str(batch)


LLAMA_70B = shlex.split(
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --vocab-size 128256 --mock-data --train-iters 1000"
)


@pytest.mark.parametrize(
    "name", ["fsdp_13b", "recommended_13b", "tp_fsdp_70b", "tp_fsdp_ddp_70b", "scene_ddp_8b", "scene_tp_fsdp_ddp_70b"]
)
def test_a_whole_configuration_can_be_launched(name: str) -> None:
    """With the shape of a model in the place of its folder, which is not here, and a learning rate where none is."""
    result = translated(f"axolotl/{name}.yaml", 8 if result_ranks(name) is None else None)
    words = result.words()
    for flag in ("--load-hf", "--tokenizer-type", "--tokenizer-model"):
        place = words.index(flag)
        del words[place : place + 2]
    rate = [] if "--lr" in words else ["--lr", "1e-5"]
    ranks = ["--world-size", str(result.layout.world_size), "--dry-run", "--device", "cpu"]
    config = configure([*words, *rate, *LLAMA_70B, *ranks]).config
    assert config.layout.use_torch_fsdp2 == ("ddp_8b" not in name)
    assert config.layout.tensor_model_parallel_size == result.layout.tensor
    assert config.layout.num_distributed_optimizer_instances == result.layout.replicate
    assert config.training.global_batch_size in (64, 128)


def result_ranks(name: str) -> int | None:
    return translated(f"axolotl/{name}.yaml").layout.world_size


def test_a_deepspeed_batch_leaves_the_micro_batch_to_the_number_of_ranks() -> None:
    assert "--micro-batch-size" not in translated("deepspeed/zero2_offload.json").command
    assert translated("deepspeed/zero2_offload.json", 4).command["--micro-batch-size"] == "2"
    # 64 ranks, of which the launch takes two for tensor parallelism, which this file does not name.
    assert translated("deepspeed/megatron_3d.json", 32).command["--micro-batch-size"] == "64"
    with pytest.raises(ConfigurationError, match="32 is not micro batch N x accumulation 4 x DP 3"):
        translated("deepspeed/zero2_offload.json", 3)


def test_what_deepspeed_says_about_the_optimizer() -> None:
    result = translated("deepspeed/zero2_offload.json")
    expected = shlex.split(
        "--clip-grad 1 --fp16 --initial-loss-scale 65536 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.999 "
        "--adam-eps 1e-08 --weight-decay 0.01 --lr-decay-style constant --lr-warmup-init 0 --lr 3e-05 "
        "--lr-warmup-iters 500"
    )
    assert set(expected) <= set(result.words())
    warmup = next(key for key in result.keys if key.name == "scheduler.type")
    assert "logarithmic" in warmup.reason
    assert by_name(result)["optimizer.params.lr"] == "none"  # the scheduler sets the rate


def test_zero_and_sharding_strategies_are_fsdp2() -> None:
    reshard = "--torch-fsdp2-no-reshard-after-forward"
    for name, kept in (("deepspeed/zero2_offload.json", True), ("deepspeed/zero3_offload.json", False)):
        result = translated(name)
        assert "--use-torch-fsdp2" in result.command
        assert (reshard in result.command) == kept
        assert by_name(result)["zero_optimization.overlap_comm"] == "default"
    assert "--use-torch-fsdp2" in translated("accelerate/fsdp.yaml").command
    assert "--use-distributed-optimizer" in translated("deepspeed/megatron_3d.json").command


def test_weights_in_host_memory_take_the_optimizer_along() -> None:
    for result in (translated("deepspeed/zero3_offload.json"), translated("axolotl/offload_option.yaml")):
        assert result.command["--torch-fsdp2-cpu-offload"] == ""
        assert "--use-torch-fsdp2" in result.command
        assert "--optimizer-cpu-offload" not in result.command


def test_the_trainers_order_of_precedence() -> None:
    result = translated("axolotl/nan_fragment.yaml")
    assert result.command["--lr-warmup-iters"] == "100"
    assert "--lr-warmup-fraction" not in result.command


def test_a_flag_that_this_version_refuses_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert translate("accelerate", {"mixed_precision": "fp8"}).command["--fp8-format"] == "hybrid"
    monkeypatch.setitem(MIXED_PRECISION.by_value, "fp4", Flags("--bf16 --fp4-format e2m1"))  # pyright: ignore
    key = next(key for key in translate("accelerate", {"mixed_precision": "fp4"}).keys)
    assert key.became == "none"
    assert "--fp4-format e2m1 is not supported" in key.reason


def test_what_is_unknown_is_named() -> None:
    result = translate("axolotl", {"learning_rate": "2.0e-5 × sqrt(4)", "sequence_length": 5, "dp_shard_size": "all"})
    assert [key.became for key in result.keys] == ["unknown"] * 3
    assert "sequence_length: 5 -> not a key that this tool knows" in report(result)


def test_shards_without_sharding_are_pointed_out() -> None:
    assert "no flag above shards anything" in report(translate("axolotl", {"dp_shard_size": 4}))


def test_contradictions_are_errors_with_the_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"6 ranks are not TP 2 x PP 1 x CP 1 x shards 4 x replicas 1"):
        translate("axolotl", {"tensor_parallel_size": 2, "dp_shard_size": 4}, world_size=6)
    with pytest.raises(ConfigurationError, match="for 4 ranks, not for --world-size 8"):
        translated("accelerate/multi_gpu.yaml", 8)


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_1_is_an_error(size: int) -> None:
    for source, module in SOURCES.items():
        for key, meaning in module.TABLE.items():
            if isinstance(meaning, Fact):
                with pytest.raises(ConfigurationError) as caught:
                    translate(source, nested(key, size), 8)
                name = meaning.name.replace("_", " ")
                assert caught.value.problems == [f"{name} {size} is below 1; give a number from 1, or leave it out"]
    with pytest.raises(ConfigurationError, match=f"^--world-size {size} is below 1"):
        translate("deepspeed", {"train_batch_size": 32}, size)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("twice.yaml", "dp_shard_size: 4\ndp_shard_size: 8\n", "named twice: dp_shard_size"),
        ("twice.json", '{"a": 1, "a": 2}', "named twice: a"),
        ("broken.json", "{", "Expecting property name"),
        ("list.yaml", "- 1\n", "expected names and values"),
    ],
)
def test_files_that_cannot_be_read(name: str, text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        read(str(tmp_path / name))


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
        "python tools/preprocess_data.py --input 'hf://datasets/tatsu-lab/alpaca/**/train*' --output-prefix data/train "
        "--data-format alpaca --seq-length 64 --on-error skip --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        "models/tiny",
    )
    assert result.command["--data-path"] == "data/train_alpaca_document"
    assert result.command["--assistant-only-loss"] == ""
    assert result.command["--split"] == "90,10,0"
    assert by_name(result)["datasets.0.type"] == by_name(result)["val_set_size"] == "data"
    assert by_name(result)["num_epochs"] == "none"
    assert report(result).startswith("before\n    python tools/preprocess_data.py")


def test_several_datasets_and_their_settings() -> None:
    datasets = [
        {"path": "./chats.jsonl", "type": "chat_template", "field_messages": "turns", "chat_template": "chatml"},
        {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "completion", "field": "body"},
        {"path": "org/chats", "type": "sharegpt", "split": "test", "shards": 4},
        {"path": "org/other", "type": "orpo.chat_template"},
    ]
    content = {"datasets": datasets, "chat_template": "tokenizer_default", "train_on_inputs": True}
    result = translate("axolotl", content)
    assert [command.split("preprocess_data.py ")[1] for command in result.preparing] == [
        "--input ./chats.jsonl --output-prefix data/train-0 --data-format messages --json-keys turns "
        "--chat-template chatml --train-on-inputs",
        "--input a.jsonl b.jsonl --output-prefix data/train-1 --data-format completion --json-keys body --append-eod "
        "--train-on-inputs",
        "--input 'hf://datasets/org/chats/**/test*' --output-prefix data/train-2 --data-format sharegpt "
        "--chat-template tokenizer --train-on-inputs",
    ]
    assert result.command["--data-path"] == (
        "data/train-0_messages_document data/train-1_completion_document data/train-2_sharegpt_document"
    )
    assert "--assistant-only-loss" not in result.command
    became = by_name(result)
    assert became["datasets.3.type"] == "none"
    assert became["datasets.2.shards"] == "none"
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


def test_what_becomes_of_every_key_is_pinned() -> None:
    """Where a meaning changes on purpose: python tests/golden/regenerate.py."""
    assert golden_text() == (GOLDEN / "foreign_keys.txt").read_text()


GIVEN = {"tensor": 2, "context": 2, "pipeline": 2}


@pytest.mark.parametrize(
    ("facts", "world_size", "accumulation", "expected"),
    [
        # tensor, context, pipeline, replicas, data, micro batch, accumulation, global batch
        ({}, None, 1, (1, 1, 1, 1, None, None, 1, None)),
        ({}, None, None, (1, 1, 1, 1, None, None, None, None)),
        ({}, 8, 1, (1, 1, 1, 1, 8, None, 1, None)),
        (GIVEN, 16, 1, (2, 2, 2, 1, 2, None, 1, None)),
        ({"world_size": 8, "tensor": 2}, None, 1, (2, 1, 1, 1, 4, None, 1, None)),
        ({"world_size": 8}, 8, 1, (1, 1, 1, 1, 8, None, 1, None)),
        ({"shard": 4}, None, 1, (1, 1, 1, 1, 4, None, 1, None)),
        ({"shard": 4, "replicate": 2}, None, 1, (1, 1, 1, 2, 8, None, 1, None)),
        ({**GIVEN, "shard": 4, "replicate": 2}, 64, 1, (2, 2, 2, 2, 8, None, 1, None)),
        ({"replicate": 2}, 8, 1, (1, 1, 1, 2, 8, None, 1, None)),
        ({"micro_batch_size": 3}, None, 1, (1, 1, 1, 1, None, 3, 1, None)),
        ({"micro_batch_size": 3}, 4, 1, (1, 1, 1, 1, 4, 3, 1, 12)),
        ({"micro_batch_size": 3, "accumulation": 5}, 4, 1, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"micro_batch_size": 3, "accumulation": 5, "global_batch_size": 60}, 4, 1, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"accumulation": 5, "global_batch_size": 60}, 4, None, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"micro_batch_size": 3, "global_batch_size": 60}, 4, None, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"global_batch_size": 60}, 4, None, (1, 1, 1, 1, 4, None, None, 60)),
        ({"global_batch_size": 60}, 4, 1, (1, 1, 1, 1, 4, 15, 1, 60)),
        ({"global_batch_size": 60, "micro_batch_size": 3}, None, 1, (1, 1, 1, 1, None, 3, 1, 60)),
    ],
)
def test_sizes_follow_from_those_that_are_given(
    facts: dict[str, int], world_size: int | None, accumulation: int | None, expected: tuple[int | None, ...]
) -> None:
    layout = solve(facts, world_size, accumulation)
    assert dataclasses.astuple(layout) == expected
    data = expected[4]
    model = layout.tensor * layout.context * layout.pipeline
    assert layout.world_size == (None if data is None else model * data)


@pytest.mark.parametrize(
    ("facts", "world_size", "problem"),
    [
        ({"world_size": 8}, 4, "the file is for 8 ranks, not for --world-size 4; leave it out"),
        (GIVEN, 12, "12 ranks are not TP 2 x PP 2 x CP 2 x replicas 1; give --world-size 8, or other sizes"),
        (
            {"tensor": 2, "shard": 4},
            4,
            "4 ranks are not TP 2 x PP 1 x CP 1 x shards 4 x replicas 1; give --world-size 8",
        ),
        (
            {"tensor": 2, "shard": 4, "replicate": 3},
            16,
            "16 ranks are not TP 2 x PP 1 x CP 1 x shards 4 x replicas 3; give --world-size 24, or",
        ),
        ({"replicate": 3}, 8, "8 ranks are not TP 1 x PP 1 x CP 1 x replicas 3; give --world-size 3, or other sizes"),
        ({"tensor": 2, "replicate": 3}, 8, "8 ranks are not TP 2 x PP 1 x CP 1 x replicas 3; give --world-size 6, or"),
        (
            {"global_batch_size": 61},
            4,
            "a global batch of 61 is not micro batch N x accumulation 1 x DP 4; change one of them, or the number",
        ),
        (
            {"global_batch_size": 60, "micro_batch_size": 3, "accumulation": 1},
            4,
            "a global batch of 60 is not micro batch 3 x accumulation 1 x DP 4;",
        ),
        (
            {"global_batch_size": 60, "micro_batch_size": 3, "accumulation": 7},
            4,
            "a global batch of 60 is not micro batch 3 x accumulation 7 x DP 4;",
        ),
        ({"tensor": 0, "world_size": -1}, 0, "tensor 0 is below 1; give a number from 1, or leave it out"),
    ],
)
def test_sizes_that_contradict_each_other_are_named(facts: dict[str, int], world_size: int, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        solve(facts, world_size, 1)
    assert caught.value.problems[0].startswith(problem)


def test_a_layout_as_flags_and_in_words() -> None:
    """Sizes of one are the default; a batch is said, also of one."""
    layout = Layout(2, 3, 5, 7, 14, 1, 4, 56)
    assert layout.flags() == {
        "--tensor-model-parallel-size": "2",
        "--context-parallel-size": "3",
        "--pipeline-model-parallel-size": "5",
        "--num-distributed-optimizer-instances": "7",
        "--micro-batch-size": "1",
        "--global-batch-size": "56",
    }
    assert layout.lines() == [
        "world size       420 = TP 2 x PP 5 x CP 3 x DP 14",
        "effective batch  1 x 4 x DP 14 = 56 samples (TP, CP and PP do not count)",
    ]
    unknown = Layout(1, 1, 1, 1, None, None, None, None)
    assert unknown.flags() == {}
    assert unknown.lines() == [
        "world size       ? = TP 1 x PP 1 x CP 1 x DP ?",
        "effective batch  ? x ? x DP ? = ? samples (TP, CP and PP do not count)",
        "the file does not say how many ranks there are: give --world-size",
    ]


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
        ("0.1", None),
        (None, None),
    ],
)
def test_a_share_that_is_held_out_becomes_a_split(share: Any, split: str | None) -> None:
    """A number of samples from 1 on is no share."""
    result = translate("axolotl", {**ALPACA, "val_set_size": share}, 1)
    assert result.command.get("--split") == split
    assert by_name(result)["val_set_size"] == ("none" if split is None else "data")


COMMAND = "python tools/preprocess_data.py --input x.jsonl --output-prefix data/train --data-format "


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
        (
            {"type": "alpaca"},
            {"sample_packing": True, "sequence_len": 64},
            "alpaca --seq-length 64 --on-error skip",
        ),
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
    assert command.split(" --output-prefix ")[0] == f"python tools/preprocess_data.py --input {inputs}"


def test_of_many_datasets_one_that_cannot_be_read_is_left_out_alone() -> None:
    """Number 1 is not 10 and 11."""
    datasets: list[dict[str, Any]] = [{"path": f"{number}.jsonl", "type": "alpaca"} for number in range(12)]
    datasets[1]["type"] = "nonsense"
    result = translate("axolotl", {"datasets": datasets})
    assert result.command["--data-path"].split() == [
        f"data/train-{number}_alpaca_document" for number in range(12) if number != 1
    ]
    became = by_name(result)
    assert [name for name in became if became[name] == "none"] == ["datasets.1.path", "datasets.1.type"]
    [only] = translate("axolotl", {"datasets": datasets[1:2]}).keys[-1:]
    assert only.became == "none"


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "steps"),
    [(16, 16, 1, 1), (17, 16, 1, 2), (32, 16, 1, 2), (33, 16, 3, 7), (5, 16, 1, 1), (100, 16, 0.01, 1), (0, 16, 1, 1)],
)
def test_steps_of_epochs_are_rounded_up(samples: int, batch: int, epochs: float, steps: int) -> None:
    """And are one at least."""
    asked: list[tuple[int, str]] = []
    content = {
        "sequence_len": 64, "num_epochs": epochs, "micro_batch_size": batch, "datasets": [], "val_set_size": 0.1
    }  # fmt: skip
    result = translate("axolotl", content, 1, lambda *given: asked.append(given) or samples)
    assert result.command["--train-iters"] == str(steps)
    assert asked == [(64, "969,30,1")], "without data of its own the default"
    content["datasets"] = ALPACA["datasets"]
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
def test_what_steps_of_epochs_need_is_named(content: dict[str, Any], world_size: int | None, missing: str) -> None:
    result = translate("axolotl", {**content, "num_epochs": 2}, world_size, lambda *_: 100)
    assert result.keys[-1].reason == f"the steps of an epoch follow from the batch and the length: give {missing}"


def _only(source: str, content: dict[str, Any]) -> tuple[str, str, str]:
    [key] = translate(source, content).keys
    return key.became, key.flags, key.reason


def test_values_as_other_programs_write_them() -> None:
    """Numbers of a whole value without a point, words in any case, and what another program fills in."""
    assert _only("axolotl", {"learning_rate": "2e-5"}) == ("flags", "--lr 2e-05", "")
    assert _only("axolotl", {"weight_decay": 1.0}) == ("flags", "--weight-decay 1", "")
    assert _only("axolotl", {"weight_decay": 1e30})[1] == "--weight-decay 1e+30"
    assert _only("axolotl", {"lr_scheduler": "Cosine"})[1] == "--lr-decay-style cosine"
    assert _only("axolotl", {"fp16": True})[1] == "--fp16"
    assert _only("axolotl", {"bf16": "auto"})[1] == "--bf16"
    assert _only("axolotl", {"weight_decay": "auto"})[::2] == (
        "none",
        "filled in by another program; give the flag itself",
    )
    assert _only("axolotl", {"output_dir": "a folder"})[1] == "--save 'a folder'"
    assert _only("axolotl", {"base_model": "m"})[1] == (
        "--load-hf m --tokenizer-type HuggingFaceTokenizer --tokenizer-model m"
    )
    assert _only("axolotl", {"micro_batch_size": "4"})[::2] == ("layout", "micro batch size")
    assert _only("axolotl", {"micro_batch_size": 4.0})[::2] == ("layout", "micro batch size")
    for value in (2.5, 3.9):
        assert _only("axolotl", {"micro_batch_size": value})[::2] == ("unknown", f"{value} is not an integer")
    assert _only("axolotl", {"micro_batch_size": None})[::2] == ("unknown", "None is not an integer")
    assert _only("deepspeed", {"optimizer": {"params": {"betas": [0.9]}}})[0] == "unknown"
    assert _only("deepspeed", {"fp16": {"initial_scale_power": 12}})[1] == "--initial-loss-scale 4096"
    assert _only("axolotl", {"ddp_timeout": 90})[1] == "--distributed-timeout-minutes 1.5"
    assert _only("accelerate", {"main_process_ip": None})[0] == "default"
    assert _only("accelerate", {"main_process_ip": "10.0.0.1"})[::2] == ("launch", "--master-addr 10.0.0.1")


def test_a_rate_gives_way_only_to_a_scheduler_that_sets_one() -> None:
    def rates(scheduler: dict[str, Any]) -> tuple[str | None, str]:
        content = {"optimizer": {"params": {"lr": 0.5}}, "scheduler": {"params": scheduler}}
        result = translate("deepspeed", content)
        return result.command.get("--lr"), by_name(result)["optimizer.params.lr"]

    assert rates({"warmup_max_lr": 0.25}) == ("0.25", "none")
    assert rates({"warmup_max_lr": "auto"}) == ("0.5", "flags")
    assert rates({"warmup_num_steps": 7}) == ("0.5", "flags")


def test_a_command_begins_with_the_layout() -> None:
    content = {"seed": 3, "tensor_parallel_size": 2, "micro_batch_size": 1, "learning_rate": 0.5}
    assert list(translate("axolotl", content).command) == [
        "--tensor-model-parallel-size", "--micro-batch-size", "--seed", "--lr"
    ]  # fmt: skip


def test_what_an_optimizer_brings_gives_way_to_the_file() -> None:
    """Whichever comes first in it; its name itself is never taken away."""
    type_, betas = {"type": "Lion"}, {"params": {"betas": [0.5, 0.75]}}
    for optimizer in ({**type_, **betas}, {**betas, **type_}):
        command = translate("deepspeed", {"optimizer": optimizer}).command
        assert command == {"--optimizer": "lion", "--lion-beta1": "0.5", "--lion-beta2": "0.75"}
    assert translate("deepspeed", {"optimizer": type_}).command == {
        "--optimizer": "lion", "--lion-beta1": "0.9", "--lion-beta2": "0.99"
    }  # fmt: skip


def test_shards_are_pointed_out_only_where_nothing_shards() -> None:
    for sharding in ({"fsdp_version": 2}, {}):
        [shards] = [key for key in translate("axolotl", {"dp_shard_size": 4, **sharding}).keys if key.value == 4]
        assert shards.reason.startswith("shard; no flag above") == (not sharding)
    contradicting = {"context_parallel_size": 2, "sequence_parallel_degree": 4}
    for one in (contradicting, dict(reversed(contradicting.items()))):
        with pytest.raises(
            ConfigurationError, match=r"(context|sequence)_parallel_(size|degree) \d contradicts another"
        ):
            translate("axolotl", one)
    assert translate("axolotl", {"context_parallel_size": 2, "sequence_parallel_degree": 2}).layout.context == 2


def test_leaves_and_flags_of_texts() -> None:
    assert list(leaves({3: 1})) == [("3", 1)]
    assert list(leaves({"a": {"b": 1, 2: "x"}, "c": [1, 2], "d": [{"e": 1}, 5], "f": {}, "g": []})) == [
        ("a.b", 1), ("a.2", "x"), ("c", [1, 2]), ("d.0.e", 1), ("d.1", 5), ("f", {}), ("g", [])
    ]  # fmt: skip
    assert split_flags("--a 1 '2 3' --b --c=4") == {"--a": "1 '2 3'", "--b": "", "--c=4": ""}
    assert Translation((), solve({}, 1, 1), {"--a": "1 '2 3'", "--b": ""}).words() == ["--a", "1", "2 3", "--b"]


@pytest.mark.parametrize(("tokens", "samples"), [(5, 1), (100, 9), (101, 10), (110, 10), (111, 11)])
def test_the_last_sample_of_an_epoch_needs_the_token_after_it(tokens: int, samples: int, tmp_path: Path) -> None:
    """Of samples of 10 tokens: each predicts the next token, too."""
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_tokens(bytes(2 * tokens), [tokens])
    assert samples_of_epoch(str(tmp_path / "data"), 10, "1") == samples
