"""lm-evaluation-harness: a checkpoint, in its layout, and its export get the same scores."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.evaluation_tasks import write_tasks
from tests.support.hf_models import quiet_transformers
from tests.support.trained_models import TEXT, export, train_families, write_corpus

# Looked for, not imported: that takes seconds, and the ranks do it.
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("lm_eval", "accelerate")),
    reason="lm-evaluation-harness is not installed: pip install 'lm_eval[hf]'",
)
quiet_transformers()

CONTEXTS = [TEXT[:9], TEXT[420:440], TEXT[900:930], TEXT[300:500]]
"""The last one is longer than the model's 64 positions."""
GENERATION = {"until": ["\n", "."], "max_gen_toks": 24, "do_sample": False}
TASKS = ["local_choices", "local_rolling"]


def _write_yaml(folder: Path, files: dict[str, str]) -> None:
    common = {"dataset_path": "json", "test_split": "test"}
    choices = {
        **common,
        "task": TASKS[0],
        "dataset_kwargs": {"data_files": {"test": files["choices"]}},
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    rolling = {
        **common,
        "task": TASKS[1],
        "dataset_kwargs": {"data_files": {"test": files["documents"]}},
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    }
    for task in (choices, rolling):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(task))


def _instances(arguments: list[tuple[Any, ...]], kind: str) -> list[Any]:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]  # pyright: ignore


def _asked(model: Any) -> list[Any]:
    """Return what the model makes of contexts, and scores of texts after them."""
    made = model.generate_until(_instances([(context, dict(GENERATION)) for context in CONTEXTS], "generate_until"))
    pairs = [(context + " ", "the text") for context in CONTEXTS]
    pairs += [("", "the text"), ("", "t"), ("naïve ", "数 🙂"), (TEXT[:62], TEXT[62:64]), (TEXT[:63], TEXT[63:66])]
    return [made, [tuple(pair) for pair in model.loglikelihood(_instances(pairs, "loglikelihood"))]]


def _ours(flags: list[str], folder: str) -> Any:
    from megatron_ext.plugins.tasks.harness import HarnessModel, evaluate
    from megatron_ext.plugins.tasks.leader import Leader, follow
    from megatron_ext.plugins.tasks.trained_model import load_trained

    model = load_trained([*flags, "--device", "cpu"])
    if model.rank != 0:
        follow(model)
        return None
    leader = Leader(model)
    results = evaluate(leader, TASKS, 4, include_path=folder)
    asked = _asked(HarnessModel(leader, 4))
    leader.close()
    return results, asked


def _theirs(exported: str, folder: str) -> Any:
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    model: Any = HFLM(pretrained=exported, device="cpu", dtype="float32", batch_size=4)
    run: Any = lm_eval.simple_evaluate
    found = run(model=model, tasks=TASKS, task_manager=TaskManager(include_path=folder), bootstrap_iters=0)
    return found["results"], _asked(model)


def test_scores_are_those_of_the_export(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    run_ranks(1, train_families, str(tmp_path), ["Llama"], 80)
    files = write_tasks(tmp_path, 40)
    _write_yaml(tmp_path, files)
    settings = {"HF_HOME": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    exported = export(tmp_path, "Llama")
    [(theirs, they_made)] = run_ranks(1, _theirs, exported, str(tmp_path), fresh=True, environment=settings)
    for layout in ([], ["--tensor-model-parallel-size", "2"]):
        flags = ["--load", str(tmp_path / "Llama"), *layout]
        ours, we_made = run_ranks(1 + bool(layout), _ours, flags, str(tmp_path), environment=settings)[0]
        for name in ("acc,none", "acc_norm,none"):
            assert ours[TASKS[0]][name] == theirs[TASKS[0]][name]
        for name in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
            assert ours[TASKS[1]][name] == pytest.approx(theirs[TASKS[1]][name], rel=1e-6)
        assert we_made[0] == they_made[0]
        for (likelihood, greedy), (their_likelihood, their_greedy) in zip(we_made[1], they_made[1], strict=True):
            assert likelihood == pytest.approx(their_likelihood, rel=1e-5)
            assert greedy == their_greedy
