"""Replays recorded launches of Megatron-LM: the words of a command line, and what becomes of them here, without the
machines that they are for."""

import base64
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.parse.other_flags import advice, find_option
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.plugins.migrate.megatron_deepspeed import read
from megatron_ext.rules.validate import problems
from megatron_ext.rules.warnings import warnings_of

FILE = Path(__file__).resolve().parents[1] / "golden/megatron_launches.json"
OTHERS = FILE.with_name("other_launches.json")
"""Flags and values of scripts that other groups have published, by repository and path; files and names of their own
are `/path`, what a script leaves to whoever starts it is a value in range."""

COUNTED = FILE.with_name("counted_launches.md")
"""What became of launches of many repositories that were recorded once and are not kept."""

_PACKAGES = frozenset(("transformer_engine", "wandb"))
_VOCABULARY = 50257


@dataclass(frozen=True)
class Recorded:
    """The launches of one version of Megatron-LM: the words after the program's name, by file name."""

    source: str
    configurations: dict[str, list[str]]
    examples: dict[str, list[str]]

    @classmethod
    def read(cls) -> "Recorded":
        facts = json.loads(FILE.read_text())
        return cls(facts["source"], _launches(facts, "configurations"), _launches(facts, "examples"))

    def write(self) -> None:
        """Write every flag with its values once; a launch is the numbers of its flags."""
        kinds = {"configurations": self.configurations, "examples": self.examples}
        FILE.write_text(_text([f'"source": {json.dumps(self.source)}'], kinds))


def other_launches() -> dict[str, list[str]]:
    """Return the words of the scripts of other groups, by name."""
    return _launches(json.loads(OTHERS.read_text()), "launches")


def write_other_launches(launches: Mapping[str, list[str]]) -> None:
    """Write what `other_launches` returns."""
    OTHERS.write_text(_text([], {"launches": launches}))


def _launches(facts: dict[str, Any], kind: str) -> dict[str, list[str]]:
    flags = [tuple(flag) for flag in facts["flags"]]
    return {name: [word for number in line for word in flags[number]] for name, line in facts[kind].items()}


def _text(parts: list[str], kinds: Mapping[str, Mapping[str, list[str]]]) -> str:
    grouped = {kind: {name: _by_flag(line) for name, line in launches.items()} for kind, launches in kinds.items()}
    every = Counter(flag for launches in grouped.values() for line in launches.values() for flag in line)
    number = {flag: place for place, (flag, _) in enumerate(every.most_common())}
    parts = [*parts, _rows("flags", "[]", map(json.dumps, number))]
    for kind, launches in grouped.items():
        rows = (f"{json.dumps(name)}: {[number[flag] for flag in line]}" for name, line in launches.items())
        parts.append(_rows(kind, "{}", (row.replace(", ", ",") for row in rows)))
    return "{" + ",\n".join(parts) + "}\n"


def _rows(name: str, brackets: str, rows: Iterable[str]) -> str:
    return f"{json.dumps(name)}: {brackets[0]}\n" + ",\n".join(rows) + f"\n{brackets[1]}"


def _by_flag(line: list[str]) -> list[tuple[str, ...]]:
    """Split words before each flag."""
    starts = [place for place, word in enumerate(line) if word.startswith("--")]
    return [tuple(line[start:end]) for start, end in zip(starts, [*starts[1:], len(line)], strict=True)]


@dataclass(frozen=True)
class Outcome:
    """What the flags of one launch come to."""

    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """The flags at which the problems begin: what the launch is refused for."""
        return tuple(sorted({_feature(problem) for problem in self.problems}))

    @property
    def unbuilt(self) -> tuple[str, ...]:
        """Those among them that are not built and change what is trained or kept: flags that are refused by name, and
        values that a flag does not have here."""
        return tuple(feature for feature in self.features if _is_unbuilt(feature))


_NOT_TOGETHER = {
    "--cp-comm-type": "attention dropout in a ring of context-parallel ranks",
    "--multi-latent-attention": "latent attention next to learned positions",
    "--use-torch-fsdp2": "a loss scale (`--fp16`) under FSDP2",
}
"""Flag at which a problem of these launches begins -> the combination that is not built."""


def _is_unbuilt(feature: str) -> bool:
    known = find_option(feature)
    refused = known is not None and not known.accepted
    return refused or ": '" in feature or feature in _NOT_TOGETHER or advice(feature) is not None


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
    """Parse, resolve and validate a launch, on as many ranks as it needs, with every file, package and GPU there.

    DeepSpeed's file says what its script says: scripts write it from the same variables.
    """
    line = [_plain(word) for word in words]
    for place in [place for place, word in enumerate(line) if word == "--deepspeed_config"]:
        stage = line[line.index("--zero-stage") + 1] if "--zero-stage" in line else 0
        same: dict[str, Any] = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
        file = {**same, "zero_optimization": {"stage": int(stage)}}
        line[place + 1] = base64.urlsafe_b64encode(json.dumps(file).encode()).decode()
    typed = read([*line, "--dry-run"])
    ranks = {"world_size": world_size(typed.values)}
    vocabulary = typed.values.get("vocab_size") or _VOCABULARY
    facts = Facts(cuda_available=True, packages=_PACKAGES, vocab_size=vocabulary, unread=typed.unread)
    config = resolve({**typed.values, **ranks}, facts)
    found = problems(config, facts)
    return Outcome((*typed.warnings, *warnings_of(typed.values, config, facts)), (*typed.problems, *found))


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


def launches_page() -> str:
    """Return docs/megatron_launches.md."""
    recorded = Recorded.read()
    configurations = {name: replay(line) for name, line in recorded.configurations.items()}
    examples = {name: replay(line) for name, line in recorded.examples.items()}
    others = {name: replay(line) for name, line in other_launches().items()}
    taken = {name: outcome for name, outcome in configurations.items() if not outcome.problems}
    warned = sum(bool(outcome.warnings) for outcome in taken.values())
    features = Counter(
        feature for outcome in configurations.values() for feature in _listed(outcome).split(", ") if feature
    )
    warnings = Counter(warning for outcome in taken.values() for warning in outcome.warnings)
    lines = [
        "<!-- Generated by `python tests/golden/regenerate.py`. -->",
        "# Launches of Megatron-LM",
        "",
        "The flags of Megatron-LM's own pretraining configurations (GPT, Mixtral and mixtures of experts, of its",
        "functional tests) and of its example scripts, replayed: each is parsed, resolved and validated for as many",
        "ranks as it needs; nothing is trained.",
        f"Recorded from {recorded.source}. The options are those of the megatron-core 0.19.2 wheel.",
        "",
        *_table("outcome", "configurations", _outcomes(configurations, taken, warned)),
        "",
        "## What the others are refused for",
        "",
        "Each of these changes what is trained or kept, and is not built. A configuration mostly has several of them.",
        "",
        *_table("feature", "configurations", features.most_common()),
        "",
        *_table("refused", "for", [(name, _listed(one)) for name, one in configurations.items() if one.problems]),
        "",
        "## Its example scripts",
        "",
        *_table("script", "outcome", [(name, _listed(one) or "taken") for name, one in examples.items()]),
        "",
        "## Scripts of other groups",
        "",
        "Flags of launch scripts that other groups have published (tests/golden/other_launches.json), recorded by",
        "running each in a restricted shell with stand-ins for torchrun, deepspeed, srun and mpirun.",
        "",
        *_table("script", "outcome", [(name, _for_others(one)) for name, one in others.items()]),
        "",
        *COUNTED.read_text().splitlines(),
        "",
        "## What the taken ones are told",
        "",
        *_table("warning", "configurations", [(text, number) for text, number in warnings.most_common()]),
    ]
    return "\n".join(lines) + "\n"


def _outcomes(every: Mapping[str, Outcome], taken: Mapping[str, Outcome], warned: int) -> list[tuple[str, object]]:
    costly = sum(any(" saves nothing here: " in text for text in outcome.warnings) for outcome in taken.values())
    return [
        ("taken", len(taken) - warned),
        ("taken, with warnings", warned - costly),
        ("taken, slower or larger", costly),
        ("refused", len(every) - len(taken)),
        ("all", len(every)),
    ]


def _for_others(outcome: Outcome) -> str:
    if not outcome.problems:
        return "taken"
    return ", ".join(feature if feature.startswith("`") else f"`{feature}`" for feature in outcome.features)


def _listed(outcome: Outcome) -> str:
    return ", ".join(_NOT_TOGETHER.get(feature, f"`{feature}`") for feature in outcome.unbuilt)


def _table(left: str, right: str, rows: Sequence[tuple[str, object]]) -> list[str]:
    return [f"| {left} | {right} |", "|---|---|", *(f"| {one} | {other} |" for one, other in rows)]


def _plain(word: str) -> str:
    """Return the word with a place in the file system for a variable, or a number where it counts repetitions."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: "1" if match[1] == "REPEAT" else f"/{match[1].lower()}", word)


def _feature(problem: str) -> str:
    match = re.search(r"--[a-z0-9_-]+(?:: '[^']*')?", problem)
    return match[0] if match is not None else problem[:60]
