"""Task files of generated items, and what plain loops over transformers' model of an export make of them."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.trained_models import TEXT

LENGTH = 64
"""Tokens that the models are given at once."""
STRIDE = 24
EOD = 256
PROMPTS = [TEXT[start : start + length] for start, length in ((0, 3), (400, 17), (700, 40), (1100, 9))]
NEW_TOKENS = 256


def write_tasks(folder: Path, items: int, longest: int = 40) -> dict[str, str]:
    """Write files of each task, with choices of at most `longest` characters, and return their paths."""
    source = random.Random(5)
    words = [word for word in TEXT.split() if len(word) < 24]  # one of them is an alphabet

    def phrase(least: int, most: int) -> str:
        start = source.randrange(len(words) - most)
        return " ".join(words[start : start + source.randrange(least, most)])

    texts = [phrase(2, 14) for _ in range(items)]
    questions = []
    for _ in range(items):
        choices = [f" {phrase(1, 5)}"[:longest] for _ in range(source.randrange(2, 5))]
        answer = source.randrange(len(choices))
        questions.append({"prompt": phrase(1, 12), "choices": choices, "answer": answer})
    documents = [phrase(1, 60) for _ in range(max(7, items // 20))]
    written = {"lambada": texts, "documents": documents}
    paths = {name: folder / f"{name}.jsonl" for name in (*written, "choices")}
    for name, values in written.items():
        paths[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in values))
    paths["choices"].write_text("".join(json.dumps(question) + "\n" for question in questions))
    return {name: str(path) for name, path in paths.items()}


def our_results(tasks: Sequence[dict[str, Any]]) -> list[Any]:
    """On ranks: load, and do what each of the tasks asks for, one model after the other."""
    from tests.support.several_models import in_turn

    return in_turn(_ours, list(tasks))


def _ours(task: dict[str, Any]) -> dict[str, Any]:
    from megatron_ext.plugins.tasks.eval_tasks import EvalTask
    from megatron_ext.plugins.tasks.generation import generate
    from megatron_ext.plugins.tasks.sampling import Sampling
    from megatron_ext.plugins.tasks.tasks import evaluate_task
    from megatron_ext.plugins.tasks.trained_model import load_trained

    model = load_trained([*task["flags"], "--device", "cpu", "--micro-batch-size", "5"])
    assert model.iteration == task.get("iteration")
    files, found = task["files"], {}
    evaluations: list[tuple[str, str, str, dict[str, Any]]] = [
        ("perplexity", "PERPLEXITY", "documents", {}),
        ("overlapping", "PERPLEXITY", "documents", {"overlapping_eval": STRIDE}),
        ("lambada", "LAMBADA", "lambada", {}),
        ("strict", "LAMBADA", "lambada", {"strict_lambada": True}),
        ("choices", "MULTIPLE_CHOICE", "choices", {}),
    ]
    for name, kind, file, options in evaluations:
        if files is not None and name in task.get("only", (name,)):
            found[name] = evaluate_task(model, EvalTask(name, kind, (files[file],), **options), 5)
    if task.get("generates"):
        prompts = [list(prompt.encode()) for prompt in PROMPTS]
        sampling = Sampling(max_new_tokens=task["generates"], ignore_eod=True)
        made = generate(model, prompts, sampling, cached=task.get("cached", True))
        found["generated"] = [one.tokens for one in made]
    return found


def their_results(exports: dict[str, str], files: dict[str, str], tokens: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The same of each exported model by transformers, in plain loops, with so many generated tokens of each. In a
    process of its own."""
    return {family: _theirs(folder, files, tokens[family]) for family, folder in exports.items()}


def _theirs(folder: str, files: dict[str, str], new_tokens: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    def scored(tokens: list[int], count: int) -> tuple[float, bool]:
        tokens = tokens[-(LENGTH + 1) :]
        targets = torch.tensor(tokens[-count:])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0, -count:].float()
        found = logits.log_softmax(-1).gather(-1, targets[:, None])
        return found.double().sum().item(), bool((logits.argmax(-1) == targets).all())

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(files[name]).read_text().splitlines()]

    documents = [row["text"] for row in rows("documents")]
    plain = [_in_windows(list(text.encode()), LENGTH, scored) for text in documents]
    overlapping = [_in_windows(list(text.encode()), STRIDE, scored) for text in documents]
    texts = [row["text"] for row in rows("lambada")]
    last = [scored(list(text.encode()), 1)[1] for text in texts]
    strict = [scored(list(text.encode()), len(text.split()[-1].encode()) + 1)[1] for text in texts]
    best, best_normalized = 0, 0
    for row in rows("choices"):
        values = [scored(list((row["prompt"] + one).encode()), len(one.encode()))[0] for one in row["choices"]]
        lengths = [len(one) for one in row["choices"]]
        best += max(range(len(values)), key=lambda i: values[i]) == row["answer"]
        best_normalized += max(range(len(values)), key=lambda i: values[i] / lengths[i]) == row["answer"]
    return {
        "nats": -math.fsum(plain),
        "overlapping_nats": -math.fsum(overlapping),
        "tokens": sum(len(text.encode()) for text in documents),
        "words": sum(len(text.split()) for text in documents),
        "last": sum(last),
        "strict": sum(strict),
        "best": best,
        "best_normalized": best_normalized,
        "generated": _generated(model, new_tokens),
    }


def _in_windows(tokens: list[int], stride: int, scored: Any) -> float:
    """Log-likelihood of a document: the first LENGTH tokens at once, then `stride` at a time."""
    whole, total, done = [EOD, *tokens], 0.0, 0
    while done < len(tokens):
        count = min(LENGTH if done == 0 else stride, len(tokens) - done)
        done += count
        total += scored(whole[: done + 1], count)[0]
    return total


def _generated(model: Any, new_tokens: int) -> list[list[int]]:
    import torch

    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return made[:, width:].tolist()


def narrowed_alike(seeds: int) -> bool:
    """Whether what we leave out of the distributions is what transformers' processors do, to the bit. In a process of
    its own."""
    import torch
    from transformers.generation import logits_process as theirs

    from megatron_ext.plugins.tasks.sampling import Sampling, narrowed, penalized

    for seed in range(seeds):
        torch.manual_seed(seed)
        scores, ids = 3.0 * torch.randn(4, 50), torch.randint(50, (4, 9))
        sampling = Sampling(temperature=0.7, top_k=20 + seed, top_p=0.5 + 0.04 * seed, min_p=0.01 * seed)
        used = torch.zeros(4, 50, dtype=torch.bool).scatter(1, ids, True)
        ours = narrowed(penalized(scores, used, 1.3), sampling)
        warpers: list[Any] = [
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
            theirs.TemperatureLogitsWarper(sampling.temperature),
            theirs.TopKLogitsWarper(sampling.top_k),
            theirs.TopPLogitsWarper(sampling.top_p),
            *([theirs.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []),
        ]
        for warper in warpers:
            scores = warper(ids, scores)
        if not torch.equal(ours, scores) or ours.isinf().all(-1).any() or not ours.isinf().any():
            return False
    return True
