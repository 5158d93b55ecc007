"""Searches layouts of models that practitioners have trained, and puts what they chose next to what is found.

    python benchmarks/planner_searches.py [--write] [--only NAME]
    python benchmarks/planner_searches.py --times --output benchmarks/results

Every choice of practice is evaluated exactly (tools/plan.py --evaluate): its time, and whether it fits by the formula.
Each search is asked twice where practice sums gradients in 2 bytes: without a word on gradients, and with
--grad-reduce-in-bf16, as practice did. The verdict says whether the first three proposals contain what was trained, or
take less than was published. --write puts the table into docs/planner.md. --times measures tools/plan.py as a whole
instead: processor seconds of each search from the start of the interpreter to its end, the least of several.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.recording import heading, keep, sentence  # noqa: E402
from megatron_ext.config.parse.arguments import parse  # noqa: E402
from megatron_ext.config.resolve import Facts  # noqa: E402
from megatron_ext.config.schema import Config  # noqa: E402
from megatron_ext.cost.dry_run import USABLE  # noqa: E402
from megatron_ext.cost.hardware import Machine, hardware  # noqa: E402
from megatron_ext.plugins.planner.layout_evaluation import Evaluation, evaluate  # noqa: E402
from megatron_ext.plugins.planner.plan_report import name  # noqa: E402
from megatron_ext.plugins.planner.search import Candidate, Question, search  # noqa: E402
from megatron_ext.plugins.planner.search_input import question  # noqa: E402
from megatron_ext.plugins.planner.sensitivity import with_short_gradients  # noqa: E402

PAGE = ROOT / "docs/planner.md"
_BEGIN, _END = "<!-- benchmarks/planner_searches.py --write -->", "<!-- end of searches -->"
_ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1"
_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --group-query-attention "
    "--num-query-groups 8"
)
_LONG = f"{_LLAMA} --seq-length 8192 --vocab-size 128256"
_MODELS = {
    "8B": f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {_LONG}",
    "70B": f"--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 {_LONG}",
    "405B": f"--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 {_LONG}",
    "Mixtral 8x7B": "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    f"{_LLAMA} --seq-length 4096 --vocab-size 32000 --num-experts 8 --moe-router-topk 2",
    "Mixtral 8x22B": "--num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 "
    f"{_LLAMA} --seq-length 65536 --vocab-size 32000 --num-experts 8 --moe-router-topk 2",
    "MPT 13B": "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 --vocab-size 50368 "
    "--bf16 --hidden-dropout 0 --attention-dropout 0 --disable-bias-linear",
}


@dataclass(frozen=True)
class Case:
    """What is searched, and what was trained."""

    model: str
    gpus: int
    batch: int
    practice: str
    source: str
    seconds: float | None = None
    """Published seconds of a step."""

    short: bool = False
    """Whether practice sums gradients in 2 bytes."""

    device: str = "h100"

    @property
    def title(self) -> str:
        """Name of the row."""
        return f"{self.model} on {self.gpus:,} {self.device}, {self.batch:,}"

    @property
    def flags(self) -> str:
        """Model and batch."""
        return f"{_MODELS[self.model]} --global-batch-size {self.batch}"

    def question(self, layout: str = "") -> Question:
        """Return what tools/plan.py would ask, with the flags of a layout where one is given."""
        values = parse(f"{self.flags} {layout}".split()).values
        return question(values, Facts(), self.gpus, Machine(hardware(self.device)), USABLE)

    def trained(self) -> Evaluation:
        """Return the evaluation of what was trained."""
        found = evaluate(self.question(f"{self.practice} {_SHORT if self.short else ''}"))
        assert isinstance(found, Evaluation), found
        return found


def _layout(tensor: int, context: int, stages: int, chunks: int, more: str = "") -> str:
    sizes = f"--tensor-model-parallel-size {tensor} --context-parallel-size {context}"
    sizes += " --sequence-parallel" if tensor > 1 else ""
    sizes += f" --pipeline-model-parallel-size {stages}"
    sizes += f" --num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    return f"{sizes} {_ZERO} {more}"


_DGXC = "NVIDIA/dgxc-benchmarking"
_NEMO = "NVIDIA/NeMo, recommended_model_configs/model_configs_h100.csv"
_SHORT = "--grad-reduce-in-bf16"
_COUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
_EXPERTS = "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
CASES = (
    Case("8B", 8, 128, _layout(1, 2, 1, 1), _DGXC, 12.27, short=True),
    Case("8B", 128, 2048, _layout(1, 2, 1, 1), _DGXC, 12.33, short=True),
    Case("70B", 64, 128, _layout(4, 2, 4, 5), _DGXC, 14.66, short=True),
    Case("70B", 2048, 4096, _layout(4, 2, 4, 5), _DGXC, 14.66, short=True),
    Case("405B", 576, 252, _layout(8, 2, 9, 7), _DGXC, 17.2, short=True),
    Case("405B", 2048, 1024, _layout(8, 2, 8, 8, _COUNTED), _DGXC, 19.87, short=True),
    Case("405B", 16384, 2048, _layout(8, 1, 16, 8, _COUNTED), "arXiv 2407.21783, table 4", 6.46),
    Case("Mixtral 8x7B", 64, 256, _layout(1, 1, 4, 8, _EXPERTS), _NEMO, short=True),
    Case("Mixtral 8x22B", 256, 256, _layout(4, 8, 4, 14, _EXPERTS), _NEMO, short=True),
    Case(
        "MPT 13B", 16, 160,
        "--micro-batch-size 10 --use-torch-fsdp2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1", "mosaicml/llm-foundry", 10.28, device="a100-40",
    ),
)  # fmt: skip
_HEAD = "| model, devices, batch | first three proposals: s | practice | estimate s | published s | verdict |"


def row(case: Case) -> str:
    """Search, evaluate what was trained, and return the row of the table."""
    asked = case.question()
    begin = time.process_time()
    answer = search(asked, 8)
    with_short_gradients(asked, answer)
    spent = time.process_time() - begin
    print(f"{case.title}: {spent:.1f} s of CPU", file=sys.stderr)
    three = answer.best[:3]
    found = "<br>".join(_proposal(each) for each in three)
    if case.short:
        three = search(case.question(_SHORT), 8).best[:3]
        found += "<br>with `--grad-reduce-in-bf16`:<br>" + "<br>".join(_proposal(each) for each in three)
    trained = case.trained()
    published = "-" if case.seconds is None else f"{case.seconds:.4g}"
    cells = (case.title, found, _practice(case, trained), f"{trained.time.total:.3g}", published)
    return f"| {' | '.join(cells)} | {verdict(case, three, trained)} |"


def verdict(case: Case, three: list[Candidate], trained: Evaluation) -> str:
    """Say whether what was trained is among the first three proposals, or slower than they are."""
    for place, each in enumerate(three, start=1):
        if _sizes(each.config) == _sizes(trained.config):
            micro = each.config.training.micro_batch_size
            other = "" if micro == trained.config.training.micro_batch_size else f", with micro batch {micro}"
            return f"contained: proposal {place}{other}"
    best = three[0].seconds
    if case.seconds is None:
        return f"{'faster' if best < trained.time.total else 'slower'} than practice by the estimate; none published"
    return f"{'faster' if best < case.seconds else 'slower'} than published: {best:.3g} s and {case.seconds:.4g} s"


def _sizes(config: Config) -> tuple[object, ...]:
    layout = config.layout
    return (
        layout.tensor_model_parallel_size,
        layout.context_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size,
        layout.expert_model_parallel_size,
        layout.sharding.shares(2),
    )


def _proposal(candidate: Candidate) -> str:
    return f"{name(candidate)}: {candidate.seconds:.3g}"


def _practice(case: Case, trained: Evaluation) -> str:
    layout = trained.config.layout
    sizes = [
        f"{word}{size}"
        for word, size in (
            ("TP", layout.tensor_model_parallel_size),
            ("CP", layout.context_parallel_size),
            ("PP", layout.pipeline_model_parallel_size),
            ("x", layout.virtual_pipeline_model_parallel_size),
            ("EP", layout.expert_model_parallel_size),
        )
        if size > 1
    ]
    text = " ".join(sizes).replace(" x", "x") or "FSDP, full recomputation"
    text += ", 2-byte gradients" if trained.config.training.grad_reduce_in_bf16 else ""
    gigabytes = f"{trained.memory_bytes / 1e9:.1f} GB"
    fits = gigabytes if trained.fits else f"does not fit: {gigabytes} of {trained.usable_bytes / 1e9:.1f}"
    return f"{text} ({case.source}; {fits})"


def times(cases: list[Case], rounds: int, output: Path | None) -> None:
    """Measure the program as a whole in several rounds over the cases, print it, and keep it where asked."""
    record = heading()
    seconds: dict[str, list[float]] = {case.title: [] for case in cases}
    loops = []
    for _ in range(rounds):
        loops.append(_loop())
        for case in cases:
            seconds[case.title].append(_of_the_program(case))
    record |= {
        "loop_seconds": loops,
        "load_average_after": round(os.getloadavg()[0], 1),
        "searches": [{"search": case.title, "cpu_seconds": seconds[case.title]} for case in cases],
    }
    lines = [
        "# Searches of tools/plan.py: processor seconds of the whole program",
        "",
        sentence(record),
        f"Load average after it {record['load_average_after']}. A loop of a million turns took "
        f"{min(loops):.3f} to {max(loops):.3f} s. Every search {rounds} times, in turns.",
        "",
        "| search | least | most |",
        "|---|---|---|",
        *(f"| {title} | {min(each):.2f} | {max(each):.2f} |" for title, each in seconds.items()),
    ]
    print("\n".join(lines))
    if output is not None:
        keep(output, "planner_searches", record, "\n".join(lines) + "\n")


def _of_the_program(case: Case) -> float:
    """Return the processor seconds of tools/plan.py, its start included."""
    own = f"--world-size {case.gpus} --device {case.device} --"
    command = [sys.executable, str(ROOT / "tools/plan.py"), *own.split(), *case.flags.split()]
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _loop() -> float:
    """Return the processor seconds of a loop at the level of a module, by which days of a machine are compared."""
    begin = time.process_time()
    exec("turn = 0\nwhile turn < 1_000_000:\n    turn += 1", {})
    return time.process_time() - begin


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", metavar="NAME", default="", help="searches whose title contains this")
    parser.add_argument("--times", action="store_true", help="measure the program in place of showing what it finds")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of --times")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep what --times measures there")
    options = parser.parse_args()
    if options.times:
        times([case for case in CASES if options.only in case.title], options.rounds, options.output)
        return
    gc.disable()
    lines = [_HEAD, "|---|---|---|---|---|---|"]
    for case in CASES:
        if options.only in case.title:
            lines.append(row(case))
            print(lines[-1], flush=True)
    if options.write:
        before, rest = PAGE.read_text().split(_BEGIN)
        PAGE.write_text("\n".join([f"{before}{_BEGIN}", "", *lines, "", f"{_END}{rest.split(_END)[1]}"]))


if __name__ == "__main__":
    main()
