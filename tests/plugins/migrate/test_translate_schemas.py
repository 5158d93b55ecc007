"""Every key of the published schemas of other programs is read, harmless for a written reason, or refused.

`tests/golden/foreign_schemas.txt` has the keys of their packages, each program's after a line with its version.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import ConfigurationError
from megatron_ext.optim.curves import LearningRateCurve, learning_rate
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.update_factors import factors
from megatron_ext.plugins.migrate.commands.import_config import main as import_config
from megatron_ext.plugins.migrate.key_meanings import Fact, Launch
from megatron_ext.plugins.migrate.translate import KINDS, SOURCES, translate
from megatron_ext.rules.validate import problems
from tests.support.foreign_keys import example
from tests.support.wrong_flags import BASE

# Of the second tier: tests/plugins/migrate translates files of each program.
pytestmark = pytest.mark.full

SCHEMAS = Path(__file__).resolve().parents[2] / "golden/foreign_schemas.txt"
ODD = (7, -1, 0.5, "x", "auto", True, False, math.nan, math.inf, 10**400, None, {}, [], [7], ["x", {}])


def _keys() -> Iterator[tuple[str, str]]:
    for part in SCHEMAS.read_text().split("# ")[1:]:
        head, *keys = part.split()
        yield from ((head, key) for key in keys[1:])


@pytest.mark.parametrize("source", SOURCES)
def test_every_key_of_the_schema_is_known(source: str) -> None:
    """And whatever its value is, the key is accounted for, or the file is refused."""
    keys = [key for program, key in _keys() if program == source]
    assert len(keys) > 100
    for key, value in itertools.product(keys, ODD):
        name, content = example(SOURCES[source], key, value)
        try:
            found = translate(source, content, 8).keys
        except ConfigurationError as error:
            assert "is below 1" in str(error) or "ranks" in str(error), key  # noqa: PT017
            continue
        of_key = [one for one in found if one.name == name or one.name.startswith(f"{name}.")]
        assert of_key, key
        for one in of_key:
            assert one.became in KINDS
            assert one.flags or one.reason
            assert "not a key that this tool knows" not in one.reason or value == ["x", {}], key


@pytest.mark.parametrize(
    ("source", "content", "flags"),
    [
        (
            "deepspeed",
            {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "betas": [0.8, 0.9], "momentum": 0.9}}},
            "--optimizer muon --muon-momentum 0.9 --muon-nesterov --muon-coefficient-type simple --muon-scale-mode "
            "shape_scaling --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-10 --lr 0.02 --weight-decay 0 --clip-grad 0",
        ),
        (
            "axolotl",
            {"optimizer": "muon", "learning_rate": 0.01, "adam_beta2": 0.9},
            "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-coefficient-type simple "
            "--muon-extra-scale-factor 0.2 --adam-beta1 0.95 --adam-beta2 0.9 --lr 0.01 "
            "--lr-decay-style cosine --weight-decay 0",
        ),
        ("axolotl", {"learning_rate": 0.3, "cosine_min_lr_ratio": 0.1}, (
            "--lr-decay-style cosine --lr 0.3 --min-lr 0.03 --weight-decay 0"
        )),
        (
            "axolotl",
            {"lr_scheduler": "linear", "learning_rate": 0.3, "cosine_min_lr_ratio": 0.1, "embedding_lr_scale": 0.5},
            "--lr 0.3 --lr-decay-style linear --decoupled-lr 0.15 --weight-decay 0",
        ),
        (
            "deepspeed",
            {
                "optimizer": {"params": {"lr": 0.3}},
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"warmup_type": "linear", "warmup_num_steps": 1, "warmup_min_ratio": 0.1},
                },
            },
            "--lr 0.3 --lr-decay-style cosine --lr-warmup-iters 2 --lr-warmup-init 0.03 --min-lr 3e-05",
        ),
        ("deepspeed", {"tensor_parallel": {"autotp_size": 4}}, "--tensor-model-parallel-size 4"),
        ("deepspeed", {"expert_parallel": {"enabled": True, "autoep_size": 4}}, "--expert-model-parallel-size 4"),
        ("deepspeed", {"expert_parallel": {"enabled": False, "autoep_size": 4}}, ""),
        ("accelerate", {"parallelism_config": {"parallelism_config_sp_size": 4, "parallelism_config_cp_size": 1}}, (
            "--context-parallel-size 4"
        )),
        ("axolotl", {"fsdp": ["full_shard", "auto_wrap"], "bf16": "full"}, "--use-torch-fsdp2 --bf16"),
    ],
)  # fmt: skip
def test_what_the_keys_mean(source: str, content: dict[str, Any], flags: str) -> None:
    result = translate(source, content, 8)
    assert result.problems() == []
    assert sorted(result.words()) == sorted(flags.split())


def test_layout_of_autotp() -> None:
    assert translate("deepspeed", {"tensor_parallel": {"autotp_size": 4}}, 8).layout.data == 2


def test_a_dataset_for_pretraining_is_text() -> None:
    one = {"path": "org/text", "text_column": "body", "split": "train", "type": "pretrain"}
    result = translate("axolotl", {"pretraining_dataset": [one]})
    assert result.problems() == []
    assert result.preparing == (
        "megatron-ext preprocess --input 'hf://datasets/org/text/**/train*' --output-prefix data/train "
        "--json-keys body --append-eod",
    )
    assert result.command == {"--data-path": "data/train_body_document"}
    assert translate("axolotl", {"pretraining_dataset": "org/text"}).command == {
        "--data-path": "data/train_text_document"
    }
    [problem] = translate("axolotl", {"pretraining_dataset": [{**one, "name": "en"}]}).problems()
    assert problem.startswith("pretraining_dataset.0.name: en is not translated")


def test_rates_of_a_muon_that_has_two_are_those_of_its_two_optimizers() -> None:
    params = {"lr": 5, "muon_lr": 0.02, "adam_lr": 0.005, "weight_decay": 0}
    result = translate("deepspeed", {"optimizer": {"type": "muon", "params": params}})
    assert result.problems() == []
    words = [*BASE.split(), "--disable-bias-linear", "--num-experts", "4", *result.words()]
    config = resolve(parse(words).values, Facts())
    assert config.optimizer.lr == 0.02
    for parameter in parameters(config):
        assert factors(config, parameter).rate == (1 if parameter.update == "matrix" else 0.25), parameter.name


@pytest.mark.parametrize(
    ("kind", "recorded"),
    [
        ("WarmupLR", [0, 0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4]),
        ("WarmupDecayLR", [0, 0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_rates_of_deepspeeds_warmup_come_one_update_later(kind: str, recorded: list[float]) -> None:
    """Recorded from lr_schedules.py of deepspeed 0.19.8, update by update."""
    params = {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
    params |= {"total_num_steps": 8} if kind == "WarmupDecayLR" else {}
    result = translate("deepspeed", {"scheduler": {"type": kind, "params": params}})
    assert "one update later" in next(key.reason for key in result.keys if key.name == "scheduler.type")
    curve = LearningRateCurve.from_config(resolve(parse([*BASE.split(), *result.words()]).values, Facts()))
    assert [learning_rate(step, curve) for step in range(8)] == pytest.approx(recorded[1:], abs=1e-12)


def test_deepspeeds_cosine_leaves_out_its_highest_rate() -> None:
    """Recorded from lr_schedules.py of deepspeed 0.19.8: late in the warmup, and from then on at the same updates."""
    recorded = [0.0, 0.0, 0.1, 0.2, 0.3, 0.341427214102, 0.20002, 0.058612785898, 4e-05, 4e-05]
    params = {"total_num_steps": 8, "warmup_num_steps": 4, "warmup_type": "linear"}
    optimizer = {"type": "AdamW", "params": {"lr": 0.4}}
    result = translate("deepspeed", {"optimizer": optimizer, "scheduler": {"type": "WarmupCosineLR", "params": params}})
    curve = LearningRateCurve.from_config(resolve(parse([*BASE.split(), *result.words()]).values, Facts()))
    ours = [learning_rate(step, curve) for step in range(10)]
    assert [0, *ours[:4], *ours[5:]] == pytest.approx(recorded, abs=1e-12)
    assert ours[4] == 0.4


def test_a_window_of_a_loss_scale_is_translated_as_it_stands() -> None:
    """DeepSpeed doubles one step later by the same number (`tests/unit/optim/test_loss_scale.py`)."""
    result = translate("deepspeed", {"fp16": {"enabled": True, "loss_scale_window": 4}})
    words = result.words()
    assert words[words.index("--loss-scale-window") + 1] == "4"


SIZES = [
    (source, key)
    for source, module in SOURCES.items()
    for key, meaning in module.TABLE.items()
    if isinstance(meaning, Fact) or (isinstance(meaning, Launch) and meaning.template not in ("", "--rdzv-backend {}"))
]


@pytest.mark.parametrize("value", [math.inf, math.nan, "all", 2.5, True])
@pytest.mark.parametrize(("source", "key"), SIZES)
def test_a_size_that_cannot_be_read_ends_the_import(
    source: str, key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content = example(SOURCES[source], key, value)
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError) as caught:
        import_config(["--from", source, str(path)])
    assert caught.value.exit_code == 64
    assert any(problem.startswith(f"{name}: {value} is not translated: ") for problem in caught.value.problems)
    assert "not translated, although the training depends on it" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["fp16", 8, "<x>"])
def test_a_precision_that_cannot_be_read_is_named(value: Any) -> None:
    for source, key in (("axolotl", "bf16"), ("accelerate", "mixed_precision")):
        if (source, value) != ("accelerate", "fp16"):
            [problem] = translate(source, {key: value}).problems()
            assert problem.startswith(f"{key}: {value} is not translated: ")


def _launches() -> Iterator[tuple[str, dict[str, Any]]]:
    device = ("none", "cpu")
    for stage, precision, optimizer, weights in itertools.product(range(4), ("fp16", "bf16", "no"), device, device):
        zero = {"stage": stage, "offload_optimizer": {"device": optimizer}, "offload_param": {"device": weights}}
        for pipeline in (1, 2):
            yield (
                "deepspeed",
                {
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": 2,
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                    "zero_optimization": {**zero, "overlap_comm": True},
                    "fp16": {"enabled": precision == "fp16"},
                    "bf16": {"enabled": precision == "bf16"},
                    "pipeline": {"stages": pipeline},
                },
            )
        config = {"zero_stage": stage, "offload_optimizer_device": optimizer, "offload_param_device": weights}
        yield "accelerate", {"mixed_precision": precision, "deepspeed_config": config}
    for strategy, precision, offload in itertools.product((1, 2, 3), ("fp16", "bf16", "no"), (True, False)):
        fsdp = {"fsdp_sharding_strategy": strategy, "fsdp_offload_params": offload and strategy != 3}
        yield "accelerate", {"mixed_precision": precision, "fsdp_config": fsdp}
    for precision, offload, reshards in itertools.product(("fp16", "bf16", "float32"), (True, False), (True, False)):
        fsdp = {"offload_params": offload, "reshard_after_forward": reshards}
        yield "axolotl", {precision: True, "fsdp_version": 2, "fsdp_config": fsdp}


@pytest.mark.parametrize(("source", "content"), _launches(), ids=str)
def test_translated_flags_are_taken(source: str, content: dict[str, Any]) -> None:
    """Whatever is combined, and with no problem whose fix would lead elsewhere."""
    result = translate(source, content, 4)
    stages = content.get("pipeline", {}).get("stages", 1)
    if stages > 1 and "--torch-fsdp2-cpu-offload" in result.command:
        pytest.skip("weights in host memory and stages: DeepSpeed does not combine ZeRO-3 and stages, either")
    assert result.problems() == []
    values = parse([*BASE.split(), "--world-size", "4", *result.words()]).values
    assert problems(resolve(values, Facts()), Facts()) == []
