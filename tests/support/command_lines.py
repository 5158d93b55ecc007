"""Command lines of every tool, which together have each of its flags with a value that is not its default.

The numbers of a line are all different, so that two flags that are swapped show.
"""

import importlib
import shlex
from collections.abc import Callable
from typing import Any

from megatron_ext.cli.main import COMMANDS

TOKENIZER = (
    "--tokenizer-type TikTokenizer --tokenizer-model model.json --vocab-size 31 --vocab-file v.json --merge-file m.txt "
    "--tokenizer-special-tokens <a> <b> --tiktoken-pattern v1 --tiktoken-num-special-tokens 17"
)
TOKENIZER_VALUES: dict[str, Any] = {
    "tokenizer_type": "TikTokenizer",
    "tokenizer_model": "model.json",
    "vocab_size": 31,
    "vocab_file": "v.json",
    "merge_file": "m.txt",
    "tokenizer_special_tokens": ("<a>", "<b>"),
    "tiktoken_pattern": "v1",
    "tiktoken_num_special_tokens": 17,
}

LINES: dict[str, list[str]] = {
    "preprocess": [
        f"--input a b --output-prefix out {TOKENIZER} --json-keys turns --data-format messages --chat-template chatml "
        "--seq-length 64 --train-on-inputs --append-eod --split-on <> --workers 3 --on-error log --plain-tokenizer "
        "--commit-interval 7 --log-interval 50"
    ],
    "train-tokenizer": [
        "--input a b --output-dir out --vocab-size 300 --type sentencepiece-unigram --json-keys body --max-bytes 30",
        "--input a --output-dir out --vocab-size 301 --max-bytes 120",
    ],
    "merge-datasets": ["--input parts --output-prefix out --accept-other-tokenizer"],
    "inspect-dataset": [
        "show data",
        "verify data --vocab-size 0",
        f"document data 4 {TOKENIZER}",
        "document data 0",
        "sample --sample 0 --color always --seed 3",
        "sample --step 2",
    ],
    "convert": [
        "to-hf --load ours --save theirs --dtype bf16 --max-shard-size 7MB --no-tokenizer --check-loss corpus "
        "--check-samples 5",
        "to-hf --load ours --save theirs --no-verify --skip-tokenizer-check",
        "from-hf --load theirs --save ours",
    ],
    "inspect-checkpoint": ["ls a", "show a", "verify a", "diff a b"],
    "tasks": [
        "--task LAMBADA --valid-data a.jsonl b.jsonl --strict-lambada --results out.json --load ckpt",
        "--task PERPLEXITY --valid-data a.jsonl --overlapping-eval 5 --load ckpt",
        "--eval-tasks tasks.yaml --load ckpt",
        "--task LM_EVAL --lm-eval-tasks arc boolq --include-path folder --num-fewshot 0 --limit 70 --load ckpt",
    ],
    "generate": [
        "--prompts one three --chat-template chatml --num-tokens-to-generate 5 --temperature 0.7 --top-k 11 "
        "--top-p 0.9 --min-p 0.2 --repetition-penalty 1.3 --stop END STOP --ignore-eod --seed 21 --max-batch-size 6 "
        "--output made.jsonl --load ckpt",
        "--prompt-file prompts.txt --stream --load ckpt",
    ],
    "sample": ["--model folder --prompt if --max-new-tokens 5 --temperature 0 --seed 21"],
    "show": ["a b --html page.html", "a --html page.html"],
    "compare": ["a.jsonl b.jsonl"],
    "replay-step": ["run 7 --metrics m.jsonl --device cuda --tolerance 0.5"],
    "parity": ["--steps 5 --world-size 6 --tolerance 0.25 --device cuda -- --num-layers 2"],
    "plan": [
        "--world-size 24 --device a100 --device-memory-gb 33 --memory-share 0.7 --gpus-per-node 3 --efficiency 0.41 "
        "--link-efficiency 0.52 --peak-tflops 210 --memory-bandwidth-gb-s 1234 --intra-node-gb-s 77 "
        "--inter-node-gb-s 11 --hf-config hf --grad-reduce-in-bf16 --calibrate m.jsonl "
        "--calibrate-flags '--num-layers 9' --processor-cores 13 --number 6 --limits --json found.json "
        "-- --num-layers 2 --bf16",
        "--evaluate -- --num-layers 2 --world-size 12",
    ],
    "draw-pipeline": [
        "--stages 3 --chunks 2 --microbatches 11 --group 4 --width 90 --html page.html",
        "--run run --step 7 --pipeline 1 --trace trace.json",
        "--world-size 60 --device a100 --gpus-per-node 6 --microbatches 9 -- ",
    ],
    "doctor": [
        "--nproc-per-node 3 --nnodes 5 -- --num-layers 2",
        "--collectives --timeout 7 --megabytes 11 --device cpu",
        "--flight-recorder hang-7",
    ],
    "import-config": ["--from axolotl --world-size 6 --data-path data config.yaml"],
    "api": ["train", "--output pages"],
    "completion": ["words convert", "zsh"],
}
WITHOUT_FLAGS_OF_THEIR_OWN = {"pretrain", "prepare-cache"}


def line_of(program: str, number: int = 0) -> list[str]:
    """Return the words of one of a tool's lines."""
    return shlex.split(LINES[program][number])


def main_of(program: str) -> Callable[[list[str]], int]:
    """Return the `main` of a tool."""
    return importlib.import_module(f"megatron_ext.cli.{COMMANDS[program][0]}").main
