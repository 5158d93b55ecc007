"""Measures tokens per second of tasks/generate.py's engine, with and without its cache, beside transformers' own.

    python benchmarks/generate.py                                # a table
    python benchmarks/generate.py --output benchmarks/results    # and JSON and Markdown of it

Models with random weights are written by transformers and read by both (ours by --load-hf), each in a process of its
own with one thread, in fp32, greedily, from 4 prompts of unequal lengths. The two take turns: a first generation warms
up, then each turn of one follows a turn of the other. Tokens a second are those of the fastest turn; on a machine that
does other work, seconds of CPU say more, and the ratio of neighbouring turns in them is the median of all turns.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, keep, sentence
from megatron_ext.forkserver.ranks import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "4 layers of 128": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4},
    "8 layers of 512": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
}
_VOCABULARY = 8192
WAYS = ("ours", "transformers", "ours, without cache", "transformers, without cache")
LENGTHS = (7, 64, 31, 16)


def write_model(folder: str, sizes: dict[str, Any]) -> None:
    """Write a Llama model with random weights. In a process of its own, as all that transformers does here."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=_VOCABULARY, max_position_embeddings=1024)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Return prompts of unequal lengths."""
    return [[(7919 * place + 101 * row) % _VOCABULARY for place in range(n)] for row, n in enumerate(LENGTHS)]


def ours(folder: str) -> Callable[[int, bool], list[list[int]]]:
    """Return what generates so many tokens, with a cache or without."""
    from megatron_ext.plugins.tasks.trained_model import load_trained

    model = load_trained(["--load-hf", folder, "--device", "cpu", "--seq-length", "1024"])
    # Only now may megatron-core be imported.
    from megatron_ext.plugins.tasks.generation import generate
    from megatron_ext.plugins.tasks.sampling import Sampling

    return lambda tokens, cached: [
        one.tokens for one in generate(model, prompts(), Sampling(max_new_tokens=tokens), cached=cached)
    ]


def theirs(folder: str) -> Callable[[int, bool], list[list[int]]]:
    """Return the same of transformers' generate."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows, width = prompts(), max(LENGTHS)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

    def generate(tokens: int, cached: bool) -> list[list[int]]:
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=cached,
                pad_token_id=0,
                eos_token_id=None,
            )
        return made[:, width:].tolist()

    return generate


class Worker:
    """A process that generates when it is asked to."""

    def __init__(self, way: Callable[[str], Callable[[int, bool], list[list[int]]]], folder: str):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, way, folder), daemon=True)
        self._process.start()

    def __call__(self, tokens: int, cached: bool) -> tuple[float, float, list[list[int]]]:
        """Return seconds, seconds of CPU, and the tokens."""
        self._pipe.send((tokens, cached))
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def _work(pipe: Any, way: Callable[[str], Callable[[int, bool], list[list[int]]]], folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    generate = way(folder)
    while (asked := pipe.recv()) is not None:
        begin, used = time.perf_counter(), time.process_time()
        made = generate(*asked)
        pipe.send((time.perf_counter() - begin, time.process_time() - used, made))


def measure(folder: str, turns: int, tokens: int) -> dict[str, Any]:
    """Return the seconds of all turns of each way, and whether all made the same."""
    workers = [Worker(way, folder) for way in (ours, theirs)]
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    made = {}
    for cached, count in ((True, turns), (False, 1)):
        for worker in workers:
            worker(8, cached)
        for _ in range(count):
            for name, worker in zip(WAYS[:2] if cached else WAYS[2:], workers, strict=True):
                wall, cpu, made[name] = worker(tokens, cached)
                seconds[name].append((wall, cpu))
    for worker in workers:
        worker.close()
    return {"seconds": seconds, "same_tokens": all(made[way] == made[WAYS[0]] for way in WAYS)}


def _table(results: dict[str, Any], tokens: int) -> str:
    lines = [
        "| model | | tokens a second, fastest turn | tokens a second of CPU, median | as fast as transformers |",
        "|---|---|---|---|---|",
    ]
    for name, found in results.items():
        for way, other in zip(WAYS, (WAYS[1], WAYS[1], WAYS[3], WAYS[3]), strict=True):
            turns, others = found["seconds"][way], found["seconds"][other]
            ratio = statistics.median(theirs[1] / own[1] for own, theirs in zip(turns, others, strict=True))
            made = tokens * len(LENGTHS)
            fastest = made / min(wall for wall, _ in turns)
            median = made / statistics.median(cpu for _, cpu in turns)
            lines.append(f"| {name} | {way} | {fastest:.0f} | {median:.0f} | {ratio:.2f} |")
    same = all(found["same_tokens"] for found in results.values())
    return "\n".join([*lines, "", f"All made the same tokens: {'yes' if same else 'NO'}."])


def main() -> None:
    """Measure, and print or keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns of each way with a cache")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that each prompt gets")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="sizes to measure")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="keep the results there")
    options = parser.parse_args()
    record: dict[str, Any] = {**heading(), "tokens": options.tokens, "results": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            place = f"{folder}/{name.replace(' ', '-')}"
            run_ranks(1, write_model, place, MODELS[name], fresh=True)
            record["results"][name] = measure(place, options.turns, options.tokens)
    table = _table(record["results"], options.tokens)
    print(table)
    if options.output:
        intro = f"Tokens per second of 4 prompts together, {options.tokens} each; fp32, one thread. {sentence(record)}"
        keep(options.output, "generate", record, f"# Generation\n\n{intro}\n\n{table}\n")


if __name__ == "__main__":
    main()
