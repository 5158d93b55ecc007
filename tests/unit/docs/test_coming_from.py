"""The commands of docs/coming_from.md are taken as they stand, and are what its configuration files mean."""

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.schema import Config
from megatron_ext.foreign.translate import read, translate
from megatron_ext.train.configure import configure

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/coming_from.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
HIDDEN_LAYERS = {"8B": (4096, 14336, 32, 8, 32), "70B": (8192, 28672, 64, 8, 80), "13b": (5120, 13824, 40, 40, 40)}


def commands(section: str) -> Iterator[tuple[list[str], list[str]]]:
    """torchrun's words and the program's flags, of each command of a section."""
    for block in re.findall(r"```bash\n(.*?)```", SECTIONS[section], re.DOTALL):
        words = shlex.split(block.replace("\\\n", " "))
        place = words.index("pretrain_gpt.py")
        yield words[:place], words[place + 1 :]


def hf_config(name: str) -> dict[str, Any]:
    """What config.json says of the Llama models that the page names."""
    hidden, ffn, heads, groups, layers = next(shape for size, shape in HIDDEN_LAYERS.items() if size in name)
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": layers,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def dry_run(launcher: list[str], flags: list[str]) -> Config:
    """The configuration of a command on its own number of ranks, with synthetic tokens in the place of the data."""
    sizes = dict(itertools.pairwise(launcher))
    ranks = int(sizes["--nproc-per-node"]) * int(sizes.get("--nnodes", "1"))
    kept, skip = [], False
    absent = ("--data-path", "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--split")
    for word in flags:
        skip = word in absent if word.startswith("--") else skip
        kept += [] if skip else [word]
    vocabulary = "128256" if "--load-hf" in kept else "50257"
    stand_in = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", vocabulary]
    return configure([*kept, *stand_in, "--dry-run", "--world-size", str(ranks), "--device", "cpu"]).config


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders that --load-hf names, below the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in set(re.findall(r"--load-hf (\S+)", PAGE)) - {"FOLDER"}:
        if re.search(r"\d+[bB]", name):
            Path(name).mkdir(parents=True)
            (Path(name) / "config.json").write_text(json.dumps(hf_config(name)))


def test_every_program_has_a_section_with_an_example() -> None:
    named = re.findall(r"^\| \[(.+?)\]\(#", PAGE, re.MULTILINE)
    assert len(named) == 7
    for name in named:
        [section] = [title for title in SECTIONS if title.startswith(name)]
        assert len(list(commands(section))) == 1


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("section", SECTIONS)
def test_its_command_is_taken(section: str) -> None:
    [(launcher, flags)] = commands(section)
    assert launcher[0] == "torchrun"
    assert not parse(flags).warnings
    config = dry_run(launcher, flags)
    assert config.layout.world_size in (4, 8, 16, 64)


@pytest.mark.parametrize("section", [title for title in SECTIONS if re.search(r"```(?:json|yaml) ", SECTIONS[title])])
def test_its_configuration_means_the_flags_of_the_command(section: str, tmp_path: Path) -> None:
    [(source, text)] = re.findall(r"```(?:json|yaml) (\w+)\n(.*?)```", SECTIONS[section], re.DOTALL)
    file = tmp_path / ("file.json" if source == "deepspeed" else "file.yaml")
    file.write_text(text)
    [(launcher, flags)] = commands(section)
    ranks = int(launcher[launcher.index("--nproc-per-node") + 1]) if source == "deepspeed" else None
    result = translate(source, read(str(file)), ranks)
    assert not [key.name for key in result.keys if key.became == "unknown"]
    meant, written = parse(result.words()).values, parse(flags).values
    assert meant
    assert {name: written.get(name) for name in meant} == meant


def test_the_flags_of_the_tables_exist() -> None:
    from megatron_ext.config.parse.options import options_by_flag

    here = {
        word for row in re.findall(r"^\| .* \| (.*) \|$", PAGE, re.MULTILINE) for word in re.findall(r"--[\w-]+", row)
    }
    of_others = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"}
    assert len(here) > 30
    of_tools = {"--data-format"}
    assert here - set(options_by_flag()) == of_others | of_tools


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
