"""Measures tokens per second of tasks/generate.py's engine, with and without its cache, beside transformers' own.

    python benchmarks/generate.py                                # a table
    python benchmarks/generate.py --output benchmarks/results    # and JSON and Markdown of it

Models with random weights are written by transformers and read by both (ours by --load-hf), on one process and one
thread, in fp32, greedily, from 4 prompts of unequal lengths. The ways take turns, each turn in a process of its own:
a first generation warms up, the second is timed. States the fastest turn of each, and whether all ways made the same
tokens.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, keep, sentence
from megatron_ext.verify.ranks import run_ranks

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


def ours(folder: str, tokens: int, cached: bool) -> tuple[float, list[list[int]]]:
    """Return the seconds of the second generation, and its tokens."""
    from megatron_ext.inference.generation import generate
    from megatron_ext.inference.sampling import Sampling
    from megatron_ext.train.trained_model import load_trained

    model = load_trained(["--load-hf", folder, "--device", "cpu", "--seq-length", "1024"])
    generate(model, prompts(), Sampling(max_new_tokens=8), cached=cached)
    begin = time.perf_counter()
    made = generate(model, prompts(), Sampling(max_new_tokens=tokens), cached=cached)
    return time.perf_counter() - begin, [one.tokens for one in made]


def theirs(folder: str, tokens: int, cached: bool) -> tuple[float, list[list[int]]]:
    """Return the same of transformers' generate."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows, width = prompts(), max(LENGTHS)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    made = torch.empty(0)
    begin = 0.0
    for count in (8, tokens):
        begin = time.perf_counter()
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                do_sample=False,
                use_cache=cached,
                pad_token_id=0,
                eos_token_id=None,
            )
    return time.perf_counter() - begin, made[:, width:].tolist()


def measure(folder: str, turns: int, tokens: int) -> dict[str, Any]:
    """Return tokens per second of each way, in its fastest turn, and whether all made the same."""
    best: dict[str, float] = {}
    made = {}
    for turn in range(turns):
        for way in WAYS:
            if "without" in way and turn > 0:
                continue  # several times as long, and further from the others than turns differ
            function = ours if way.startswith("ours") else theirs
            [(seconds, made[way])] = run_ranks(1, function, folder, tokens, "without" not in way, fresh=True)
            best[way] = min(best.get(way, seconds), seconds)
    rates = {way: round(tokens * len(LENGTHS) / seconds, 1) for way, seconds in best.items()}
    return {"tokens_per_second": rates, "same_tokens": all(made[way] == made[WAYS[0]] for way in WAYS)}


def _table(results: dict[str, Any]) -> str:
    head = [f"| model | {' | '.join(WAYS)} | same tokens |", "|---" * (len(WAYS) + 2) + "|"]
    rows = [
        f"| {name} | {' | '.join(str(found['tokens_per_second'][way]) for way in WAYS)} | {found['same_tokens']} |"
        for name, found in results.items()
    ]
    return "\n".join([*head, *rows])


def main() -> None:
    """Measure, and print or keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of each way with a cache")
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
    table = _table(record["results"])
    print(table)
    if options.output:
        intro = f"Tokens per second of 4 prompts together, {options.tokens} each; fp32, one thread. {sentence(record)}"
        keep(options.output, "generate", record, f"# Generation\n\n{intro}\n\n{table}\n")


if __name__ == "__main__":
    main()
