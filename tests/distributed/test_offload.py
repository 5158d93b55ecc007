"""State in host memory changes no bit of the losses. `--optimizer-cpu-offload`: the state is where the flags say, and
checkpoints are for all. `--torch-fsdp2-cpu-offload`: weights and gradients are there, too.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from megatron.core import parallel_state
from torch.distributed.fsdp import FSDPModule

from benchmarks.memory import Bytes, bytes_per_rank
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parallel.rows import local_part
from megatron_ext.train.trainer import Trainer
from tests.support.checkpoints import build
from tests.support.program import tiny
from tests.support.selection import chosen, marked
from tests.support.several_models import end_layout

# Of the second tier: host memory is a matter of size.
pytestmark = pytest.mark.full

BASE = tiny("""
    --num-layers 1 --ffn-hidden-size 48 --swiglu --global-batch-size 2 --train-iters 8 --lr 1e-2 --attention-dropout 0.1
    --hidden-dropout 0.1
""")
HOST = "--optimizer-cpu-offload"
HALF = f"{HOST} --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
# The scale is too large at first: an update is skipped.
FP16 = "--fp16 --initial-loss-scale 480000 --hysteresis 1"
LAYOUTS = {
    "fp32": "",
    "bf16": "--bf16",
    "fp32, distributed optimizer": SHARDED,
    "bf16, distributed optimizer": f"{SHARDED} --bf16",
    "fp16, distributed optimizer": f"{SHARDED} {FP16}",
    "fp32, FSDP2": "--use-torch-fsdp2",
    "bf16, FSDP2": "--use-torch-fsdp2 --bf16",
    "bf16, experts": "--bf16 --num-experts 4 --disable-bias-linear --expert-model-parallel-size 2",
    "fp32, SGD": "--optimizer sgd",
    "fp32, distributed optimizer, Lion": f"{SHARDED} --optimizer lion --lr 1e-3",
    "bf16, FSDP2, Lion": "--use-torch-fsdp2 --bf16 --optimizer lion --lr 1e-3",
    "fp16, Lion": f"{FP16} --optimizer lion --lr 1e-3",
}
# One precision, optimizer or scheme of two that others have: left to --all.
REPEATED = {"fp32", "bf16", "fp32, distributed optimizer", "fp32, FSDP2", "bf16, FSDP2, Lion", "fp16, Lion"}
MASTER = {"fp32": 0, "bf16": 4, "fp16": 4}
"""Bytes of the master of each element."""
OFFLOADS = {"none": "", "all": HOST, "half": HALF}
STEPS, SAVED_AT = 4, 2


@dataclass(frozen=True)
class Trace:
    losses: list[str]
    bytes: Bytes
    moved: list[tuple[int, int, int]]
    """For every optimizer of the engine: elements in host memory, in all, and of the largest tensor."""
    scale: float
    """Of the loss, at the end."""


def _run(flags: str, load: str | None = None, save: str | None = None, steps: int = STEPS) -> tuple[Any, list[str]]:
    """Train, or load and train, save after two steps; the run and the losses of all steps."""
    end_layout()
    run = build([*BASE, *flags.split()])
    trainer = Trainer(run, [])
    if load is not None:
        load_checkpoint(run, load)
    losses = []
    while run.state.iteration < steps:
        losses.append(trainer.step().loss.hex())
        if run.state.iteration == SAVED_AT and save is not None:
            save_checkpoint(run, save)
    run.loaders.close()
    return run, losses


def _traces(cases: dict[str, str]) -> dict[str, Trace]:
    found = {}
    for name, flags in cases.items():
        run, losses = _run(flags)
        moved = []
        for part in run.optimizer.chained_optimizers:
            sizes = [main.numel() for group in part.optimizer.param_groups for main in group["params"]]
            on_host = [copy.numel() for copy in getattr(part.optimizer, "gpu_params_map_cpu_copy", {}).values()]
            moved.append((sum(on_host), sum(sizes), max(sizes)))
        found[name] = Trace(losses, bytes_per_rank(run), moved, float(run.optimizer.get_loss_scale()))
    return found


Found = tuple[dict[str, Trace], dict[str, tuple[list[str], ...]]]


def _all(cases: dict[str, str], resumed: list[str], folder: str) -> Found:
    """On the same ranks, as what torch keeps of DTensor's operations takes each new process half a second."""
    return _traces(cases), {layout: _resume(layout, f"{folder}/{layout}") for layout in resumed}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Of two ranks, in the layouts that are asked for."""
    cases = {
        f"{layout}; {what}": f"{LAYOUTS[layout]} {OFFLOADS[what]}"
        for layout in chosen(request, "layout")
        for what in OFFLOADS
    }
    return run_ranks(2, _all, cases, chosen(request, "resumed"), str(tmp_path_factory.mktemp("saved")))


@pytest.fixture(scope="module")
def traces(found: list[Found]) -> list[dict[str, Trace]]:
    return [of_rank for of_rank, _ in found]


@pytest.mark.parametrize("layout", marked(LAYOUTS, slow=REPEATED))
@pytest.mark.parametrize("what", ["all", "half"])
def test_losses_are_the_same_to_the_bit(layout: str, what: str, traces: list[dict[str, Trace]]) -> None:
    for rank in traces:
        assert len(set(rank[f"{layout}; none"].losses)) == STEPS
        assert rank[f"{layout}; {what}"].losses == rank[f"{layout}; none"].losses
        assert rank[f"{layout}; {what}"].scale == rank[f"{layout}; none"].scale
    assert ("fp16" in layout) == (1 < traces[0][f"{layout}; {what}"].scale < 480000)  # updates were skipped


@pytest.mark.parametrize("layout", marked([name for name in LAYOUTS if "SGD" not in name], slow=REPEATED))
def test_the_state_is_where_the_flags_say(layout: str, traces: list[dict[str, Trace]]) -> None:
    """Each element that is updated in host memory has its value, gradient and two moments (Lion one) there: 16 bytes.
    On the device it leaves the weight and the gradient; under FSDP2 the weight is the fp32 one."""
    dtype = "fp32" if "FSDP2" in layout else layout.split(",")[0]
    states = 4 if "Lion" in layout else 8
    for rank in traces:
        none, everything, half = (rank[f"{layout}; {what}"] for what in OFFLOADS)
        assert none.bytes.host == 0
        for trace, fraction in ((everything, 1.0), (half, 0.5)):
            for on_host, total, largest in trace.moved:
                assert fraction * total <= on_host < fraction * total + largest
            moved = sum(on_host for on_host, _, _ in trace.moved)
            assert (trace.bytes.weights, trace.bytes.gradients) == (none.bytes.weights, none.bytes.gradients)
            # Adam's counts of steps, one a tensor, are left out.
            assert trace.bytes.host == pytest.approx((8 + states) * moved, rel=0.02)
            assert none.bytes.optimizer - trace.bytes.optimizer == pytest.approx(
                (MASTER[dtype] + states) * moved, rel=0.02
            )


# Slow are one precision and one scheme of two that the others have.
RESUMED = {
    "bf16, distributed optimizer": [],
    "bf16, FSDP2": [],
    "bf16": pytest.mark.slow,
    "fp32, distributed optimizer": pytest.mark.slow,
}


def _resume(layout: str, folder: str) -> tuple[list[str], ...]:
    """Losses after a save, resumed as before, without offload, and from there with half of it."""
    flags = LAYOUTS[layout]
    first, second = f"{folder}/first", f"{folder}/second"
    _, losses = _run(f"{flags} {HOST}", save=first)
    _, again = _run(f"{flags} {HOST}", load=first)
    _, without = _run(flags, load=first)
    # Saved anew at once, so that the state that was loaded, and not one that was updated, is passed on.
    _saved_anew(flags, first, second)
    _, back = _run(f"{flags} {HALF}", load=second)
    return losses[SAVED_AT:], again, without, back


def _saved_anew(flags: str, load: str, save: str) -> None:
    run, losses = _run(flags, load=load, steps=SAVED_AT)
    assert not losses
    save_checkpoint(run, save)


@pytest.mark.parametrize("resumed", [pytest.param(name, marks=marks) for name, marks in RESUMED.items()])
def test_checkpoints_are_the_same_with_and_without(resumed: str, found: list[Found]) -> None:
    for _, of_layout in found:
        after, again, without, back = of_layout[resumed]
        assert len(after) == STEPS - SAVED_AT
        assert again == without == back == after


UPDATES = 3
ROWS = [*BASE, "--clip-grad", "0.1", "--log-num-zeros-in-grad", "--use-torch-fsdp2"]
OF_ROWS = {
    "fp32": (2, ""),
    "bf16": (2, "--bf16"),
    "SGD": (2, "--optimizer sgd"),
    "Lion": (2, "--optimizer lion --lr 1e-3 --bf16"),
    "TP2 SP, query and key norm": (4, "--tensor-model-parallel-size 2 --sequence-parallel --qk-layernorm --bf16"),
}


@dataclass(frozen=True)
class RowTrace:
    steps: list[tuple[str, str, float]]
    """Loss, norm of the gradients and zeros in them."""
    bytes: Bytes
    elements: int
    """That this rank holds."""
    norm_from: list[int]
    """Elements of what the norm is taken from."""
    policies: set[str]
    """torch's, of what is gathered at a time."""


RowTraces = dict[str, list[tuple[RowTrace, RowTrace]]]


def _row_traces(all_words: list[str]) -> list[tuple[RowTrace, RowTrace]]:
    """Without and with the flag, layout by layout."""
    return [(_train_rows(words), _train_rows(f"{words} --torch-fsdp2-cpu-offload")) for words in all_words]


def _train_rows(words: str) -> RowTrace:
    # Not the groups themselves, as elsewhere: DTensor remembers those of the same mesh by name.
    parallel_state.destroy_model_parallel()
    run = build([*ROWS, *words.split()])
    trainer = Trainer(run, [])
    results: list[Any] = [trainer.step() for _ in range(UPDATES)]
    run.loaders.close()
    [chunk] = run.chunks
    policies: set[str] = set()
    for unit in chunk.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            policies.add(type(state._fsdp_param_group.offload_policy).__name__)
    return RowTrace(
        steps=[(result.loss.hex(), float(result.grad_norm).hex(), result.num_zeros) for result in results],
        bytes=bytes_per_rank(run),
        elements=sum(local_part(parameter).numel() for parameter in chunk.parameters()),
        norm_from=[
            gradient.numel() for part in run.optimizer.chained_optimizers for gradient in part.get_grads_for_grad_norm()
        ],
        policies=policies,
    )


@pytest.fixture(scope="module")
def row_traces(request: pytest.FixtureRequest) -> RowTraces:
    """By layout, of each rank; the same ranks train in all layouts of as many."""
    found = {}
    for size in (2, 4):
        layouts = [layout for layout in chosen(request, "rows") if OF_ROWS[layout][0] == size]
        by_rank = run_ranks(size, _row_traces, [OF_ROWS[layout][1] for layout in layouts]) if layouts else []
        found |= dict(zip(layouts, map(list, zip(*by_rank, strict=True)), strict=True))
    return found


# Slow: less state than the others keep.
@pytest.mark.parametrize("rows", marked(OF_ROWS, slow={"fp32", "SGD"}))
def test_host_memory_holds_all_and_changes_nothing(rows: str, row_traces: RowTraces) -> None:
    for without, offloaded in row_traces[rows]:
        assert offloaded.steps == without.steps
        assert len({loss for loss, _, _ in without.steps}) == UPDATES
        assert all(float.fromhex(norm) > 0.1 for _, norm, _ in without.steps)  # so that gradients are clipped
        assert (without.policies, offloaded.policies) == ({"OffloadPolicy"}, {"CPUOffloadPolicy"})
        assert offloaded.norm_from == [1] != without.norm_from  # one number goes to the device
        assert without.bytes.host == offloaded.bytes.total == 0
        assert offloaded.bytes.host <= without.bytes.total
        # fp32 weight and gradient, and two moments or, for SGD and Lion, one; Adam counts steps, once a tensor.
        each = 12 if rows in ("SGD", "Lion") else 16
        assert offloaded.bytes.host == pytest.approx(each * offloaded.elements, rel=0.02)
