"""Measures small and medium collectives between CPU ranks: through shared memory, and over gloo.

    python benchmarks/collectives.py --ranks 2 4 --output benchmarks/results

Both take turns in the same processes, one thread each. For each operation and size: clock microseconds of one, and
processor microseconds that a rank spends on it, both the median of --turns turns. --training adds milliseconds of a
step of the quickstart's model as TP2 x PP2 x VPP2 x DP2 on 8 processes, and processor milliseconds of all ranks.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence
from megatron_ext.verify.ranks import run_ranks

BYTES = (256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
CALLS = 100
STEPS = 4
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 2048 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 1000 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --eval-interval 0 "
    "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2"
)


def _operations(size: int) -> dict[str, Callable[[], Any]]:
    """Return each operation on tensors of `size` bytes (a rank's part, of gathers; the whole, of scatters)."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(size // 4)
    gathered, part, message = torch.ones(ranks * size // 4), torch.ones(size // 4 // ranks), torch.ones(size // 4)

    def pass_on() -> None:
        for work in (dist.isend(tensor, (rank + 1) % ranks), dist.irecv(message, (rank - 1) % ranks)):
            assert work is not None
            work.wait()

    return {
        "all-reduce": lambda: dist.all_reduce(tensor),
        "all-gather": lambda: dist.all_gather_into_tensor(gathered, tensor),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "message to the next rank": pass_on,
    }


def measure(turns: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return this rank's rows."""
    import torch
    import torch.distributed as dist

    from megatron_ext import device
    from megatron_ext.device.shared_memory.replaced import left_to_gloo

    device.install("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for size in sizes:
        for name, call in _operations(size).items():
            taken: dict[str, list[tuple[float, float]]] = {"shared": [], "gloo": []}
            for _ in range(turns):
                for how, seconds in taken.items():
                    with left_to_gloo() if how == "gloo" else contextlib.nullcontext():
                        seconds.append(_one_turn(call))
            row: dict[str, Any] = {"ranks": dist.get_world_size(), "operation": name, "bytes": size}
            for how, seconds in taken.items():
                row[f"{how}_clock_us"], row[f"{how}_cpu_us"] = (
                    round(statistics.median(values) * 1e6 / CALLS, 1) for values in zip(*seconds, strict=True)
                )
            rows.append(row)
    dist.destroy_process_group()
    return rows


def _one_turn(call: Callable[[], Any]) -> tuple[float, float]:
    """Return clock and processor seconds of CALLS calls, of all threads of this process."""
    import torch.distributed as dist

    call()
    dist.barrier()
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        call()
    return time.perf_counter() - clock, time.process_time() - cpu


def train(turns: int) -> dict[str, list[tuple[float, float]]]:
    """Return this rank's clock and processor seconds of a step, a pair for each turn."""
    import torch

    from megatron_ext import device
    from megatron_ext.device.shared_memory.replaced import left_to_gloo

    here = device.install("cpu")
    torch.set_num_threads(1)
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    run = build_run(configure(MODEL.split()).config, here)
    trainer = Trainer(run, [])
    trainer.step()
    taken: dict[str, list[tuple[float, float]]] = {"shared": [], "gloo": []}
    for _ in range(turns):
        for how, seconds in taken.items():
            with left_to_gloo() if how == "gloo" else contextlib.nullcontext():
                torch.distributed.barrier()
                clock, cpu = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    trainer.step()
                seconds.append(((time.perf_counter() - clock) / STEPS, (time.process_time() - cpu) / STEPS))
    run.loaders.close()
    return taken


def _training_text(turns: int) -> tuple[dict[str, float], str]:
    """Return what `train` measures on 8 ranks, and the same in words."""
    of_ranks = run_ranks(8, train, turns, environment={"OMP_NUM_THREADS": "1"})
    found: dict[str, float] = {}
    for how in ("shared", "gloo"):
        found[f"{how}_clock_ms"] = round(1000 * statistics.median(clock for clock, _ in of_ranks[0][how]), 1)
        cpu = [sum(rank[how][turn][1] for rank in of_ranks) for turn in range(turns)]
        found[f"{how}_cpu_ms"] = round(1000 * statistics.median(cpu), 1)
    return found, (
        f"A step of 8 ranks (TP2 x PP2 x VPP2 x DP2): {found['shared_clock_ms']:.0f} ms through shared memory and "
        f"{found['gloo_clock_ms']:.0f} ms over gloo; processor time of all ranks {found['shared_cpu_ms']:.0f} and "
        f"{found['gloo_cpu_ms']:.0f} ms."
    )


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| ranks | operation | bytes | shared: clock, CPU us | gloo: clock, CPU us | CPU, times |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        shared, gloo = (f"{row[f'{how}_clock_us']:.0f}, {row[f'{how}_cpu_us']:.0f}" for how in ("shared", "gloo"))
        times = row["gloo_cpu_us"] / max(row["shared_cpu_us"], 0.1)
        lines.append(f"| {row['ranks']} | {row['operation']} | {row['bytes']} | {shared} | {gloo} | {times:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(BYTES))
    parser.add_argument("--training", action="store_true", help="measure steps of 8 ranks, too")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args()
    record = heading()
    rows = []
    for ranks in options.ranks:
        rows += run_ranks(ranks, measure, options.turns, tuple(options.bytes), environment={"OMP_NUM_THREADS": "1"})[0]
        print(f"{ranks} ranks are measured", file=sys.stderr)
    text = "\n".join([sentence(record), "", *_table(rows)])
    if options.training:
        record["training"], words = _training_text(options.turns)
        text += f"\n\n{words}"
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        stem = options.output / f"collectives-{record['date']}"
        stem.with_suffix(".json").write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
        stem.with_suffix(".md").write_text(f"# Collectives between CPU ranks\n\n{text}\n")


if __name__ == "__main__":
    main()
