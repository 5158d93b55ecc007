"""Every recipe is the model that it names, is taken without a warning, fits its devices, and starts with run.sh."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_ext.config.parse.arguments import parse
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.hf_config import differences, read_hf_config
from megatron_ext.train.configure import configure
from tools import recipes
from tools.recipes import Devices, Recipe, find, reduce

# Of the second tier: a recipe is flags, which tests/unit/rules judges.
pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
RECIPES = recipes.recipes()
WITH_MODEL = [recipe for recipe in RECIPES if recipe.devices]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def named(recipe: Recipe) -> str:
    return recipe.name


@pytest.mark.parametrize("recipe", WITH_MODEL, ids=named)
def test_it_has_the_published_number_of_parameters_and_warns_of_nothing(recipe: Recipe) -> None:
    published, tolerance = recipe.published()
    for devices in recipe.devices:
        configured = configure([*recipe.flags(), "--dry-run", "--world-size", str(devices.number)])
        assert abs(recipes.parameters(configured.config) - published) <= tolerance
        assert configured.typed.warnings == ()
        assert configured.config.layout.world_size == devices.number


@pytest.mark.parametrize("recipe", WITH_MODEL, ids=named)
def test_it_states_both_dropouts(recipe: Recipe) -> None:
    """What a recipe leaves out would be Megatron's 0.1."""
    assert {"attention_dropout", "hidden_dropout"} <= parse(recipe.flags()).values.keys()


PUBLISHED = json.loads((ROOT / "tests/golden/published_configs.json").read_text())
"""What the config.json of a model says, by the model's name: facts, read in public copies of that file, or defaults of
transformers' class, where these are the model's."""


def model_of(recipe: Recipe) -> str:
    return Path(recipe.notes["model"]).name.removesuffix("-Base")


def with_published_config() -> list[tuple[Recipe, dict[str, Any]]]:
    named_models = [(recipe, model_of(recipe)) for recipe in WITH_MODEL]
    return [(recipe, PUBLISHED[model]) for recipe, model in named_models if model in PUBLISHED]


@pytest.mark.parametrize(("recipe", "content"), with_published_config(), ids=lambda one: getattr(one, "name", ""))
def test_it_is_the_model_of_its_config_json(recipe: Recipe, content: dict[str, Any], tmp_path: Path) -> None:
    """Every shape, epsilon and rotary base, which the number of parameters alone would not tell."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    _, values = read_hf_config(tmp_path)
    assert differences(recipes.configuration(recipe, recipe.devices[0]), values) == []


@pytest.mark.parametrize(("recipe", "content"), with_published_config(), ids=lambda one: getattr(one, "name", ""))
def test_transformers_counts_as_many_parameters(recipe: Recipe, content: dict[str, Any]) -> None:
    """On the meta device, where a model of any size takes no memory. Depths of prediction are not in its classes."""
    kind = transformers.CONFIG_MAPPING[content["model_type"]]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**{**content, "dtype": "bfloat16"}))
    whole = recipes.configuration(recipe, recipe.devices[0])
    assert whole.model.mtp_num_layers is None
    assert recipes.parameters(whole) == sum(parameter.numel() for parameter in model.parameters())


def test_every_published_config_is_that_of_a_recipe() -> None:
    assert {model_of(recipe) for recipe, _ in with_published_config()} == set(PUBLISHED)


TOO_LARGE_FOR_ONE_MACHINE = {
    *("bloom-176b", "gpt-oss-120b", "gpt3-175b", "gpt3-175b-megatron-deepspeed", "llama3.1-405b"),
    *("deepseek-v3", "glm-5", "glm4.5-air", "kimi-k2", "minimax-m2", "qwen3-235b-a22b", "qwen3-next-80b-a3b"),
    "kimi-linear-48b-a3b",
}
"""Recipes that begin with a cluster: no machine of 8 holds these models, as docs/recipes.md says."""


@pytest.mark.parametrize("recipe", WITH_MODEL, ids=named)
def test_its_model_has_a_row_for_one_machine_of_8_and_one_for_a_cluster(recipe: Recipe) -> None:
    alike = [other for other in WITH_MODEL if model_of(other) == model_of(recipe)]
    numbers = {devices.number for other in alike for devices in other.devices}
    assert max(devices.number for devices in recipe.devices) >= 64
    if recipe.name not in TOO_LARGE_FOR_ONE_MACHINE:
        assert 8 in numbers


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_it_says_where_its_numbers_are_from(recipe: Recipe) -> None:
    assert recipe.title.endswith(".") or recipe.name == "continued"
    assert recipe.notes["training"]
    assert recipe.notes["model"].startswith("https://") or recipe.name == "continued"


def test_rounded_counts_are_held_to_half_of_their_last_digit() -> None:
    def published(text: str) -> tuple[int, int]:
        return replace(WITH_MODEL[0], notes={"published parameters": text}).published()

    assert published("1,320M") == (1_320_000_000, 5_000_000)
    assert published("12,850M") == (12_850_000_000, 5_000_000)
    assert published("8,030,261,000") == (8_030_261_000, 0)
    assert published("596,049,920 (751,632,384 in its file)") == (596_049_920, 0)


def test_the_page_is_what_the_command_writes() -> None:
    """It plans each recipe for its devices, which fails where one does not fit."""
    text = recipes.PAGE.read_text()
    assert recipes.page(text) == text, "run `python tools/recipes.py table`"


@pytest.mark.parametrize(
    ("name", "without", "devices"),
    [
        ("llama3.1-8b-ddp", "optimizer_cpu_offload", Devices(8, "h100", None)),
        ("llama3.1-70b-8gpus", "torch_fsdp2_cpu_offload", Devices(8, "h100", None)),
        ("llama2-13b-4x40gb", "torch_fsdp2_cpu_offload", Devices(4, "a100", 40.0)),
        ("llama3.1-70b", "recompute_granularity", Devices(64, "h100", None)),
    ],
)
def test_a_layout_that_does_not_fit_is_an_error(name: str, without: str, devices: Devices, tmp_path: Path) -> None:
    """What these files say about host memory and recomputation is so."""
    lines = find(name).path.read_text().splitlines()
    gone = ("recompute_modules",) if without == "recompute_granularity" else ()
    kept = [line for line in lines if not line.startswith((f"{without}:", *gone))]
    (tmp_path / "other.yaml").write_text("\n".join(kept))
    with pytest.raises(ConfigurationError, match=r"does not fit \d+ x "):
        recipes.planned(recipes.read(tmp_path / "other.yaml"), devices)


def test_megatron_deepspeeds_own_layout_does_not_fit() -> None:
    """TP 2 x PP 4 x DP 8, as the tutorial's 3D launch has it, with ZeRO-1: the numbers on both pages."""
    recipe = find("gpt3-175b-megatron-deepspeed")
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "micro_batch_size": 1}
    flags = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    for precision, needed in (["--fp16"], 121), (["--fp16=false", "--initial-loss-scale=4294967296", "--bf16"], 166):
        config = configure([*recipe.flags(), *flags, *precision, "--dry-run", "--world-size", "64"]).config
        assert recipes.state_gb(config) == pytest.approx(needed, abs=0.9)


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(ConfigurationError, match="--recipe llama9: there is no such recipe"):
        find("llama9")


@pytest.mark.parametrize("most_ranks", [2, 8])
@pytest.mark.parametrize("recipe", WITH_MODEL, ids=named)
def test_a_tiny_copy_is_legal_and_keeps_the_kind_of_model(recipe: Recipe, most_ranks: int, tmp_path: Path) -> None:
    values, ranks = reduce(recipe.values, most_ranks)
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(values))
    config = configure(["--config", str(file), "--dry-run", "--world-size", str(ranks)]).config
    whole = recipes.configuration(recipe, recipe.devices[0])
    assert 2 <= ranks <= most_ranks
    assert recipes.parameters(config) < 1_500_000
    for name in ("normalization", "position_embedding_type", "swiglu", "qk_layernorm", "norm_position", "add_qkv_bias"):
        assert getattr(config.model, name) == getattr(whole.model, name)
    assert (config.model.num_experts is None) == (whole.model.num_experts is None)
    for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_distributed_optimizer", "torch_fsdp2_cpu_offload"):
        assert getattr(config.layout, name) == getattr(whole.layout, name)
    for name in ("tensor", "pipeline", "context"):
        size, whole_size = (getattr(each.layout, _size(name)) for each in (config, whole))
        assert size == min(whole_size, 2) or most_ranks == 2


def _size(name: str) -> str:
    return f"{name}_parallel_size" if name == "context" else f"{name}_model_parallel_size"


def test_continued_takes_its_model_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    flags = [
        "--config",
        str(find("continued").path),
        "--load-hf",
        str(tmp_path),
        *recipes.SYNTHETIC,
        "--vocab-size=1000",
    ]
    config = configure([*flags, "--dry-run", "--world-size", "8"]).config
    assert (config.model.num_layers, config.data.vocab_size) == (2, 1000)
    assert config.layout.use_torch_fsdp2


# ---- run.sh, with stand-ins for python and torchrun

_NOTES = """#!/bin/bash
if [ "$1" = -c ]; then exit; fi
echo "$(basename "$0") $*" >> "$NOTES"
if [ "$2" = reduce ]; then echo 4; fi
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which python and torchrun write down how they are called, but for questions about a version."""
    (tmp_path / "bin").mkdir()
    for name in sorted({"python", "torchrun"}):
        (tmp_path / "bin" / name).write_text(_NOTES)
        (tmp_path / "bin" / name).chmod(0o755)
    entered = {"VIRTUAL_ENV": str(tmp_path)}  # or the script would enter the repository's
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "NOTES": str(tmp_path / "notes"), **entered}


def start(environment: dict[str, str], *words: str) -> list[list[str]]:
    """Run run.sh and return the commands that it starts."""
    script = ["bash", str(ROOT / "examples/recipes/run.sh"), *words]
    ended = subprocess.run(script, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [shlex.split(line) for line in Path(environment["NOTES"]).read_text().splitlines()]


def test_run_sh_trains_on_the_users_data(stand_ins: dict[str, str], tmp_path: Path) -> None:
    for part in ("t.bin", "t.idx", "v.bin", "v.idx"):
        (tmp_path / part).touch()
    data = {"TRAIN": f"{tmp_path}/t", "VALID": f"{tmp_path}/v", "TOKENIZER": "k", "SAVE": f"{tmp_path}/s"}
    machines = {"NODES": "8", "NODE_RANK": "3", "MASTER_ADDR": "first"}
    [command] = start(stand_ins | data | machines, "llama3.1-8b", "--train-iters", "20000")
    place = command.index("pretrain_gpt.py")
    assert command[:place] == shlex.split(
        "torchrun --nproc-per-node 8 --nnodes 8 --node-rank 3 --master-addr first --master-port 29500 --max-restarts 3"
    )
    flags = [word if word != "HuggingFaceTokenizer" else "ByteTokenizer" for word in command[place + 1 :]]
    config = configure([*flags, "--vocab-size", "257", "--dry-run", "--world-size", "64", "--device", "cpu"]).config
    assert (config.checkpoint.save, config.checkpoint.load) == (data["SAVE"], data["SAVE"])
    assert config.training.train_iters == 20000
    assert config.model.num_layers == 32


def test_run_sh_without_data_takes_synthetic_tokens_and_weights_from_a_folder(
    stand_ins: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    [command] = start(
        stand_ins | {"HF": str(tmp_path)}, "continued", "--dry-run", "--world-size=8", "--vocab-size=1000"
    )
    assert command[:2] == ["python", "pretrain_gpt.py"]
    config = configure(command[2:]).config
    assert config.data.mock_data
    assert config.model.num_layers == 2


def test_run_sh_makes_a_tiny_copy(stand_ins: dict[str, str]) -> None:
    made, trained = start(stand_ins, "gpt2-124m", "--reduced", "--seed", "7")
    assert made[:4] == ["python", "tools/recipes.py", "reduce", "gpt2-124m"]
    assert trained[1:6] == ["--standalone", "--nproc-per-node", "4", "pretrain_gpt.py", "--config"]
    assert trained[6] == made[4]
    assert trained[7:] == ["--seed", "7"]
    assert not Path(made[4]).parent.exists()


def test_run_sh_needs_a_whole_set_of_paths(stand_ins: dict[str, str]) -> None:
    script = ["bash", str(ROOT / "examples/recipes/run.sh"), "llama3.1-8b"]
    ended = subprocess.run(script, env=stand_ins | {"TRAIN": "t"}, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "VALID: prefix of the validation" in ended.stderr


@pytest.mark.parametrize("recipe", WITH_MODEL, ids=named)
def test_its_tiny_copies_have_trained(recipe: Recipe) -> None:
    """The committed losses of all its copies begin where a model that knows nothing is, and go down."""
    kept = recipes.kept_losses()[recipe.name]
    assert set(kept) == {str(reduce(recipe.values, most_ranks)[1]) for most_ranks in (2, 8)}
    for losses in kept.values():
        assert len(losses) == 5
        assert losses[0] == pytest.approx(5.5, abs=0.2), "ln(250)"
        assert losses[-1] < losses[0] - 0.02


def test_a_measurement_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is kept at once; `--missing` leaves it as it is; equal copies are trained once."""
    asked: list[tuple[str, int]] = []

    def stopped_at_the_fourth(names: list[str], most_ranks: int) -> dict[str, list[float]]:
        asked.extend((name, most_ranks) for name in names)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return {name: [len(asked) + 0.5] for name in names}

    monkeypatch.setattr(recipes, "LOSSES", tmp_path / "losses.json")
    monkeypatch.setattr(recipes, "measured", stopped_at_the_fourth)
    names = ["llama3.1-405b", "qwen3-1.7b", "qwen3-0.6b", "llama3.1-70b"]
    with pytest.raises(KeyboardInterrupt):
        recipes.measure(names, again=False)
    recipes.measure(names, again=False)
    first = [("llama3.1-405b", 8), ("llama3.1-405b", 2), ("qwen3-1.7b", 2), ("llama3.1-70b", 8)]
    assert asked == [*first, ("llama3.1-70b", 8), ("llama3.1-70b", 2)]
    kept = json.loads((tmp_path / "losses.json").read_text())
    assert kept == {
        "llama3.1-405b": {"2": [2.5], "8": [1.5]},
        "llama3.1-70b": {"2": [6.5], "8": [5.5]},
        "qwen3-0.6b": {"2": [3.5]},
        "qwen3-1.7b": {"2": [3.5]},
    }
    recipes.measure(names[:2], again=True)
    assert asked[6:] == first[:3]


def test_losses_of_copies_that_are_no_more_go(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    file.write_text(json.dumps({"qwen3-8b": {"2": [1.0], "16": [2.0]}, "no recipe": {"2": [3.0]}}))
    recipes.keep("gpt2-124m", 2, [4.0], file)
    assert json.loads(file.read_text()) == {"gpt2-124m": {"2": [4.0]}, "qwen3-8b": {"2": [1.0]}}


def test_the_tool_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.main(["list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(recipe.name for recipe in RECIPES)


def test_run_sh_names_a_recipe_that_is_not_there(stand_ins: dict[str, str]) -> None:
    script = ["bash", str(ROOT / "examples/recipes/run.sh"), "lama3.1-8b", "--dry-run"]
    ended = subprocess.run(script, env=stand_ins, capture_output=True, text=True, check=False)
    said = "there is no recipe lama3.1-8b; 'megatron-ext recipes' names them\n"
    assert (ended.returncode, ended.stderr) == (64, said)
