#!/usr/bin/env python3
"""Record the flags of Megatron-LM's own launches: `python tests/golden/record_megatron_launches.py REPOSITORY`.

REPOSITORY is a clone of Megatron-LM, bare or not. tests/golden/megatron_launches.json then holds facts alone, names,
flags and values: those of its GPT, Mixtral and MoE pretraining configurations (its functional tests without inference
and reinforcement learning), and those of its example scripts. tests/unit/docs/test_megatron_launches.py replays them.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.megatron_launches import Recorded, words  # noqa: E402

CONFIGURATIONS = re.compile(r"tests/functional_tests/test_cases/((gpt|mixtral|moe)/[^/]+)/model_config\.yaml")
EXAMPLES = (
    "examples/gpt3/train_gpt3_175b_distributed.sh",
    "examples/mixtral/train_mixtral_8x7b_distributed.sh",
    "examples/llama/train_llama3_8b_h100_fp8.sh",
)
_FP8_BRANCH = re.compile(r'^if \[\[ "\$DTYPE" == "fp8" \]\]; then$.*?^fi$', flags=re.M | re.S)
"""What a script adds by the type that it sets itself."""
OTHER_PROGRAMS = re.compile(r"inference|rl-|grpo")


def main(repository: str) -> None:
    commit = _git(repository, "rev-parse", "HEAD").strip()
    paths = _git(repository, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    launches: dict[str, list[str]] = {}
    for path in paths:
        if (match := CONFIGURATIONS.fullmatch(path)) is None:
            continue
        text = _git(repository, "show", f"HEAD:{path}")
        content = yaml.safe_load(text)
        other = content.get("MODE") in ("inference", "rl") or OTHER_PROGRAMS.search(match[1] + text)
        if not other:
            launches[match[1]] = words(content["MODEL_ARGS"])
    examples = {}
    for path in EXAMPLES:
        text = _git(repository, "show", f"HEAD:{path}")
        examples[path] = _script(text)
        if _FP8_BRANCH.search(text):
            examples[f"{path} (DTYPE=bf16)"] = _script(_FP8_BRANCH.sub("", text))
    source = f"NVIDIA/Megatron-LM, commit {commit}"
    Recorded(source, launches, examples).write()


def _script(text: str) -> list[str]:
    """Return the words in the arrays of a bash script, but for those of torchrun, of W&B, and of the second branch of a
    choice; a variable that the script sets to a number is that number. An array that the script expands without quotes
    is split again at spaces, whatever quotes stand in it, as the shell does."""
    numbers = dict(re.findall(r"^(\w+)=(\d+)\s*$", text, flags=re.M))
    text = re.sub(r"^else$.*?^fi$", "", text, flags=re.M | re.S)
    line: list[str] = []
    for name, body in re.findall(r"^\s*(\w+)\+?=\(\n(.*?)^\s*\)$", text, flags=re.M | re.S):
        if name != "DISTRIBUTED_ARGS" and "wandb" not in body:
            body = re.sub(r"\s#.*$", "", body, flags=re.M).replace("\\\n", "\n")
            body = re.sub(r"\$\{?(\w+)\}?", lambda match: numbers.get(match[1], match[0]), body)
            whole = f'"${{{name}[@]}}"' in text
            line += [part for word in shlex.split(body) for part in ([word] if whole else word.split())]
    return line


def _git(repository: str, *command: str) -> str:
    return subprocess.run(["git", "-C", repository, *command], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])
