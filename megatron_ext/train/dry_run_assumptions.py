"""Assumes facts that a dry run cannot see: the layout is judged for the machines that it is meant for, not for this
one."""

import os
from collections.abc import Iterator
from dataclasses import replace

from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.parse.options import options
from megatron_ext.config.resolve import Facts

_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_GPT2_VOCABULARY = 50257
"""Entries of GPT-2's own vocab.json."""
_USUAL_VOCABULARIES = {"SentencePieceTokenizer": 32000, "HuggingFaceTokenizer": 128256, "TikTokenizer": 131072}
"""Kind of tokenizer -> entries of a usual one (Llama 2's, Llama 3's, Mistral NeMo's), for one that nobody can read."""


def assumed_facts(facts: Facts, typed: Typed) -> tuple[Facts, list[str]]:
    """Return the facts of a machine that has everything that the flags of a dry run name, and one warning about the
    things that this machine lacks; none where it has all.

    Flags that contradict each other are not believed: `--device cpu` has no GPU.
    """
    missing = dict(_missing(facts, typed))
    if not missing:
        return facts, []
    changes = {name: value for change in missing.values() for name, value in change.items()}
    packages = frozenset(package for option in options() for _, package in option.packages)
    return replace(facts, **{**changes, "packages": facts.packages | packages}), [
        f"--dry-run believes what this machine does not have: {'; '.join(missing)}"
    ]


def _missing(facts: Facts, typed: Typed) -> Iterator[tuple[str, dict]]:
    """Yield the name of each missing requirement, and the facts that would meet it."""
    values = typed.values
    given = [(option, values[option.name]) for option in options() if option.name in values]
    asked = [option.typed(value) for option, value in given if value in option.needs_gpu]
    if values.get("use_pytorch_profiler"):
        asked = [flag for flag in asked if flag != "--profile"]
    on_cpu = values.get("device") == "cpu" or values.get("distributed_backend") == "gloo"
    if asked and not on_cpu and not facts.cuda_available:
        yield f"an NVIDIA GPU ({', '.join(asked)})", {"cuda_available": True}
    for option, value in given:
        for needs_it, package in option.packages:
            if package not in facts.packages and (value == needs_it or (needs_it is None and value != option.default)):
                yield f"the package {package}", {}
    if values.get("torch_compile") and facts.missing_compiler is not None:
        yield f"the C++ compiler {facts.missing_compiler}", {"missing_compiler": None}
    if facts.missing_paths:
        flags = dict.fromkeys(named.partition(" ")[0] for named in facts.missing_paths)
        yield f"the files of {', '.join(flags)}", {"missing_paths": ()}
    if facts.missing_task_files:
        yield "the files that the tasks of --eval-tasks name", {"missing_task_files": ()}
    if facts.missing_checkpoint is not None:
        yield "the checkpoint in --load", {"missing_checkpoint": None}
    yield from _missing_tokenizer(facts, typed)


def _missing_tokenizer(facts: Facts, typed: Typed) -> Iterator[tuple[str, dict]]:
    """Yield the tokenizer whose files are missing; its vocabulary size is taken from the flags, or is a usual one."""
    values = typed.values
    absent = [path for name in _TOKENIZER_FILES if (path := values.get(name)) and not os.path.exists(path)]
    known = _GPT2_VOCABULARY if values.get("tokenizer_type") == "GPT2BPETokenizer" else None
    size = values.get("vocab_size", known)
    usual = _USUAL_VOCABULARIES.get(values.get("tokenizer_type", ""))
    if facts.tokenizer_error is None or not absent:
        return
    if size is not None:
        yield f"the tokenizer ({size} entries)", {"tokenizer_error": None, "vocab_size": size}
    elif usual is not None:
        text = f"the tokenizer (taken for one of {usual} entries, as is usual; --vocab-size says another number)"
        yield text, {"tokenizer_error": None, "vocab_size": usual}
