"""Values of other programs' configuration files become those of our flags, and a command puts them in order."""

from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.foreign.parallel_sizes import solve
from megatron_ext.foreign.translate import Translation, leaves, split_flags, translate
from tests.support.foreign_keys import by_name


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
