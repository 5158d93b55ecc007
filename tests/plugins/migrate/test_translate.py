"""Other programs' configuration files become flags that our parser takes, and no key of them is dropped."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.commands.import_config import report
from megatron_ext.plugins.migrate.key_meanings import MIXED_PRECISION, Fact, Flags
from megatron_ext.plugins.migrate.parallel_sizes import solve
from megatron_ext.plugins.migrate.translate import (
    KINDS,
    SOURCES,
    Translation,
    leaves,
    normalized,
    read,
    split_flags,
    translate,
)
from megatron_ext.train.configure import configure
from tests.support.foreign_keys import by_name, golden_text, nested

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
EXAMPLES = GOLDEN / "import_config"
FILES = sorted(path for path in EXAMPLES.rglob("*") if path.is_file())


def translated(name: str, world_size: int | None = None) -> Translation:
    """The translation of an example by its path below EXAMPLES."""
    return translate(name.split("/")[0], read(str(EXAMPLES / name)), world_size)


def test_there_is_an_example_of_every_program() -> None:
    assert {path.parent.name for path in FILES} == set(SOURCES)
    assert len(FILES) >= 38


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_key_is_accounted_for_and_every_flag_is_read(path: Path) -> None:
    content = read(str(path))
    result = translate(path.parent.name, content)
    names = [name for name, _ in leaves(normalized(path.parent.name, content))]
    assert [key.name for key in result.keys][: len(names)] == names
    for key in result.keys:
        assert key.became in KINDS
        assert key.flags or key.reason, f"{key.name}: not a word about it"
        assert (key.became == "flags") == bool(key.flags)
        # What these files have that is not translated: texts of a formula where a number belongs, and what they lack.
        lacks = key.name in ("batch_size", "pipeline.stages", "scheduler.params.warmup_type")
        assert key.became != "refused" or lacks or "sqrt" in str(key.value)
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


def test_optimizer_and_scheduler_of_a_deepspeed_file_become_flags() -> None:
    result = translated("deepspeed/zero2_offload.json")
    expected = shlex.split(
        "--clip-grad 1 --fp16 --initial-loss-scale 65536 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.999 "
        "--adam-eps 1e-08 --weight-decay 0.01 --lr-decay-style constant --lr-warmup-init 0 --lr 3e-05 "
        "--lr-warmup-iters 500"
    )
    assert set(expected) <= set(result.words())
    warmup = next(key for key in result.keys if key.name == "scheduler.type")
    assert "one update later" in warmup.reason
    [problem] = result.problems()  # the file says nothing of it, which means a logarithm
    assert problem.startswith(
        "scheduler.params.warmup_type: log is not translated: which leaving it out means there; the"
    )
    assert problem.endswith("write linear if that will do; write another value into the file")
    assert by_name(result)["optimizer.params.lr"] == "none"  # the scheduler sets the rate


def test_zero_and_sharding_strategies_are_fsdp2() -> None:
    zero = {"stage": 2, "overlap_comm": True}
    result = translate("deepspeed", {"zero_optimization": zero})
    assert result.command == {"--use-torch-fsdp2": "", "--torch-fsdp2-no-reshard-after-forward": ""}
    assert by_name(result)["zero_optimization.overlap_comm"] == "default"
    for name in ("deepspeed/zero3_offload.json", "accelerate/fsdp.yaml"):
        assert "--use-torch-fsdp2" in translated(name).command
        assert "--torch-fsdp2-no-reshard-after-forward" not in translated(name).command
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
    monkeypatch.setitem(MIXED_PRECISION.by_value, "fp4", Flags("--bf16 --mtp-standalone"))  # pyright: ignore
    key = next(key for key in translate("accelerate", {"mixed_precision": "fp4"}).keys)
    assert key.became == "refused"
    assert "--mtp-standalone is not supported" in key.reason


def test_unknown_values_are_named() -> None:
    result = translate("axolotl", {"learning_rate": "2.0e-5 × sqrt(4)", "sequence_length": 5, "dp_shard_size": "all"})
    assert [key.became for key in result.keys][:3] == ["refused"] * 3
    assert [problem.split(" is not translated")[0] for problem in result.problems()] == [
        "learning_rate: 2.0e-5 × sqrt(4)", "sequence_length: 5", "dp_shard_size: all"
    ]  # fmt: skip
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


def test_what_becomes_of_every_key_is_pinned() -> None:
    """Where a meaning changes on purpose: python tests/golden/regenerate.py."""
    assert golden_text() == (GOLDEN / "foreign_keys.txt").read_text()


def _only(source: str, content: dict[str, Any]) -> tuple[str, str, str]:
    [*_, key] = [key for key in translate(source, content).keys if key.name in dict(leaves(content))]
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
        assert _only("axolotl", {"micro_batch_size": value})[::2] == ("refused", f"{value} is not an integer")
    assert _only("axolotl", {"micro_batch_size": None})[::2] == ("default", "nothing is set")
    assert _only("deepspeed", {"optimizer": {"params": {"betas": [0.9]}}})[0] == "refused"
    fp16 = {"enabled": True, "initial_scale_power": 12}
    assert _only("deepspeed", {"fp16": fp16})[1] == "--initial-loss-scale 4096"
    assert _only("deepspeed", {"fp16": {**fp16, "enabled": False}})[::2] == ("default", "fp16.enabled is not true")
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
        "--tensor-model-parallel-size", "--micro-batch-size", "--seed", "--lr", "--lr-decay-style", "--weight-decay"
    ]  # fmt: skip


def test_what_an_optimizer_brings_gives_way_to_the_file() -> None:
    """Whichever comes first in it; its name itself is never taken away."""
    type_, betas = {"type": "Lion"}, {"params": {"betas": [0.5, 0.75]}}
    unsaid = {"--weight-decay": "0", "--clip-grad": "0"}  # DeepSpeed's defaults, which are not ours
    for optimizer in ({**type_, **betas}, {**betas, **type_}):
        command = translate("deepspeed", {"optimizer": optimizer}).command
        assert command == {"--optimizer": "lion", "--lion-beta1": "0.5", "--lion-beta2": "0.75", **unsaid}
    assert translate("deepspeed", {"optimizer": type_}).command == {
        "--optimizer": "lion", "--lion-beta1": "0.9", "--lion-beta2": "0.999", **unsaid
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
