"""The planner: what it proposes is what the program accepts, and its sums are those of the rest of the repository."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.hardware import Constants, Machine, hardware
from megatron_ext.cost.memory import estimate
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.commands.plan import main
from megatron_ext.plugins.planner.estimate import step_time
from megatron_ext.plugins.planner.layout_choices import flags, layouts
from megatron_ext.plugins.planner.search import Answer, Question, search, simpler_layouts
from megatron_ext.plugins.planner.search_input import placeholders, question
from megatron_ext.rules.validate import problems
from megatron_ext.train.configure import configure
from tests.support import planner_numbers
from tests.support.golden_text import section

ROOT = Path(__file__).parents[3]
_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --bf16"
)
SEVEN_BILLION = (
    f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 "
    f"--vocab-size 32000 --global-batch-size 512 {_LLAMA}"
)
MODELS = {
    "7B on 8": (8, SEVEN_BILLION),
    "7B on 64, TP given": (64, f"{SEVEN_BILLION} --tensor-model-parallel-size 4 --micro-batch-size 1"),
    "70B on 32": (
        32,
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
        "--num-query-groups 8 --seq-length 8192 --vocab-size 128256 --global-batch-size 256 --micro-batch-size 1 "
        + _LLAMA,
    ),
    "GPT-2 of 30 layers, with dropout, fp32": (
        6,
        "--num-layers 30 --hidden-size 1536 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
        "--global-batch-size 96",
    ),
    "8 experts": (
        4,
        "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 7168 --num-attention-heads 16 --num-experts 8 "
        f"--seq-length 2048 --vocab-size 32000 --global-batch-size 128 {_LLAMA}",
    ),
    "compiled, SGD, recomputed": (8, f"{SEVEN_BILLION} --torch-compile --optimizer sgd --micro-batch-size 2"),
}
MEMORY_GB = {"compiled, SGD, recomputed": 20.0, "70B on 32": 141.0}


def asked(world_size: int, line: str, **given: float) -> Question:
    machine = Machine(hardware("h100", **given), gpus_per_node=8, efficiency=0.5, link_efficiency=0.8)
    return question(parse(line.split()).values, Facts(), world_size, machine, memory_share=0.92)


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return {name: search(asked(*model, memory_gb=MEMORY_GB.get(name, 80.0)), 6) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_proposed_is_accepted(name: str, answers: dict[str, Answer]) -> None:
    world_size, line = MODELS[name]
    answer = answers[name]
    assert answer.best
    own = parse(line.split()).values
    for candidate in answer.best:
        words = [*line.split(), *flags(placeholders(own)), *flags(candidate.choice)]
        found = configure([*words, "--dry-run", "--world-size", str(world_size)])
        # Products of GPUs add gradients by default; this machine may have none.
        training = replace(
            candidate.config.training, gradient_accumulation_fusion=found.config.training.gradient_accumulation_fusion
        )
        assert found.config == replace(candidate.config, training=training)
        assert {name: getattr(found.config.layout, name) for name in own if hasattr(found.config.layout, name)} == {
            name: value for name, value in own.items() if hasattr(found.config.layout, name)
        }, "what the user gave stays"


def test_what_cannot_be_recomputed_is_not_proposed(answers: dict[str, Answer]) -> None:
    """Norms are not, in compiled layers; the next way is taken."""
    best = answers["compiled, SGD, recomputed"].best
    assert "full" in {candidate.recomputation for candidate in best}
    assert not {"norms", "MLP and norms"} & {candidate.recomputation for candidate in best}


@pytest.mark.parametrize("name", MODELS)
def test_the_best_come_first_and_fit(name: str, answers: dict[str, Answer]) -> None:
    best = answers[name].best
    assert all(candidate.memory.total <= 0.92e9 * MEMORY_GB.get(name, 80.0) for candidate in best)
    seconds = [candidate.seconds for candidate in best]
    assert seconds == pytest.approx(sorted(seconds), rel=2e-3)
    assert all(candidate.config.layout.tensor_model_parallel_size <= 8 for candidate in best)


def test_the_search_leaves_nothing_out_that_the_rules_allow() -> None:
    """By brute force over a small world: every legal TP, CP, PP with the smallest micro batch is among the choices."""
    line = f"--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 4096 --vocab-size 1000 {_LLAMA}"
    values = {**parse(line.split()).values, "global_batch_size": 8, "micro_batch_size": 1}
    values |= placeholders(values)
    found = {
        tuple(choice[f"{axis}_parallel_size"] for axis in ("tensor_model", "context", "pipeline_model"))
        for choice in layouts(values, 8, 8)
    }
    legal = set()
    for sizes in [(t, c, p) for t in range(1, 9) for c in range(1, 5) for p in range(1, 9)]:
        axes = zip(("tensor_model", "context", "pipeline_model"), sizes, strict=True)
        chosen: dict[str, Any] = {f"{axis}_parallel_size": size for axis, size in axes}
        chosen |= {"world_size": 8, "sequence_parallel": sizes[0] > 1}
        if not problems(resolve({**values, **chosen}, Facts()), Facts()):
            legal.add(sizes)
    assert len(legal) > 10
    assert legal <= found


def test_state_is_that_of_the_formulas() -> None:
    """7B in bf16 without sharding is 18 bytes a parameter, of which the optimizer has 12."""
    plain = next(iter(simpler_layouts(asked(8, SEVEN_BILLION))))
    parameters = 6_738_415_616  # Llama-2-7B
    assert plain.sharding == "DDP"
    assert (plain.memory.weights, plain.memory.gradients, plain.memory.optimizer) == (
        2 * parameters,
        4 * parameters,
        12 * parameters,
    )
    assert plain.memory.largest == "optimizer"


def _config(line: str, world_size: int) -> Config:
    values = parse(f"{line} --world-size {world_size}".split()).values
    config = resolve({**values, **placeholders(values)}, Facts())
    assert not problems(config, Facts())
    return config


_SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 1024 --micro-batch-size 2 "
    f"--global-batch-size 32 {_LLAMA}"
)


def test_more_of_anything_needs_more() -> None:
    """Monotone where it must be: what a user expects when he turns one knob."""

    def needed(line: str, world_size: int = 8) -> float:
        config = _config(f"{_SMALL} {line}", world_size)
        return estimate(config, fused=True)[1].total

    recompute = "--recompute-granularity"
    full = f"{recompute} full --recompute-method uniform --recompute-num-layers 1"
    assert needed("--micro-batch-size 4") > needed("") > needed(f"{recompute} selective") > needed(full)
    assert needed("") > needed("--use-distributed-optimizer") > needed("--use-torch-fsdp2")
    tensor = "--tensor-model-parallel-size 4"
    assert needed("") > needed(tensor) > needed(f"{tensor} --sequence-parallel")
    stages = "--pipeline-model-parallel-size 4"
    assert needed(f"{stages} --num-virtual-stages-per-pipeline-rank 2") > needed(stages)


def test_traffic_between_nodes_takes_longer() -> None:
    config = _config(f"{SEVEN_BILLION} --micro-batch-size 1 --tensor-model-parallel-size 8", 64)
    constants = Constants(hop=0.0, hop_inside=0.0)
    machines = [Machine(hardware("h100"), gpus, 0.5, 0.8, constants) for gpus in (8, 4)]
    inside, across = (step_time(config, Shapes(config), machine) for machine in machines)
    assert across.tp == pytest.approx(inside.tp * 450 / (4 * 50))
    assert inside.compute == across.compute


def test_the_sum_of_tied_embeddings_takes_its_time_whichever_stage_is_the_busiest() -> None:
    """The first and the last stage wait for it, and so does the step, also where most layers lie between them."""
    layout = "--micro-batch-size 1 --pipeline-model-parallel-size 4"
    uneven = "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"
    untied = "--untie-embeddings-and-output-weights"
    machine = Machine(hardware("h100"), 8, 0.5, 0.8)

    def seconds(flags: str, model: str) -> float:
        config = _config(f"{model} {layout} {flags}", 8)
        return step_time(config, Shapes(config), machine).parts["pp"]

    assert untied in SEVEN_BILLION
    tied = SEVEN_BILLION.replace(untied, "")
    even = seconds("", tied) - seconds("", SEVEN_BILLION)
    assert even > 0.0
    assert seconds(uneven, tied) - seconds(uneven, SEVEN_BILLION) == pytest.approx(even)


def test_nothing_fits_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Nor does what the optimizer keeps in host memory.
    options = ["--world-size", "8", "--device-memory-gb", "4", "--json", str(tmp_path / "plan.json")]
    assert main([*options, "--", *SEVEN_BILLION.split()]) == 1
    printed = capsys.readouterr().out
    assert "Nothing fits" in printed
    assert "devices instead of 8" in printed
    # The nearest is FSDP2: its optimizer's 8 bytes a parameter, or all 16, and what one layer needs is left.
    offloads = re.findall(r"  (--\S+-cpu-offload): ([\d.]+) GB, which", printed)
    needs = {flag: float(gigabytes) for flag, gigabytes in offloads}
    assert set(needs) == {"--optimizer-cpu-offload", "--torch-fsdp2-cpu-offload"}
    parameters = 6_738_415_616
    assert needs["--optimizer-cpu-offload"] - needs["--torch-fsdp2-cpu-offload"] == pytest.approx(
        8 * parameters / 8 / 1e9, abs=0.2
    )
    host = re.search(r"torch-fsdp2.*fits; ([\d.]+) GB a device in host memory, up to ([\d.]+) GB a node", printed)
    assert host is not None
    each, node = map(float, host.groups())
    assert (8 * each, node) == pytest.approx((16 * parameters / 1e9,) * 2, rel=5e-3)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["best"] == []
    assert found["nearest"]["bytes"]["total"] > found["usable_bytes"]


def test_the_report_is_that_of_the_docs_and_ends_with_flags_to_paste(tmp_path: Path) -> None:
    without_torch = (
        "import sys; from megatron_ext.plugins.planner.commands.plan import main; main(sys.argv[1:]); "
        "sys.exit(2 * ('torch' in sys.modules))"
    )
    command = [sys.executable, "-c", without_torch, "--world-size", "8", "--device", "h100", "--number", "4"]
    command += ["--json", str(tmp_path / "plan.json"), "--", *SEVEN_BILLION.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    printed = result.stdout.splitlines()
    found = json.loads((tmp_path / "plan.json").read_text())
    assert printed[-1].split() == found["best"][0]["flags"]
    assert "estimates" in result.stdout
    page = (ROOT / "docs/parallelism.md").read_text()
    example = page.split("```text\n")[1].split("```")[0]
    shown = [line for line in example.splitlines() if line[:1].isdigit() or line.startswith("    ")]
    assert len(shown) > 8
    assert [line for line in shown if line not in result.stdout] == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--world-size 8 -- --num-layers 4 --global-batch-size 8", "missing: --hidden-size"),
        ("--world-size 8 -- --num-layers 4", "--global-batch-size 512"),
        ("--world-size 8", "give them after --"),
        ("--world-size 8 --efficiency 2 -- --num-layers 4", "above 1"),
        ("--world-size 8 --gpus-per-node 0 -- --num-layers 4", "not above 0"),
        ("-- --num-layers 4", "give --world-size"),
    ],
)
def test_what_cannot_be_planned_is_a_problem_of_the_flags(line: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        main(line.split())


@pytest.mark.parametrize("title", planner_numbers.CASES)
def test_no_number_of_the_planner_changes_unseen(title: str) -> None:
    assert planner_numbers.numbers(title).rstrip() == section("planner.txt", title), "python tests/golden/regenerate.py"
