#!/usr/bin/env python3
"""Measures training steps of one CPU process against transformers' own classes, from the same weights and tokens.

    python benchmarks/hf_training.py --output benchmarks/results             # all families, some 15 minutes
    python benchmarks/hf_training.py --families llama mamba2 --rounds 5

Each model has 4 layers of 256 channels and is trained on 4 x 256 tokens in fp32 with fused AdamW, clipping and no
dropout. transformers writes its initial weights, which ours reads by --load-hf, and is given the batches of ours;
the losses of the first steps must agree within 1e-5, or nothing is reported. transformers runs eager and compiled, a
mixture of experts by each of its implementations, and compiled by the one that copes with changing numbers of tokens;
ours eager, and compiled where --torch-compile is not refused. fla-core, whose kernels are for GPUs, is hidden from
transformers.

Every contestant has a process of its own, and they take turns in blocks of steps, each round in another order
(`cpu_speed.py`). A figure is the median, over the rounds, of the ratio of two neighboring blocks, by the clock and by
processor time: on a machine that others use as well only the second says something. Memory is the peak of the
process, less what it held after its imports.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_speed import TOLERANCE, Block, Turns, start
from benchmarks.recording import heading, keep, sentence

LAYERS, HIDDEN, VOCABULARY, BATCH, SEQUENCE = 4, 256, 1024, 4, 256
COMPARED = 3
"""Steps of the first turn, which warms up and whose losses are compared."""
FLAGS = (
    f"--device cpu --mock-data --num-workers 0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    f"--seq-length {SEQUENCE} --micro-batch-size {BATCH} --global-batch-size {BATCH} --eval-interval 0 --lr 1e-4 "
    "--lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 100 "
    "--hidden-dropout 0 --attention-dropout 0 --moe-aux-loss-coeff 0"
)
_COMMON = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_POSITIONS = {"max_position_embeddings": SEQUENCE}
_HEADS = _POSITIONS | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 704}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_LATENT = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64}
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "gemma3_text": _HEADS | {"sliding_window": 128, "query_pre_attn_scalar": 64},
    "qwen3_moe": _HEADS | _EXPERTS,
    "deepseek_v3": _HEADS
    | _LATENT
    | _ROUTED
    | {"num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 256, "first_k_dense_replace": 1},
    "qwen3_next": _HEADS | _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 256},
    "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1, "expand": 2, "chunk_size": 64},
}
"""Settings of each family's config.json besides those that all have."""

EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3", "qwen3_next")


@dataclass(frozen=True)
class Contestant:
    name: str
    ours: bool
    compiled: bool = False
    experts: str | None = None
    """transformers' `experts_implementation`."""


def contestants(family: str) -> list[Contestant]:
    """Return the contestants of a family, ours in eager mode first."""
    has_experts = family in WITH_EXPERTS
    kinds = EXPERTS_IMPLEMENTATIONS if has_experts else (None,)
    theirs = [Contestant("transformers" + (f", {kind}" if kind else ""), False, experts=kind) for kind in kinds]
    # The others compile every number of tokens of an expert anew, or copy its matrices for each token.
    fit = [one for one in theirs if one.experts in (None, "grouped_mm")]
    theirs += [replace(one, name=f"{one.name}, compiled", compiled=True) for one in fit]
    ours = [Contestant("ours", True), *([] if has_experts else [Contestant("ours, compiled", True, True)])]
    return [*ours, *theirs]


def write_folder(family: str, folder: Path) -> None:
    """Write a model of the family with weights of a fixed seed, as transformers begins them."""
    import torch

    transformers = _transformers()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(_config(transformers, family))
    model.save_pretrained(folder)


def _config(transformers: Any, family: str) -> Any:
    return transformers.AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family]})


def _transformers() -> Any:
    """Import transformers without fla-core."""
    sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    import transformers
    from transformers.utils import import_utils

    import_utils.is_flash_linear_attention_available = lambda: False
    transformers.logging.set_verbosity_error()
    return transformers


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_ours(pipe: Connection, contestant: Contestant, folder: str, steps: int) -> None:
    """Train by the real program, stopped between blocks by a callback."""
    from megatron_ext import device

    device.install("cpu")
    from megatron_ext.train.from_python import pretrain
    from megatron_ext.train.step import StepResult
    from megatron_ext.train.trainer import Callback, Trainer

    turns, imported = Turns(pipe), _peak()

    class TakesTurns(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            if trainer.run.state.iteration == 0:
                batches: list[Any] = [
                    trainer.run.loaders.train.global_batch(step * BATCH, 1)[0] for step in range(steps)
                ]
                pipe.send([(batch.tokens.numpy(), batch.labels.numpy()) for batch in batches])
            turns.before_step()

        def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
            turns.after_step(result.loss)

    compiles = ["--torch-compile"] if contestant.compiled else []
    pretrain([*FLAGS.split(), "--load-hf", folder, "--train-iters", str(steps), *compiles], callbacks=[TakesTurns()])
    pipe.send(_peak() - imported)


def run_theirs(pipe: Connection, contestant: Contestant, folder: str, steps: int) -> None:
    """Train transformers' class on the batches that come through the pipe."""
    import torch

    transformers = _transformers()
    batches = pipe.recv()
    torch._dynamo.config.recompile_limit = 64  # numbers of tokens of experts
    settings = {} if contestant.experts is None else {"experts_implementation": contestant.experts}
    imported = _peak()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    compute = torch.compile(model) if contestant.compiled else model
    turns = Turns(pipe)
    for tokens, labels in batches[:steps]:
        turns.before_step()
        given = torch.from_numpy(labels)
        loss = compute(input_ids=torch.from_numpy(tokens), labels=given, shift_labels=given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.after_step(loss.item())
    pipe.send(_peak() - imported)


def measure(family: str, rounds: int, block: int) -> dict[str, Any]:
    """Return what was measured of a family: for each contestant its row, or why it did not take part."""
    steps = COMPARED + rounds * block
    entered, failed, blocks, memory = contestants(family), {}, {}, {}
    pipes: dict[str, Connection] = {}
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        _in_a_process(write_folder, family, Path(folder))
        batches: Any = None
        try:
            for one in entered:
                pipes[one.name], process = start(run_ours if one.ours else run_theirs, one, folder, steps)
                processes.append(process)
                try:
                    if one.ours:
                        batches = pipes[one.name].recv()
                    else:
                        pipes[one.name].send(batches)
                    pipes[one.name].send(COMPARED)
                    blocks[one.name] = [pipes[one.name].recv()]
                except (EOFError, BrokenPipeError):
                    failed[one.name] = "it failed"
            names = [one.name for one in entered if one.name in blocks]
            for number in range(rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    pipes[name].send(block)
                    blocks[name].append(pipes[name].recv())
            memory = {name: pipes[name].recv() for name in names}
        finally:
            for process in processes:
                process.kill()
    return {"rows": _rows(blocks, memory), "failed": failed, "blocks": blocks, "difference": _difference(blocks)}


def _in_a_process(function: Any, *arguments: Any) -> None:
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__} has failed")


def _difference(blocks: dict[str, list[Block]]) -> dict[str, float]:
    """Return for each contestant the largest difference of its first losses from ours."""
    [reference, *_] = (of[0].losses for of in blocks.values())
    return {name: max(abs(a - b) for a, b in zip(reference, of[0].losses, strict=True)) for name, of in blocks.items()}


def _rows(blocks: dict[str, list[Block]], memory: dict[str, int]) -> dict[str, dict[str, float]]:
    ours = blocks["ours"][1:]
    rows = {}
    for name, (_, *timed) in blocks.items():
        rows[name] = {
            "ms": statistics.median(1e3 * one.seconds / len(one.losses) for one in timed),
            "cpu_ms": statistics.median(1e3 * one.cpu_seconds / len(one.losses) for one in timed),
            "times_ours": statistics.median(b.seconds / a.seconds for a, b in zip(ours, timed, strict=True)),
            "times_ours_by_cpu_time": statistics.median(
                b.cpu_seconds / a.cpu_seconds for a, b in zip(ours, timed, strict=True)
            ),
            "memory_mb": memory[name] / 2**20,
        }
    return rows


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = [
        f"# Training steps against transformers {record['transformers']} on a CPU, {record['date']}",
        "",
        f"{sentence(record)} {record['threads']} threads, vectors: {record['vectors']}. `{record['command']}`: "
        f"{LAYERS} layers of {HIDDEN}, {BATCH} x {SEQUENCE} tokens, {record['rounds']} rounds of {record['block']} "
        "steps in turns. Times are by multiples of those of ours in eager mode: more than 1 is slower than ours.",
    ]
    for family, found in record["families"].items():
        lines += [
            "",
            f"## {family}",
            "",
            "| | ms a step | CPU ms a step | time by ours | CPU time by ours | memory, MB | losses differ by |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in found["rows"].items():
            lines.append(
                f"| {name} | {row['ms']:.1f} | {row['cpu_ms']:.1f} | {row['times_ours']:.3f} | "
                f"{row['times_ours_by_cpu_time']:.3f} | {row['memory_mb']:.0f} | {found['difference'][name]:.0e} |"
            )
        lines += [f"| {name} | {why} | | | | | |" for name, why in found["failed"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=4, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    import torch

    record: dict[str, Any] = heading() | {
        "command": "python benchmarks/hf_training.py",
        "threads": given.threads,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "transformers": _transformers().__version__,
        "rounds": given.rounds,
        "block": given.block,
        "families": {},
    }
    for family in given.families:
        found = measure(family, given.rounds, given.block)
        far = {name: value for name, value in found["difference"].items() if not value <= TOLERANCE}
        if far:
            sys.exit(f"{family}: the losses differ from ours by {far}, more than {TOLERANCE}: not the same training")
        found["blocks"] = {name: [asdict(one) for one in of] for name, of in found["blocks"].items()}
        record["families"][family] = found
        if given.output is not None:  # what there is by now: a family that fails loses none of those before it
            keep(given.output, "hf_training", record, report(record))
        print(report(record | {"families": {family: found}}), flush=True)


if __name__ == "__main__":
    main()
