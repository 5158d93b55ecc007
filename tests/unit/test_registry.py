"""Plugins are found in the package and outside of it, and the core does without them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
from megatron_ext.registry import Plugin

PLUGIN = Plugin(
    "elsewhere",
    needs=({needs}),
    commands={{"greet": ("elsewhere.greet", "say hello")}},
    brings={{"optimizers": "elsewhere.traits:OPTIMIZERS", "families": "elsewhere.family:FAMILIES"{more}}},
)
"""
TRAITS = """
from dataclasses import replace

from megatron_ext.config.derived.optimizer_traits import SGD

OPTIMIZERS = (replace(SGD, name="plain_descent", title="Plain descent"),)
"""
FLAGS = """
from dataclasses import dataclass

from megatron_ext.config.schema.option import Choice, Need, ReadWith, option


@dataclass(frozen=True)
class MoonFlags:
    moon_phase: int = option(
        3, "Phase of the moon.", resume="free", at_least=1, read_with=ReadWith("swiglu", "there is no gate to shine on")
    )


def wane(values, given):
    if "moon_phase" not in given and values.get("swiglu"):
        values["moon_phase"] = 7


def not_thirteen(config, facts):
    if config.model.moon_phase == 13:
        yield "--moon-phase 13 brings bad luck; use --moon-phase 12"


FLAGS = (("model", MoonFlags),)
CHOICES = (Choice("experimental_attention_variant", "tides", (Need("moon_phase", 5, "high water"),)),)
RESOLVERS = (wane,)
RULES = (not_thirteen,)
"""
FAMILY = """
from dataclasses import replace

from megatron_ext.plugins.families.llama import LLAMA

FAMILIES = (replace(LLAMA, model_type="elsewhere_llama"),)
"""


def installed(folder: Path, *, needs: str = "", more: str = "") -> dict[str, str]:
    """An environment whose Python finds a distribution with a plugin."""
    package = folder / "elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(PLUGIN.format(needs=needs, more=more))
    (package / "traits.py").write_text(TRAITS)
    (package / "family.py").write_text(FAMILY)
    (package / "flags.py").write_text(FLAGS)
    (package / "greet.py").write_text("def main(argv):\n    print('hello', *argv)\n    return 0\n")
    metadata = folder / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[megatron_ext.plugins]\nelsewhere = elsewhere\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)


def test_a_plugin_of_another_distribution_brings_commands_optimizers_and_families(tmp_path: Path) -> None:
    env = installed(tmp_path)
    assert "  greet                 say hello\n" in run("-m", "megatron_ext", "--help", env=env).stdout
    assert run("-m", "megatron_ext", "greet", "you", env=env).stdout == "hello you\n"
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 512"
    flags += " --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --device cpu --dry-run"
    dry = run(str(ROOT / "pretrain_gpt.py"), *flags.split(), "--optimizer", "plain_descent", env=env)
    assert dry.returncode == 0, dry.stderr
    script = (
        "from megatron_ext.config.derived.optimizers import OPTIMIZERS\n"
        "from megatron_ext.plugins.families.registry import FAMILIES\n"
        "print(OPTIMIZERS['plain_descent'].title, FAMILIES['elsewhere_llama'].model_type)\n"
    )
    assert run("-c", script, env=env).stdout == "Plain descent elsewhere_llama\n"


def test_a_family_of_another_distribution_reads_its_config(tmp_path: Path) -> None:
    """A folder of a model of the family begins a run as any other family's does."""
    env = installed(tmp_path)
    described = {
        "model_type": "elsewhere_llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(described))
    script = (
        "from megatron_ext.plugins.families.hf_config import read_hf_config\n"
        f"family, values = read_hf_config({str(tmp_path / 'model')!r})\n"
        "print(family.model_type, values['num_layers'], values['hidden_size'], values['swiglu'])\n"
    )
    read = run("-c", script, env=env)
    assert read.stdout == "elsewhere_llama 3 64 True\n", read.stderr
    without = run("-c", script, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "elsewhere_llama" in without.stderr


def test_a_plugin_of_another_distribution_brings_flags(tmp_path: Path) -> None:
    """They are read, bounded, derived, judged and warned of as the core's are; a field of the core has its value."""
    points = ("flags", "choices", "resolvers", "rules")
    env = installed(tmp_path, more="".join(f', "{point}": "elsewhere.flags:{point.upper()}"' for point in points))
    assert "--moon-phase N" in run(str(ROOT / "pretrain_gpt.py"), "--help", "moon", env=env).stdout
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 512"
    flags += " --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --device cpu"

    def said(more: str) -> str:
        return run(str(ROOT / "pretrain_gpt.py"), *flags.split(), "--dry-run", *more.split(), env=env).stderr

    assert "--moon-phase 0 is below 1" in said("--moon-phase 0")
    assert "--moon-phase changes nothing here: there is no gate to shine on" in said("--moon-phase 2")
    assert "--moon-phase 13 brings bad luck; use --moon-phase 12" in said("--swiglu --moon-phase 13")
    script = (
        "from megatron_ext.config.parse.arguments import parse\n"
        "from megatron_ext.config.resolve import Facts, resolve\n"
        "print(resolve(parse({}).values, Facts()).model.moon_phase)\n"
    )
    for more, phase in (("", 3), ("--swiglu", 7), ("--swiglu --moon-phase 5", 5)):
        assert run("-c", script.format([*flags.split(), *more.split()]), env=env).stdout == f"{phase}\n"
    needs = "--experimental-attention-variant tides needs high water, but --moon-phase is 3; use --moon-phase 5"
    assert needs in said("--experimental-attention-variant tides")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"needs": '"nobody",'}, "plugin elsewhere needs the plugin nobody, which is not installed"),
        ({"more": ', "doors": "elsewhere.doors:DOORS"'}, "plugin elsewhere brings doors; the extension points are "),
    ],
)
def test_a_plugin_that_cannot_be_is_named(wrong: dict[str, str], said: str, tmp_path: Path) -> None:
    ended = run("-m", "megatron_ext", "--help", env=installed(tmp_path, **wrong))
    assert ended.returncode != 0
    assert said in ended.stderr


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("plugin.py", "PLUGIN = (", "name the plugin elsewhere, which cannot be imported: SyntaxError: '(' was never"),
        ("plugin.py", "", "has no attribute 'PLUGIN'; mend it, or remove its package"),
        (
            "plugin.py",
            "PLUGIN = {}",
            "elsewhere.plugin has PLUGIN of the type dict; make it a megatron_ext.registry.Plu",
        ),
        (
            "plugin.py",
            PLUGIN.format(needs="", more="").replace('"elsewhere"', '"mamba"', 1),
            "two plugins have the name",
        ),
        (
            "traits.py",
            "import nobody",
            "brings optimizers 'elsewhere.traits:OPTIMIZERS', which cannot be imported: ModuleNot",
        ),
        (
            "traits.py",
            "\nNO = 1 / 0",
            "ZeroDivisionError: division by zero (traits.py, line 2); mend it, or remove its p",
        ),
        ("traits.py", "OPTIMIZERS = []", "plugin elsewhere brings optimizers that are list; bring a tuple of them"),
    ],
)
def test_a_file_of_a_plugin_that_is_wrong_is_named(file: str, text: str, said: str, tmp_path: Path) -> None:
    env = installed(tmp_path)
    (tmp_path / "elsewhere" / file).write_text(text)
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 512"
    flags += " --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --device cpu --dry-run"
    ended = run(str(ROOT / "pretrain_gpt.py"), *flags.split(), env=env)
    assert said in ended.stderr
    assert ended.returncode == 64
    assert "Traceback" not in ended.stderr


def test_another_plugin_is_blamed_for_a_letter_that_ours_has(tmp_path: Path) -> None:
    env = installed(tmp_path, more=', "mixers": "elsewhere.mixer:MIXERS"')
    (tmp_path / "elsewhere/mixer.py").write_text(
        "from megatron_ext.parts.kinds import Mixer\nMIXERS = (Mixer('M', lambda model, norm, number: None),)\n"
    )
    ended = run("-c", "from megatron_ext.parts.kinds import letters; letters()", env=env)
    assert "plugin elsewhere: its mixer has the letter 'M' of plugin mamba; take another" in ended.stderr
