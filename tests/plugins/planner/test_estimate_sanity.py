"""What must hold of every estimate, whatever the constants: faster hardware is never slower, no part is negative."""

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.cost.hardware import CPU, TABLE, Constants, Machine, hardware
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.plugins.planner.estimate import pass_times, step_time
from megatron_ext.plugins.planner.layout_evaluation import Evaluation, evaluate
from megatron_ext.plugins.planner.search_input import question

_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --group-query-attention "
    "--num-query-groups 8 --vocab-size 128256 --micro-batch-size 1"
)
_SMALL = (
    "--num-layers 8 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 --seq-length 256 --vocab-size 4096 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --micro-batch-size 1 --device cpu"
)
_SHARED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_8B = f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {_LLAMA}"
_EXPERTS = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
LAYOUTS = {
    "ZeRO-1": _SHARED,
    "FSDP2": "--use-torch-fsdp2",
    "HSDP": "--use-torch-fsdp2 --num-distributed-optimizer-instances 8",
    "3D": f"--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 "
    f"--num-virtual-stages-per-pipeline-rank 4 {_SHARED}",
    "TP over machines": f"--tensor-model-parallel-size 16 --sequence-parallel --num-query-groups 16 {_SHARED}",
    "CP over machines": f"--context-parallel-size 16 {_SHARED}",
    "experts": f"{_EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel {_SHARED}",
}


def evaluated(layout: str, *, gpus: int = 64, batch: int = 128, length: int = 8192, **device: float) -> Evaluation:
    values = parse(f"{_8B} --seq-length {length} --global-batch-size {batch} {layout}".split()).values
    found = evaluate(question(values, Facts(), gpus, Machine(hardware("h100", **device)), 0.92))
    assert isinstance(found, Evaluation), found
    return found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_faster_parts_are_never_slower(layout: str) -> None:
    for field in ("peak_16bit_tflops", "memory_bandwidth_gb_s", "intra_node_gb_s", "inter_node_gb_s"):
        own = getattr(TABLE["h100"], field)
        found = [evaluated(layout, **{field: factor * own}) for factor in (0.1, 0.5, 1.0, 1.7, 10.0)]
        assert all(second.time.total <= first.time.total for first, second in pairwise(found)), field
        for each in found:
            assert min(each.time.parts.values()) >= 0
            assert min(each.time.hidden_by_axis.values()) >= 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_more_of_the_same_takes_longer_or_as_long(layout: str) -> None:
    """Twice the devices with twice the batch, and a longer sequence with as many samples."""
    sizes = (64, 512, 4096, 16384)
    of_node = {gpus: layout.replace("instances 8", f"instances {gpus // 8}") for gpus in sizes}
    grown = [evaluated(of_node[gpus], gpus=gpus, batch=2 * gpus).time.total for gpus in sizes]
    assert all(first <= second < 1.6 * first for first, second in pairwise(grown))
    longer = [evaluated(layout, length=length).time.total for length in (2048, 8192, 32768, 131072)]
    assert all(first < second for first, second in pairwise(longer))


@pytest.mark.parametrize("device", sorted(set(TABLE) - {"cpu"}))
def test_every_device_reaches_a_believable_share_of_its_peak(device: str) -> None:
    values = parse(f"{_8B} --seq-length 4096 --global-batch-size 64 {_SHARED}".split()).values
    found = evaluate(question(values, Facts(), 8, Machine(hardware(device)), 0.92))
    assert isinstance(found, Evaluation)
    assert 0.2 < found.mfu(full_attention=False) < 0.7


def of_cpu_ranks(layout: str, cores: int | None, batch: int) -> tuple[Config, Machine]:
    machine = Machine(hardware("cpu"), constants=replace(CPU, cores=cores))
    values = parse(f"{_SMALL} --global-batch-size {batch} {layout}".split()).values
    found = evaluate(question(values, Facts(), 8, machine, 0.92))
    assert isinstance(found, Evaluation), found
    return found.config, machine


def test_while_a_stage_waits_the_others_have_its_cores() -> None:
    """4 stages of 2 processes on 2 cores: all work over the cores, and no bubble. 8 stages of one with one microbatch:
    one core works, one after the other."""
    config, machine = of_cpu_ranks("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", 2, 8)
    alone = pass_times(config, Shapes(config), replace(machine, constants=CPU))
    time = step_time(config, Shapes(config), machine)
    work = 8 * sum(map(sum, [*alone.forward, *alone.backward])) * 2 / 2
    assert time.parts["bubble"] == 0.0
    assert time.compute + time.memory + time.tp == pytest.approx(work)
    own = step_time(config, Shapes(config), replace(machine, constants=CPU))
    assert own.parts["bubble"] > 0.0
    assert own.total < time.total < 4 * own.total

    config, machine = of_cpu_ranks("--pipeline-model-parallel-size 8", 2, 1)
    alone = pass_times(config, Shapes(config), replace(machine, constants=CPU))
    time = step_time(config, Shapes(config), machine)
    chain = sum(map(sum, [*alone.forward, *alone.backward])) + 14 * alone.send
    assert time.total - time.optimizer == pytest.approx(chain)


def test_traffic_of_ranks_that_share_cores_takes_their_share() -> None:
    """The processor copies what gloo sends."""
    layout = "--use-distributed-optimizer"
    (config, two), (_, eight) = (of_cpu_ranks(layout, cores, 8) for cores in (2, 8))
    times = [step_time(config, Shapes(config), machine) for machine in (two, eight)]
    assert times[0].parts["dp"] == pytest.approx(4 * times[1].parts["dp"])
    assert times[0].total == pytest.approx(4 * times[1].total)


def test_the_calls_of_the_program_take_time_on_cpu_ranks_in_every_process() -> None:
    """Two ranks of tensor parallelism both call every layer; 8 processes on 2 cores wait for each other's calls."""
    for cores, turns in ((8, 1), (2, 4)):
        config, machine = of_cpu_ranks("--tensor-model-parallel-size 2", cores, 16)
        constants = machine.constants
        silent = replace(constants, calls_of_a_layer=0.0, calls_of_a_pass=0.0, calls_of_a_step=0.0)
        times = [
            step_time(config, Shapes(config), replace(machine, constants=each)).total for each in (constants, silent)
        ]
        layers, microbatches = config.model.num_layers, 16 // 4
        calls = microbatches * (layers * constants.calls_of_a_layer + constants.calls_of_a_pass)
        assert times[0] - times[1] == pytest.approx(turns * (calls + constants.calls_of_a_step))
        assert calls > 0.01 * times[1]
    assert (Constants().calls_of_a_layer, Constants().calls_of_a_pass, Constants().calls_of_a_step) == (0.0, 0.0, 0.0)
