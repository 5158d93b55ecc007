"""Replays recorded launches of Megatron-LM: the words of a command line, and what becomes of them here, without the
machines that they are for."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.arguments import read
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.rules.validate import problems

_PACKAGES = frozenset(("transformer_engine", "wandb"))
_VOCABULARY = 50257


@dataclass(frozen=True)
class Outcome:
    """What the flags of one launch come to."""

    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """The flags at which the problems begin: what the launch is refused for."""
        return tuple(sorted({_feature(problem) for problem in self.problems}))


def words(arguments: dict[str, Any]) -> list[str]:
    """Return the words that Megatron-LM's test runner puts on the command line: `true` is a bare switch, `[a b]` are
    several words, and what has spaces or parentheses is one."""
    line = []
    for flag, value in arguments.items():
        line.append(flag)
        text = " ".join(str(value).split())
        if value is True or text == "":
            continue
        if re.fullmatch(r"\[[^]]+\]", text):
            line += shlex.split(text[1:-1])
        else:
            line.append(text.strip("\"'"))
    return line


def replay(words: list[str]) -> Outcome:
    """Parse, resolve and validate a launch, on as many ranks as it needs, with every file, package and GPU there."""
    line = [_plain(word) for word in words]
    typed = read([*line, "--dry-run"])
    ranks = {"world_size": world_size(typed.values)}
    vocabulary = typed.values.get("vocab_size") or _VOCABULARY
    facts = Facts(cuda_available=True, packages=_PACKAGES, vocab_size=vocabulary, unread=typed.unread)
    found = problems(resolve({**typed.values, **ranks}, facts), facts)
    return Outcome(typed.warnings, (*typed.problems, *found))


def world_size(values: Mapping[str, object]) -> int:
    """Return the ranks of a launch, which its flags do not say: whole machines of 8 that the model and the experts
    divide; the model's own ranks where the global batch is too small for that."""

    def size(name: str, default: int = 1) -> int:
        value = values.get(name, default)
        return value if isinstance(value, int) else default

    stages, tensor = size("pipeline_model_parallel_size"), size("tensor_model_parallel_size")
    model = tensor * stages * size("context_parallel_size")
    experts = stages * size("expert_model_parallel_size") * size("expert_tensor_parallel_size", tensor)
    ranks = math.lcm(8, model, experts)
    batch, micro = size("global_batch_size", 0), size("micro_batch_size")
    return model if batch and batch % (micro * (ranks // model)) else ranks


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return the outcomes as text: how many are taken, and for which features the others are refused."""
    taken = [outcome for outcome in outcomes.values() if not outcome.problems]
    warned = sum(bool(outcome.warnings) for outcome in taken)
    features = Counter(feature for outcome in outcomes.values() for feature in outcome.features)
    lines = [f"{len(taken):4d} of {len(outcomes)} taken, {warned} of them with warnings; refused for:"]
    lines += [f"{number:4d} {feature}" for feature, number in features.most_common()]
    return "\n".join(lines)


def _plain(word: str) -> str:
    """Return the word with a place in the file system for a variable, or a number where it counts repetitions."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: "1" if match[1] == "REPEAT" else f"/{match[1].lower()}", word)


def _feature(problem: str) -> str:
    match = re.search(r"--[a-z0-9_-]+(?:: '[^']*')?", problem)
    return match[0] if match is not None else problem[:60]
