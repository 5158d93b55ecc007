"""tests/golden/plans.txt: what tools/plan.py prints for questions that each have another answer; and the pictures of
tests/golden/pipelines.txt."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.commands.plan import main
from megatron_ext.plugins.planner.simulated_timeline import equal_stages, preview
from megatron_ext.plugins.planner.timeline import Block, Lane, Pass, Timeline
from megatron_ext.plugins.planner.timeline_svg import as_section
from megatron_ext.plugins.planner.timeline_text import as_text
from tests.support import planner_numbers

_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --group-query-attention "
    "--num-query-groups 8"
)
_MODEL = f"--num-layers 12 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 {_LLAMA}"
_SMALL = f"{_MODEL} --seq-length 2048 --vocab-size 32000"
_BIG = (
    f"--num-layers 30 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 {_LLAMA} --seq-length 8192 "
    "--vocab-size 128256"
)


class Asked(NamedTuple):
    own: str
    flags: str
    metrics: str = ""
    """Rows of the file of --calibrate, `METRICS` in `own`."""


def _rows(*steps: tuple[float, int]) -> str:
    rows = ({"iteration": 1, "elapsed_ms": ms, "global_batch_size": batch, "world_size": 8} for ms, batch in steps)
    return "".join(json.dumps(row) + "\n" for row in rows)


QUESTIONS = {
    "a node with room": Asked("--world-size 8 --number 4", f"{_SMALL} --global-batch-size 64"),
    "little memory": Asked("--world-size 4 --device-memory-gb 6 --limits", f"{_SMALL} --global-batch-size 16"),
    "host memory": Asked("--world-size 1 --device-memory-gb 10", f"{_SMALL} --global-batch-size 4"),
    "host memory that was declined": Asked(
        "--world-size 1 --device-memory-gb 10", f"{_SMALL} --global-batch-size 4 --optimizer-cpu-offload=false"
    ),
    "nothing fits": Asked(
        "--world-size 2 --device a100 --device-memory-gb 2",
        f"{_SMALL} --global-batch-size 64 --tensor-model-parallel-size 2 --recompute-granularity none",
    ),
    "nothing fits on fewer than 16 times as many": Asked(
        "--world-size 2 --device-memory-gb 0.6",
        f"{_SMALL} --global-batch-size 64 --context-parallel-size 1 --use-torch-fsdp2",
    ),
    "uneven stages": Asked(
        "--world-size 16 --number 3 --device b200",
        f"{_BIG} --global-batch-size 48 --tensor-model-parallel-size 4 --context-parallel-size 1 --micro-batch-size 1",
    ),
    "experts": Asked(
        "--world-size 16 --number 6 --device h200 --gpus-per-node 4",
        f"{_SMALL} --num-experts 8 --moe-router-topk 2 --global-batch-size 32 --tensor-model-parallel-size 2",
    ),
    "many experts of each token": Asked(
        "--world-size 8 --number 2",
        f"{_SMALL} --num-experts 8 --moe-router-topk 4 --global-batch-size 32 --expert-model-parallel-size 8",
    ),
    "long sequences over slow links": Asked(
        "--world-size 16 --device l40s --number 5",
        f"{_MODEL} --seq-length 16384 --vocab-size 32000 --global-batch-size 8",
    ),
    "a batch that few sizes divide": Asked(
        "--world-size 48 --device gb200 --gpus-per-node 16 --number 2", f"{_SMALL} --global-batch-size 64"
    ),
    "no legal layout": Asked("--world-size 8", f"{_SMALL} --global-batch-size 64 --tensor-model-parallel-size 3"),
    "what was given": Asked(
        "--world-size 8 --number 2",
        f"{_SMALL} --global-batch-size 32 --sequence-parallel --use-distributed-optimizer --micro-batch-size 2 "
        "--recompute-activations --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
    ),
    "limits": Asked(
        "--world-size 8 --number 2 --limits",
        f"{_SMALL} --global-batch-size 64 --micro-batch-size 1 --context-parallel-size 1",
    ),
    "limits of one layout": Asked(
        "--evaluate --world-size 8 --limits",
        f"{_SMALL} --global-batch-size 64 --micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce",
    ),
    "corrected by a run": Asked(
        "--evaluate --world-size 8 --calibrate METRICS",
        f"{_SMALL} --global-batch-size 64 --micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce",
        # The first fifth is left out, and the batch before the last one's; the median forgets the slow step.
        _rows((9000, 64), (9000, 64), (100, 32), *((210, 64),) * 4, (200, 64), (5000, 64), (220, 64), (230, 64)),
    ),
    "CPU ranks that share cores": Asked(
        "--world-size 4 --device cpu --gpus-per-node 4 --processor-cores 2 --number 4",
        "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 1000 "
        "--global-batch-size 8",
    ),
}


def answer(title: str, folder: Path) -> str:
    """What the tool prints, and after that its JSON."""
    own, flags, metrics = QUESTIONS[title]
    (folder / "metrics.jsonl").write_text(metrics)
    words = [*shlex.split(own.replace("METRICS", str(folder / "metrics.jsonl"))), "--json", str(folder / "plan.json")]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            ended = str(main([*words, "--", *flags.split()]))
        except ConfigurationError as error:
            ended = "\n".join(["64", *error.problems])
    text = said.getvalue()
    if (folder / "plan.json").exists():
        found = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").unlink()
        text += "\n".join(f"{path}: {value}" for path, value in _flat("", found)) + "\n"
    return f"## {title}\n\n> {own} -- {flags}\n{text}exit code {ended}\n"


def _flat(path: str, value: object) -> list[tuple[str, str]]:
    """The JSON's leaves, lists of words in one line, numbers with ten digits."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() if key != "device" for leaf in _flat(f"{path}.{key}", each)]
    if isinstance(value, list) and not all(isinstance(each, str | int | float) for each in value):
        return [leaf for place, each in enumerate(value) for leaf in _flat(f"{path}.{place}", each)]
    return [(path.removeprefix("."), f"{value:.10g}" if isinstance(value, float) else str(value))]


def plans_text(folder: Path) -> str:
    return "\n".join(answer(title, folder) for title in QUESTIONS)


def _recorded() -> Timeline:
    """A recorded step: stages that differ, messages, memory that is known late, none of it anywhere on one stage."""
    first = (Pass(True, 0, 0, 0.0, 0.1), Pass(True, 0, 11, 0.1, 0.2), Pass(False, 0, 0, 0.5, 0.8))
    second = (Pass(True, 0, 0, 0.12, 0.3), Pass(False, 0, 0, 0.3, 0.48), Pass(False, 0, 11, 0.6, 0.6001))
    blocks = (Block("messages", 0.2, 0.5), Block("communication", 0.75, 0.8), Block("gradients", 0.8, 0.9))
    return Timeline(
        "two stages <as recorded>",
        (
            Lane(
                "stage 0", first, (*blocks, Block("update", 0.9, 1.0)), ((0.1, 2e9), (0.2, 3e9), (0.8, 3e9), (1.0, 5e8))
            ),
            Lane("stage & 1", second, (), ((0.3, 1.2e9), (1.0, 4e8))),
            Lane("stage 2", ()),
        ),
        1,
        1.0,
        notes=("Of microbatch 11 there is a part.",),
    )


def _previewed(title: str, microbatches: int | None = None) -> Timeline:
    case = planner_numbers.CASES[title]
    return preview(planner_numbers.config_of(case), planner_numbers.machine_of(case), microbatches=microbatches)


PICTURES = {
    "1F1B": lambda: equal_stages(4, 1, 12),
    "interleaved": lambda: equal_stages(2, 3, 6),
    "interleaved by threes": lambda: equal_stages(2, 2, 8, 3),
    "too many rows": lambda: equal_stages(12, 3, 12),
    "recorded": _recorded,
    "two stages": lambda: _previewed("PP2, tied"),
    "four stages with two chunks": lambda: _previewed("PP4 VPP2, ZeRO-1, TP2 SP", 4),
    "a few of the microbatches": lambda: _previewed("PP4 VPP2, ZeRO-1, TP2 SP", 3),
    "larger groups": lambda: _previewed("PP2 VPP2, larger groups, few microbatches"),
    "uneven": lambda: _previewed("PP4, uneven", 2),
}
_ALSO_AS_SVG = ("recorded", "interleaved", "uneven")


def picture(title: str) -> str:
    timeline = PICTURES[title]()
    lines = [f"## {title}", "", *as_text(timeline, 90)]
    if title in _ALSO_AS_SVG:
        lines += as_text(timeline, 40, colour=True)[:6]
        lines += re.sub(r"(<rect|<text)", r"\n\1", as_section(timeline)).splitlines()
    return "\n".join([line.replace("\x1b", "ESC") for line in lines if line] + [""])


def pipelines_text() -> str:
    return "\n".join(map(picture, PICTURES))
