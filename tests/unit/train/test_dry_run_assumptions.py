"""What --dry-run believes of a machine that the run is not on."""

import dataclasses
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.resolve import Facts
from megatron_ext.train import dry_run_assumptions as believing
from megatron_ext.train.dry_run_assumptions import assumed_facts

EVERYTHING = Facts(
    missing_compiler="g++",
    tokenizer_error="no such file",
    missing_paths=("--data-path a", "--data-path b", "--valid-data-path c"),
    missing_checkpoint="none",
    missing_task_files=("d",),
)


@pytest.mark.parametrize(
    ("values", "changed", "told"),
    [
        ({}, {}, ""),
        ({"torch_compile": True}, {"missing_compiler": None}, "the C++ compiler g++"),
        ({"wandb_project": "p"}, {}, "the package wandb"),
        ({"device": "cuda"}, {"cuda_available": True}, "an NVIDIA GPU (--device cuda)"),
        ({"device": "cuda", "distributed_backend": "gloo"}, {}, ""),
        ({"device": "cpu", "profile": True}, {}, ""),
        ({"profile": True, "use_pytorch_profiler": True}, {}, ""),
        ({"profile": True}, {"cuda_available": True}, "an NVIDIA GPU (--profile)"),
        (
            {"recurrence_kernels": "fla"},
            {"cuda_available": True},
            "an NVIDIA GPU (--recurrence-kernels fla); the package fla",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "nowhere", "vocab_size": 31},
            {"tokenizer_error": None, "vocab_size": 31},
            "the tokenizer (31 entries)",
        ),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, {}, ""),
        ({"tokenizer_type": "OwnTokenizer", "tokenizer_model": "nowhere"}, {}, ""),
    ],
)
def test_a_dry_run_believes_what_its_flags_name(values: dict[str, Any], changed: dict[str, Any], told: str) -> None:
    """And nothing else: what is missing in any case comes at the end."""
    always = {"missing_paths": (), "missing_task_files": (), "missing_checkpoint": None}
    texts = [
        "the files of --data-path, --valid-data-path",
        "the files that the tasks of --eval-tasks name",
        "the checkpoint in --load",
    ]
    facts, [warning] = assumed_facts(EVERYTHING, Typed(values))
    tokenizer = told if "tokenizer" in told else ""
    parts = [*([told] if told and not tokenizer else []), *texts, *([tokenizer] if tokenizer else [])]
    assert warning == f"--dry-run believes what this machine does not have: {'; '.join(parts)}"
    expected = dataclasses.replace(
        EVERYTHING, **{**always, **changed, "packages": frozenset({"transformer_engine", "fla", "wandb"})}
    )
    assert facts == expected


@pytest.mark.parametrize(
    "values", [{"device": "cuda"}, {"wandb_project": "p"}, {"transformer_impl": "transformer_engine"}]
)
def test_nothing_is_believed_of_a_machine_that_has_it(values: dict[str, Any]) -> None:
    facts = Facts(cuda_available=True, packages=frozenset({"transformer_engine", "wandb"}))
    assert assumed_facts(facts, Typed(values)) == (facts, [])
    assert list(believing._missing(Facts(), Typed({}))) == []
