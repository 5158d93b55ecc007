"""Counts the bytes that every way of sharding a model keeps and sends on each rank, next to the formulas.

    python benchmarks/sharding.py                                  # the table, to the standard output
    python benchmarks/sharding.py --write docs/inside/sharding.md  # into the page, and results as JSON
    python benchmarks/sharding.py --schemes DDP ZeRO-1

Runs on CPU processes of this machine: bytes are the same on GPUs. Kept bytes are counted at the tensors' storages after
a step (benchmarks/memory.py), sent bytes at the intercepted collectives of one step (benchmarks/traffic.py), and the
formulas are those of cost/state_bytes.py and cost/traffic.py. The rank that is farthest from its formula is shown. Exit
codes: 0 every count is within 2% of its formula or the table says why not, 1 one is not, 64 the flags cannot work.
"""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext import device
from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.config.parse.arguments import parse
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks

TOLERANCE = 0.02
RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- benchmarks/sharding.py: begin -->", "<!-- benchmarks/sharding.py: end -->"

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 1000 --mock-data "
    "--tokenizer-type NullTokenizer --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-3 --eval-iters 0"
)
_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_TP2 = "--tensor-model-parallel-size 2"
_CP2 = "--context-parallel-size 2 --cp-comm-type"
_EXPERTS = "--num-experts 2 --moe-ffn-hidden-size 256"
SCHEMES = {
    "DDP": (4, ""),
    "ZeRO-1": (4, "--use-distributed-optimizer"),
    "ZeRO-1, Megatron-FSDP": (4, f"{_FSDP} optim"),
    "ZeRO-2, Megatron-FSDP": (4, f"{_FSDP} optim_grads"),
    "ZeRO-3, Megatron-FSDP": (4, f"{_FSDP} optim_grads_params"),
    "ZeRO-3, Megatron-FSDP, tied": (4, f"{_FSDP} optim_grads_params --untie-embeddings-and-output-weights=false"),
    "ZeRO-3, FSDP2": (4, "--use-torch-fsdp2"),
    "FSDP2, no reshard after forward": (4, "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"),
    "PP, FSDP2": (4, "--use-torch-fsdp2 --pipeline-model-parallel-size 2"),
    "PP, FSDP2, backward passes split": (
        4,
        "--use-torch-fsdp2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--pipeline-schedule zbv",
    ),
    "HSDP 2 x 2, ZeRO-1": (4, "--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
    "HSDP 2 x 2, FSDP2": (4, "--use-torch-fsdp2 --num-distributed-optimizer-instances 2"),
    "HSDP 2 x 2, ZeRO-2": (4, f"{_FSDP} optim_grads --num-distributed-optimizer-instances 2"),
    "HSDP 2 x 2, ZeRO-3": (4, f"{_FSDP} optim_grads_params --num-distributed-optimizer-instances 2"),
    "HSDP 2 x 2, ZeRO-3, optimizer state over all": (
        4,
        f"{_FSDP} optim_grads_params --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    ),
    "HSDP 2 x 2, Megatron-FSDP optim": (4, f"{_FSDP} optim --num-distributed-optimizer-instances 2"),
    "Experts, ZeRO-1": (4, f"{_EXPERTS} --use-distributed-optimizer"),
    "Experts, ZeRO-3, Megatron-FSDP": (4, f"{_EXPERTS} {_FSDP} optim_grads_params"),
    "TP": (2, _TP2),
    "TP 4": (4, "--tensor-model-parallel-size 4"),
    "TP + SP": (2, f"{_TP2} --sequence-parallel"),
    "CP, all_gather": (2, f"{_CP2} all_gather"),
    "CP, p2p": (2, f"{_CP2} p2p"),
    "CP, a2a": (2, f"{_CP2} a2a"),
    "TP + SP, CP, DDP": (8, f"{_TP2} --sequence-parallel {_CP2} all_gather"),
    "PP": (2, "--pipeline-model-parallel-size 2"),
    "PP, 2 chunks": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "TP + SP, PP, ZeRO-1": (
        8,
        f"{_TP2} --sequence-parallel --pipeline-model-parallel-size 2 --use-distributed-optimizer",
    ),
}

REASONS: dict[str, str] = {
    "ZeRO-3, Megatron-FSDP, tied": "tied embeddings are gathered once a step, not twice a microbatch",
    "PP, FSDP2": "torch gathers a layer ahead that no pass needs, once a step, after two forward passes in a row",
    "Experts, ZeRO-3, Megatron-FSDP": "two experts on four ranks: whole matrices are divided, and padded",
}
"""Reasons why a count is not its formula, by scheme."""


@dataclass(frozen=True)
class Count:
    """Holds what one rank kept and sent, and what the formulas say."""

    kept: dict[str, int]
    kept_formula: dict[str, float]
    kept_in_words: str
    sent: dict[str, float]
    """Bytes sent, by collective and axis."""
    terms: list[tuple[str, float, str]]
    """Collective, bytes, formula."""
    parameters: int

    @property
    def sent_bytes(self) -> float:
        return sum(self.sent.values())

    @property
    def sent_formula(self) -> float:
        return sum(term[1] for term in self.terms)

    @property
    def kept_off(self) -> float:
        return _off(sum(self.kept.values()), sum(self.kept_formula.values()))

    @property
    def sent_off(self) -> float:
        return _off(self.sent_bytes, self.sent_formula)


def _off(counted: float, expected: float) -> float:
    return abs(counted - expected) / expected if expected else float(counted > 0)


def count_on_this_rank(flags: list[str], sabotage: Any = None) -> Count:
    """Take a step on one rank to fill the optimizer's state, and one that is counted."""
    from benchmarks.memory import bytes_per_rank
    from benchmarks.traffic import Traffic
    from megatron_ext import device
    from megatron_ext.cost.stage_parameters import Shapes
    from megatron_ext.cost.state_bytes import state_bytes
    from megatron_ext.cost.traffic import sent
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    config = configure([*flags, "--device", "cpu"]).config
    if sabotage is not None:
        sabotage()
    run = build_run(config, device.install("cpu"))
    trainer = Trainer(run, [])
    trainer.step()
    with Traffic(run.groups) as traffic:
        trainer.step()
    stage, kept = run.groups.pp.rank(), bytes_per_rank(run)
    held, of_expert = state_bytes(config), state_bytes(config, expert=True)
    dense, experts = Shapes(config).parameters_of_stage(stage)
    names = ("weights", "gradients", "optimizer")
    sizes = zip(names, held.sizes, of_expert.sizes, strict=True)
    return Count(
        kept={name: getattr(kept, name) for name in names},
        kept_formula={name: dense * size + experts * other for name, size, other in sizes},
        kept_in_words=held.formula if held == of_expert else f"{held.formula}, of experts {of_expert.formula}",
        sent={f"{kind} {axis}": counted.bytes for (kind, axis), counted in traffic.sent.items()},
        terms=[(term.collective, term.bytes, term.formula) for term in sent(config, stage)],
        parameters=dense + experts,
    )


def measure(scheme: str, sabotage: Any = None) -> Count:
    """Return the rank of a scheme that is farthest from its formulas."""
    ranks, flags = SCHEMES[scheme]
    counts = run_ranks(ranks, count_on_this_rank, [*MODEL.split(), *flags.split()], sabotage)
    return max(counts, key=lambda count: max(count.kept_off, count.sent_off))


def refused(scheme: str) -> str | None:
    """Return why this version does not know a flag of the scheme; None where it knows them all."""
    try:
        parse(SCHEMES[scheme][1].split())
    except ConfigurationError as error:
        return error.problems[0]
    return None


def within(scheme: str, count: Count) -> bool:
    return max(count.kept_off, count.sent_off) <= TOLERANCE or scheme in REASONS


def table(counts: dict[str, Count]) -> str:
    columns = (
        "",
        "ranks",
        "kept, bytes a parameter",
        "formula",
        "sent a step, kB",
        "formula, kB",
        "formula of what is sent",
    )
    lines = [columns, ("---",) * len(columns)]
    for scheme, count in counts.items():
        p = count.parameters
        words = "; ".join(f"{kind} {text}" for kind, _, text in count.terms)
        reason = (
            f" **{REASONS[scheme]}**" if scheme in REASONS and max(count.kept_off, count.sent_off) > TOLERANCE else ""
        )
        lines.append(
            (
                scheme,
                str(SCHEMES[scheme][0]),
                " + ".join(f"{size / p:.2f}" for size in count.kept.values())
                + f" = {sum(count.kept.values()) / p:.2f}",
                f"{count.kept_in_words} = {sum(count.kept_formula.values()) / p:.2f}",
                f"{count.sent_bytes / 1e3:,.1f}",
                f"{count.sent_formula / 1e3:,.1f}",
                words + reason,
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> dict[str, str]:
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), gloo",
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
    }


def write_into(page: Path, text: str) -> None:
    """Replace what lies between the marks of a page.

    Raises:
        ConfigurationError: the page lacks the marks.
    """
    content = page.read_text()
    if BEGIN not in content or END not in content:
        raise ConfigurationError(f"{page} lacks the lines {BEGIN} and {END}; put them where the table belongs")
    before, rest = content.split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


def main(argv: Sequence[str]) -> int:
    parser = ToolParser("Count what every way of sharing a model keeps and sends.")
    parser.add_argument("--schemes", nargs="+", metavar="NAME", help="rows to make; default all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown page whose marked block becomes the table")
    options = parser.parse_args(argv)
    unknown = [name for name in options.schemes or [] if name not in SCHEMES]
    if unknown:
        parser.error(f"--schemes {unknown[0]!r} is not one of: {'; '.join(SCHEMES)}")
    device.install("cpu")
    counts = {}
    for scheme in options.schemes or SCHEMES:
        refusal = refused(scheme)
        if refusal is not None:
            print(f"{scheme}: left out: {refusal}", file=sys.stderr)
            continue
        counts[scheme] = count = measure(scheme)
        print(f"{scheme}: kept {count.kept_off:.1%}, sent {count.sent_off:.1%} off", file=sys.stderr, flush=True)
    facts = machine()
    head = f"Counted on {facts['date']}: {facts['machine']}, torch {facts['torch']}, core {facts['megatron-core']}."
    text = f"{head} The model: `{MODEL}`.\n\n{table(counts)}"
    if options.write is None:
        print(text)
    else:
        write_into(options.write, text)
        rows = {scheme: {**vars(count), "flags": SCHEMES[scheme][1]} for scheme, count in counts.items()}
        path = RESULTS / f"sharding-{facts['date']}.json"
        path.write_text(json.dumps({**facts, "model": MODEL, "schemes": rows}, indent=1) + "\n")
    return 0 if all(within(scheme, count) for scheme, count in counts.items()) else 1


if __name__ == "__main__":
    run_tool(main)
