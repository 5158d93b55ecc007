"""Launches as the guides show them, on the ranks that they name, without the machines, models and data."""

import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.train.configure import configure
from tests.support.command_blocks import commands

_LLAMA = {"8B": (4096, 14336, 32, 8, 32), "70B": (8192, 28672, 64, 8, 80), "13b": (5120, 13824, 40, 40, 40)}


def launches(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield torchrun's words and the program's flags of each training in a block, without where its output goes."""
    for command in commands(text):
        words = shlex.split(command)
        if "pretrain_gpt.py" in words:
            place = words.index("pretrain_gpt.py")
            flags = words[place + 1 :]
            end = next((n for n, word in enumerate(flags) if word in ("2>&1", "|", ">")), len(flags))
            yield words[:place], flags[:end]


def make_hf_folder(folder: Path) -> None:
    """Write the config.json of the Llama model that a folder's name says."""
    hidden, ffn, heads, groups, layers = next(shape for size, shape in _LLAMA.items() if size in folder.name)
    config: dict[str, Any] = {
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def dry_run(launcher: list[str], flags: list[str]) -> Config:
    """Return the configuration of a launch on its own ranks, with synthetic tokens in the place of the data."""
    sizes = dict(itertools.pairwise(launcher))
    machines = sizes.get("--nnodes", "1").rpartition(":")[2]
    ranks = int(sizes.get("--nproc-per-node", "1")) * int(machines)
    kept, skip = [], False
    absent = ("--data-path", "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--split")
    for word in flags:
        skip = word in absent if word.startswith("--") else skip
        kept += [] if skip else [word]
    vocabulary = "128256" if "--load-hf" in kept else "50257"
    stand_in = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", vocabulary]
    return configure([*kept, *stand_in, "--dry-run", "--world-size", str(ranks), "--device", "cpu"]).config
