"""`--config`: the command line wins, mistakes are named, and a resolved configuration survives its file."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import ConfigurationError
from tests.support.wrong_flags import BASE

LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--sequence-parallel --use-distributed-optimizer --bf16 --global-batch-size 16 --rampup-batch-size 4 4 100 "
    "--save runs/a --lr-warmup-fraction 0.1 --recompute-activations --data-path 0.25 a 0.75 b --split 90,5,5 --seed 7"
)


@pytest.mark.parametrize("line", ["", LAYOUT, "--adam-eps 1e-15 --norm-epsilon 1e-5 --save 'runs/a: b # c' --swiglu"])
def test_a_resolved_configuration_passed_back_resolves_to_its_equal(line: str, tmp_path: Path):
    facts = Facts(world_size=8, vocab_size=1000)
    config = resolve(parse(shlex.split(f"{BASE} {line}")).values, facts)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    assert resolve(parse(["--config", str(file)]).values, facts) == config


def test_groups_are_shared_only_by_configurations_that_say_the_same() -> None:
    values = parse(shlex.split(BASE)).values
    first, same = resolve(values, Facts()), resolve(values, Facts())
    assert same == first
    assert same.model is first.model
    other = resolve({**values, "hidden_dropout": 0, "add_qkv_bias": 1}, Facts())
    again = resolve({**values, "hidden_dropout": 0.0, "add_qkv_bias": True}, Facts())
    assert (type(other.model.hidden_dropout), type(again.model.hidden_dropout)) == (int, float)
    assert (other.model.add_qkv_bias, again.model.add_qkv_bias) == (1, True)
    assert again.model.add_qkv_bias is True


def test_another_save_folder_gets_its_own_metrics_file(tmp_path: Path):
    config = resolve(parse(shlex.split(f"{BASE} --save runs/a")).values, Facts())
    assert config.logging.metrics_file == "runs/a/metrics.jsonl"
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    again = resolve(parse(["--config", str(file), "--save", "runs/b"]).values, Facts())
    assert again.logging.metrics_file == "runs/b/metrics.jsonl"


def test_the_command_line_wins_over_the_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 4\nlr: 1e-3\nhidden-size: 64\nbf16: true\nsave:\ndata_path: [0.5, a, 0.5, b]\n")
    typed = parse(["--num-layers", "8", "--config", str(file), "--bf16=false"])
    assert typed.values == {
        "num_layers": 8,
        "lr": 0.001,
        "hidden_size": 64,
        "bf16": False,
        "data_path": ("0.5", "a", "0.5", "b"),
    }
    assert typed.config_path == str(file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bf16: 1", "bf16: 1 is not true or false"),
        (
            "optimizer: adam8",
            "optimizer: 'adam8' is not one of adam, sgd, muon, lion, adaptive_muon, adafactor, ademamix, "
            "schedule_free; did you mean adam?",
        ),
        ("num_layers: __import__('os')", "num_layers: \"__import__('os')\" is not an integer"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, problem: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        parse(["--config", str(file)])
    assert caught.value.problems == [f"{file}: {problem}"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("num_layers: 2\nnum-layers: 3\n", "num_layers and num-layers"),
        ("lr: 1e-3\nencoder_num_layers: 5\nnum_layers: 6\n", "encoder_num_layers and num_layers"),
    ],
)
def test_two_spellings_of_one_option_are_refused(text: str, keys: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"{keys} are the same option; keep one of them"):
        parse(["--config", str(path)])


def test_megatron_options_in_the_file_are_judged_as_on_the_command_line(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("mask_prob: 0.7\nuse_flash_attn: true\nmla_down_proj_fusion: false\n")
    with pytest.raises(ConfigurationError, match=r"--mask-prob 0\.7 is not supported"):
        parse(["--config", str(file)])
    file.write_text("use_flash_attn: true\nmask_prob: 0.15\nmla_down_proj_fusion: false\n")
    typed = parse(["--config", str(file)])
    assert typed.values == {}
    assert len(typed.warnings) == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [("- 4\n", "expected lines of the form"), ("a: [1", "is not valid YAML"), ("a: !!python/name:os.system x", "YAML")],
)
def test_a_file_that_is_no_list_of_names_is_refused(text: str, part: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=part):
        parse(["--config", str(file)])


def test_a_missing_file_is_named_beside_other_problems(tmp_path: Path):
    with pytest.raises(ConfigurationError) as caught:
        parse(["--config", str(tmp_path / "none.yaml"), "--lr", "x"])
    assert caught.value.problems == [
        "--lr: 'x' is not a number",
        f"--config {tmp_path}/none.yaml: No such file or directory; give the path of a YAML file",
    ]
