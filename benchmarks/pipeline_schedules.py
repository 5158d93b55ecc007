"""Measures bubble and live activations of pipeline orders, with megatron-core's schedules and stages that sleep.

    python benchmarks/pipeline_schedules.py --forward-ms 100 --write benchmarks/results/pipeline_schedules.json

Every stage is a process; its forward pass of a microbatch sleeps for --forward-ms and its backward pass for twice that,
a chunk of v for a v-th of it. Sends and receives are the real ones, over gloo. Sleeping takes no CPU, so that a busy
machine adds some milliseconds to steps of seconds and no more, and four stages need no four cores.

    python benchmarks/pipeline_schedules.py --stages 2 --products 40 --turns 5

computes in place of sleeping: so many products of matrices of 512 x 512 for a forward pass, and twice as many for a
backward pass. That says something where there is a core for each stage, and no other work. Orders take turns, so that
what slows the machine down for a while slows all of them; speed is the median over turns of 1F1B's time by the order's.

    naive         one microbatch at a time passes all stages, forward and back
    GPipe         all forward passes, then all backward passes: 1F1B with a warm-up of all microbatches
    1F1B          megatron-core's order without interleaving
    interleaved   megatron-core's order with v chunks per stage
    --pipeline-schedule's others, as torch's tables have them; half of a split backward pass sleeps when its turn comes

bubble = time that a stage waits over time that it works: p - 1 for naive, (p-1)/m, (p-1)/m, (p-1)/(v m). Live
activations are the forward passes whose backward pass is still to come, in units of one microbatch on one whole
stage, at their largest: 1, m, p on the first stage, and (2(p-1) + (v-1) p + 1)/v there with interleaving
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Of tables both are those of the planner's simulation.
"""

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.config.schema.layout_flags import SPLIT_SCHEDULES
from megatron_ext.cost.schedule import most_held, named
from megatron_ext.forkserver.ranks import run_ranks

TABLES = {"looped-bfs": 2, "interleaved-zero-bubble": 2, "zbv": 2, "dualpipe-v": 2}
"""Chunks of a stage by name of --pipeline-schedule."""
ORDERS = ("naive", "GPipe", "1F1B", "interleaved", *TABLES)


@dataclass(frozen=True)
class Outcome:
    """One order, as measured and by formula."""

    order: str
    seconds: float
    """Of the fastest step."""
    speed: float
    """Microbatches per second, by 1F1B's in the same turn: the median over turns."""
    bubble: float
    bubble_formula: float
    bubble_share: float
    """Share of the total time: b / (1 + b)."""
    most_live: list[float]
    """Live activations by stage."""
    first_stage_live_formula: float


def run_order(
    order: str, microbatches: int, chunks: int, forward_seconds: float, repeats: int, products: int = 0
) -> tuple[float, float, float, list[tuple[bool, int]]]:
    """Run on one rank; return the seconds of the fastest of some steps, and those of its work, the most live
    activations, in whole stages, and the order of the last step's passes: whether each was a forward pass, and of which
    chunk.

    Args:
        products: of matrices, for a forward pass; 0 for `forward_seconds` of sleep.
    """
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer import TransformerConfig

    from megatron_ext import device
    from megatron_ext.config.schema import LayoutConfig
    from megatron_ext.device import split_backward
    from megatron_ext.parallel import groups
    from megatron_ext.train.table_runtime import TableRuntime

    splits, factor, result = order in SPLIT_SCHEDULES, torch.ones(512, 512), torch.empty(512, 512)

    def work(forward_passes: int) -> None:
        """Do what so many forward passes of a chunk take."""
        begin = time.perf_counter()
        for _ in range(forward_passes * products // chunks):
            torch.mm(factor, factor, out=result)
        if not products:
            time.sleep(forward_passes * forward_seconds / chunks)
        Sleep.busy += time.perf_counter() - begin

    class Sleep(torch.autograd.Function):
        """The work of one chunk, and a count of the microbatches that it has in flight."""

        live = most = 0
        busy = 0.0
        worked: ClassVar[list[tuple[bool, int]]] = []

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.Tensor:  # pyright: ignore
            ctx.chunk = chunk
            Sleep.worked.append((True, chunk))
            Sleep.live += 1
            Sleep.most = max(Sleep.most, Sleep.live)
            work(1)
            return x + weight

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # pyright: ignore
            Sleep.worked.append((False, ctx.chunk))
            Sleep.live -= 1
            if splits:
                split_backward.due(gradient, lambda: work(1))
            work(1 if splits else 2)
            return gradient, gradient.sum(), None

    class Chunk(torch.nn.Module):
        def __init__(self, config: TransformerConfig, chunk: int | None):
            super().__init__()
            self.config, self.vp_stage, self.model_type = config, chunk, ModelType.encoder_or_decoder
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.input: torch.Tensor | None = None

        def set_input_tensor(self, given: Any) -> None:
            self.input = given[0] if isinstance(given, list) else given

        def forward(self) -> torch.Tensor:
            x = torch.zeros(1, 1, 8, requires_grad=True) if self.input is None else self.input
            return Sleep.apply(x, self.weight, self.vp_stage or 0)  # pyright: ignore[reportReturnType]

    class AllForwardFirst(P2PCommunicator):
        """Runs all forward passes first: megatron-core runs as many ahead as there are stages to come, and here there
        are many."""

        @property
        def total_stages(self) -> int:
            return self.current_stage + microbatches + 1

    def forward_step(_data: Any, model: torch.nn.Module) -> Any:
        return model(), lambda output: (output.sum(), {"loss": output.sum().detach()})

    world_size, here = int(os.environ["WORLD_SIZE"]), device.install("cpu")
    interleaved = chunks > 1
    layout = LayoutConfig(
        world_size=world_size,
        pipeline_model_parallel_size=world_size,
        num_virtual_stages_per_pipeline_rank=chunks if interleaved else None,
    )
    collection = groups.initialize(layout, here)
    config = TransformerConfig(
        num_layers=world_size * chunks,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=world_size,
        virtual_pipeline_model_parallel_size=chunks if interleaved else None,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        overlap_p2p_comm=interleaved,
        deallocate_pipeline_outputs=True,
    )
    model = [Chunk(config, chunk if interleaved else None) for chunk in range(chunks)]
    communicator = (AllForwardFirst if order == "GPipe" else P2PCommunicator)(collection.pp, config)
    schedule: Any = get_forward_backward_func(world_size, chunks if interleaved else None)
    if order in TABLES:
        table = partial(named, order, world_size, chunks)
        schedule = TableRuntime(table, table)

    def step(count: int) -> None:
        schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(())] * chunks,
            model=list(model),
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
            pg_collection=collection,
            p2p_communicator=communicator,
        )

    fastest = float("inf"), 0.0
    for _ in range(repeats):
        torch.distributed.barrier()
        Sleep.worked.clear()
        Sleep.busy = 0.0
        start = time.perf_counter()
        if order == "naive":
            for _ in range(microbatches):
                step(1)
        else:
            step(microbatches)
        torch.distributed.barrier()
        fastest = min(fastest, (time.perf_counter() - start, Sleep.busy))
    return *fastest, Sleep.most / chunks, Sleep.worked


def measure(
    order: str, stages: int, microbatches: int, chunks: int, forward_ms: float, repeats: int, products: int = 0
) -> Outcome:
    """Run one order on as many processes as there are stages, for its own speed."""
    chunks = chunks if order == "interleaved" else TABLES.get(order, 1)
    results = run_ranks(stages, run_order, order, microbatches, chunks, forward_ms / 1000, repeats, products)
    seconds = max(result[0] for result in results)
    work = max(result[1] for result in results) if products else microbatches * 3 * forward_ms / 1000
    bubble = seconds / work - 1 if work else 0.0
    formula = {"naive": stages - 1, "interleaved": (stages - 1) / (chunks * microbatches)}
    live: dict[str, float] = {
        "naive": 1,
        "GPipe": microbatches,
        "1F1B": min(stages, microbatches),
        "interleaved": min(2 * (stages - 1) + (chunks - 1) * stages + 1, chunks * microbatches) / chunks,
    }
    if order in TABLES:
        table = named(order, stages, chunks, microbatches)
        begun = [work._replace(half="") for work in table.order(0) if work.half != "weights"]
        formula[order] = table.bubble / microbatches
        live[order] = most_held(begun, [1 / chunks] * chunks, [0.0] * chunks).bytes
    return Outcome(
        order=order,
        seconds=seconds,
        speed=1.0,
        bubble=bubble,
        bubble_formula=formula.get(order, (stages - 1) / microbatches),
        bubble_share=bubble / (1 + bubble),
        most_live=[result[2] for result in results],
        first_stage_live_formula=live[order],
    )


def in_turns(turns: int, *sizes: Any) -> list[Outcome]:
    """Run the orders one after another, some times over; return each one's fastest with its speed by 1F1B's."""
    by_turn = [[measure(order, *sizes) for order in ORDERS] for _ in range(turns)]
    first = ORDERS.index("1F1B")
    return [
        replace(
            min(outcomes, key=lambda outcome: outcome.seconds),
            speed=median(
                turn[first].seconds / outcome.seconds for turn, outcome in zip(by_turn, outcomes, strict=True)
            ),
        )
        for outcomes in zip(*by_turn, strict=True)
    ]


def report(outcomes: list[Outcome]) -> str:
    """Return a Markdown table."""
    lines = [
        "| order | step, s | speed by 1F1B's | bubble, measured | formula | share of the time | live by stage |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        live = ", ".join(f"{count:g}" for count in outcome.most_live)
        lines.append(
            f"| {outcome.order} | {outcome.seconds:.2f} | {outcome.speed:.2f} | {outcome.bubble:.3f} | "
            f"{outcome.bubble_formula:.3f} | {outcome.bubble_share:.1%} | {live} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="of a stage, for the interleaved order")
    parser.add_argument("--forward-ms", type=float, default=50.0)
    parser.add_argument("--products", type=int, default=0, metavar="N", help="compute so many in place of sleeping")
    parser.add_argument("--repeats", type=int, default=3, help="steps of a turn, of which the fastest counts")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--write", type=Path, metavar="FILE", help="JSON file to write")
    given = parser.parse_args()
    sizes = (given.stages, given.microbatches, given.chunks, given.forward_ms, given.repeats, given.products)
    outcomes = in_turns(given.turns, *sizes)
    print(report(outcomes))
    if given.write is not None:
        record = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": {
                "cores": os.cpu_count(),
                "load_average": round(os.getloadavg()[0], 1),
                "python": platform.python_version(),
                "what": "stages compute: a core for each, and no other work, or their speed says little"
                if given.products
                else "stages sleep, so that the machine's speed and load hardly matter",
            },
            "stages": given.stages,
            "microbatches": given.microbatches,
            "chunks": given.chunks,
            **({"products": given.products} if given.products else {"forward_ms": given.forward_ms}),
            "turns": given.turns,
            "orders": [asdict(outcome) for outcome in outcomes],
        }
        given.write.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
