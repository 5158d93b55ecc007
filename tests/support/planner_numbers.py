"""tests/golden/planner.txt: what the planner says of layouts that between them take every branch of its formulas.

What a formula should say is shown by tests that count: on ranks (bytes held, bytes sent), over published runs (times).
They allow for what no formula knows. This file holds the numbers themselves, so that one of them never changes unseen:
the sums, of which every number of a layer, a product or a collective is a part.
"""

import dataclasses
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.dry_run import describe
from megatron_ext.cost.flops import active_parameters, flops_per_token, parameters_without_embeddings
from megatron_ext.cost.hardware import Machine, constants_of, hardware
from megatron_ext.cost.memory import helpful_flags, host_bytes, kept_at_least
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.workload import Workload
from megatron_ext.plugins.planner.estimate import at_least, formula_at_least, step_time
from megatron_ext.plugins.planner.layout_evaluation import as_text, evaluate_config
from megatron_ext.plugins.planner.search_input import placeholders
from megatron_ext.rules.validate import problems


class Case(NamedTuple):
    ranks: int
    flags: str
    device: str = "h100"
    gpus_per_node: int = 8
    cores: int | None = None
    memory_gb: float = 80.0


_SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1"
_PLAIN = f"{_SIZES} --vocab-size 50257"
_LLAMA = (
    f"{_SIZES} --vocab-size 32000 --ffn-hidden-size 2816 --swiglu --normalization RMSNorm --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--group-query-attention --num-query-groups 4"
)
_EXPERTS = f"{_LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 704"
_SHARED = f"{_EXPERTS} --moe-shared-expert-intermediate-size 512"
_OLMO2 = f"{_LLAMA} --norm-position after --qk-layernorm --qk-layernorm-over projection"
_TP2, _SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
_PP2, _PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
_ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_FULL = "--recompute-granularity full --recompute-num-layers"

CASES = {
    "one device": Case(1, f"{_LLAMA} --global-batch-size 4"),
    "one rank that shards": Case(1, f"{_LLAMA} --use-distributed-optimizer --global-batch-size 4"),
    "one device, GPT-2 with dropout in fp32": Case(1, f"{_PLAIN} --global-batch-size 4", "a100"),
    "one device, TF32, padding": Case(1, f"{_PLAIN} --tf32 --attention-dropout 0 --global-batch-size 4", "b200"),
    "DDP over two nodes, tied": Case(16, f"{_PLAIN} --bf16 --global-batch-size 32", "a100-40"),
    "DDP overlapped, gradients of 2 bytes": Case(
        8, f"{_LLAMA} --overlap-grad-reduce --grad-reduce-in-bf16 --global-batch-size 32", memory_gb=5.0
    ),
    "fp16": Case(8, f"{_PLAIN} --fp16 --use-distributed-optimizer --global-batch-size 32"),
    "ZeRO-1, gathers alone late": Case(
        16, f"{_LLAMA} --use-distributed-optimizer --overlap-grad-reduce --global-batch-size 64"
    ),
    "ZeRO-1, more copies": Case(
        16, f"{_LLAMA} {_ZERO1} --num-distributed-optimizer-instances 2 --global-batch-size 64", memory_gb=3.0
    ),
    "host memory": Case(
        8, f"{_LLAMA} {_ZERO1} --optimizer-cpu-offload --optimizer-offload-fraction 0.75 --global-batch-size 16"
    ),
    "FSDP2": Case(16, f"{_LLAMA} --use-torch-fsdp2 --global-batch-size 64"),
    "FSDP2, gathered once, copies": Case(
        16,
        f"{_LLAMA} --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --num-distributed-optimizer-instances 2 "
        "--global-batch-size 64",
    ),
    "FSDP2 in host memory": Case(8, f"{_LLAMA} --use-torch-fsdp2 --torch-fsdp2-cpu-offload --global-batch-size 16"),
    **{
        f"Megatron-FSDP {kind}": Case(
            16,
            f"{_LLAMA} --use-megatron-fsdp --data-parallel-sharding-strategy {kind} "
            "--num-distributed-optimizer-instances 2 --global-batch-size 64",
        )
        for kind in ("optim", "optim_grads", "optim_grads_params")
    },
    "Megatron-FSDP in fp16, gradients of 4 bytes": Case(
        8, f"{_PLAIN} --fp16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --global-batch-size 16"
    ),
    "Megatron-FSDP no_shard": Case(
        8, f"{_LLAMA} --use-megatron-fsdp --data-parallel-sharding-strategy no_shard --global-batch-size 16"
    ),
    "Megatron-FSDP, copies divide the optimizer's state": Case(
        16,
        f"{_LLAMA} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2 --global-batch-size 64",
    ),
    "TP2, tied, dropout": Case(4, f"{_PLAIN} --bf16 {_TP2} --global-batch-size 16"),
    "TP8 SP over two nodes of 4": Case(
        16,
        f"{_LLAMA} --tensor-model-parallel-size 8 {_SP} {_ZERO1} --global-batch-size 32",
        gpus_per_node=4,
        memory_gb=2.0,
    ),
    "TP2 SP, gathers kept": Case(4, f"{_LLAMA} {_TP2} {_SP} --sequence-parallel-keep-gathered --global-batch-size 16"),
    "TP2, loss in one": Case(4, f"{_LLAMA} {_TP2} {_SP} --linear-cross-entropy --global-batch-size 16"),
    "loss in one on CPU ranks": Case(
        2, f"{_LLAMA} {_TP2} --linear-cross-entropy --device cpu --global-batch-size 4", "cpu"
    ),
    "PP2, tied": Case(8, f"{_PLAIN} --bf16 {_PP2} --global-batch-size 32"),
    "PP4 VPP2, ZeRO-1, TP2 SP": Case(
        16, f"{_LLAMA} {_TP2} {_SP} {_PP4} --num-virtual-stages-per-pipeline-rank 2 {_ZERO1} --global-batch-size 64"
    ),
    "PP2 VPP2, larger groups, few microbatches": Case(
        4,
        f"{_LLAMA} {_PP2} --num-virtual-stages-per-pipeline-rank 2 {_ZERO1} --global-batch-size 10 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3",
        memory_gb=4.0,
    ),
    "PP4, uneven": Case(
        8,
        f"{_LLAMA} {_PP4} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 "
        "--global-batch-size 16",
    ),
    "PP2, stages between data-parallel ranks": Case(
        16, f"{_LLAMA} {_TP2} {_PP2} --use-tp-pp-dp-mapping {_ZERO1} --global-batch-size 32"
    ),
    **{
        f"CP2, {kind}": Case(
            16, f"{_LLAMA} --context-parallel-size 2 --cp-comm-type {kind} {_TP2} {_SP} {_ZERO1} --global-batch-size 32"
        )
        for kind in ("p2p", "all_gather", "a2a")
    },
    "CP4 over two nodes of 4, recomputed": Case(
        8,
        f"{_LLAMA} --context-parallel-size 4 {_TP2} --recompute-granularity selective --global-batch-size 8",
        gpus_per_node=4,
    ),
    # On the first of two stages no loss needs more than what is computed anew.
    **{
        f"recomputed{title}: {way}": Case(4, f"{_LLAMA} {stages} {_TP2} {_SP} --global-batch-size 16 {flags}")
        for title, stages in (("", ""), (", PP2", _PP2))
        for way, flags in {
            "full": f"{_FULL} 1 --recompute-method uniform",
            "full by threes": f"{_FULL} 3 --recompute-method uniform",
            "block": f"{_FULL} 3 --recompute-method block",
            "attention's core": "--recompute-granularity selective",
            "norms and MLP": "--recompute-granularity selective --recompute-modules layernorm mlp",
        }.items()
    },
    "recomputed without sequence parallelism": Case(
        4, f"{_LLAMA} {_PP2} {_TP2} {_FULL} 1 --recompute-method uniform --global-batch-size 16"
    ),
    "norms after, over the projection": Case(4, f"{_OLMO2} {_TP2} --global-batch-size 16"),
    "norms after, recomputed on CPU ranks": Case(
        2, f"{_OLMO2} {_FULL} 1 --recompute-method uniform --device cpu --global-batch-size 4", "cpu", cores=2
    ),
    "norms after, recomputed on CPU ranks, PP2": Case(
        2, f"{_OLMO2} {_PP2} {_FULL} 1 --recompute-method uniform --device cpu --global-batch-size 4", "cpu"
    ),
    "norms before, recomputed on CPU ranks, PP2": Case(
        2, f"{_LLAMA} {_PP2} {_FULL} 1 --recompute-method uniform --device cpu --global-batch-size 4", "cpu"
    ),
    "norms of heads": Case(4, f"{_LLAMA} --qk-layernorm {_TP2} {_SP} --global-batch-size 16"),
    "fewer groups than ranks": Case(
        8, f"{_LLAMA} --tensor-model-parallel-size 8 {_SP} --rotary-percent 0.5 --global-batch-size 8"
    ),
    "experts on one device": Case(1, f"{_SHARED} --global-batch-size 4"),
    "experts, gathers kept": Case(
        4, f"{_EXPERTS} {_TP2} {_SP} --sequence-parallel-keep-gathered --global-batch-size 8"
    ),
    "shared experts, gathers kept": Case(
        4, f"{_SHARED} {_TP2} {_SP} --sequence-parallel-keep-gathered --global-batch-size 8"
    ),
    "EP4, all-to-all": Case(
        16,
        f"{_SHARED} --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall {_ZERO1} "
        "--global-batch-size 32",
    ),
    "EP2 ETP2 TP2 SP, gathered": Case(
        16,
        f"{_EXPERTS} {_TP2} {_SP} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather "
        "--global-batch-size 32 --overlap-grad-reduce",
    ),
    "EP2 ETP2 TP2 SP, all-to-all, recomputed": Case(
        16,
        f"{_SHARED} {_TP2} {_SP} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        f"--global-batch-size 32 {_FULL} 1 --recompute-method uniform",
    ),
    "EP2 ETP1 TP2 PP2, stages between": Case(
        16,
        f"{_EXPERTS} {_TP2} {_SP} {_PP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        f"{_ZERO1} --use-tp-pp-dp-mapping --global-batch-size 32",
        gpus_per_node=4,
    ),
    "experts with gradients of squares": Case(
        4, f"{_EXPERTS.replace('--swiglu', '--squared-relu')} --expert-model-parallel-size 4 --global-batch-size 8"
    ),
    "CPU ranks that share cores": Case(
        4, f"{_PLAIN} {_PP2} --device cpu --global-batch-size 8", "cpu", gpus_per_node=4, cores=2
    ),
    "CPU ranks with a core each": Case(
        4, f"{_LLAMA} {_TP2} {_SP} {_PP2} --device cpu --global-batch-size 8", "cpu", gpus_per_node=4, cores=4
    ),
    "larger micro batches, SGD": Case(
        8,
        f"{_LLAMA.replace('--micro-batch-size 1', '--micro-batch-size 4')} --optimizer sgd --global-batch-size 64",
        memory_gb=20.0,
    ),
    "short moments": Case(8, f"{_LLAMA} {_ZERO1} --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 --global-batch-size 16"),
}


_RAMP = "--rampup-batch-size 8 8 1000 --train-samples 100000"
DRY_RUNS = {
    "one device": CASES["one device"],
    "padding, FP8 in some layers": Case(
        1, f"{_PLAIN} --bf16 --fp8-format hybrid --fp8-recipe rowwise --first-last-layers-bf16 --global-batch-size 4"
    ),
    "a batch that grows": Case(4, f"{_LLAMA} --global-batch-size 32 {_RAMP}"),
    "64 ranks": Case(64, f"{_LLAMA} --tensor-model-parallel-size 8 {_SP} {_PP2} --global-batch-size 64"),
    "72 ranks, 3 of a stage": Case(
        72, f"{_LLAMA} --num-layers 24 --pipeline-model-parallel-size 24 --global-batch-size 72"
    ),
    "128 ranks": Case(
        128, f"{_LLAMA} {_PP4} --num-virtual-stages-per-pipeline-rank 2 {_TP2} {_SP} {_ZERO1} --global-batch-size 128"
    ),
    **{title: CASES[title] for title in ("host memory", "FSDP2 in host memory", "PP4, uneven", "EP4, all-to-all")},
    **{title: CASES[title] for title in ("EP2 ETP1 TP2 PP2, stages between", "experts with gradients of squares")},
}
"""Launches whose layout `--dry-run` describes."""


def config_of(case: Case) -> Config:
    values = parse(shlex.split(case.flags)).values
    facts = Facts(cuda_available=case.device != "cpu")
    config = resolve({**values, **placeholders(values), "world_size": case.ranks}, facts)
    assert (found := problems(config, facts)) == [], found
    return config


def machine_of(case: Case) -> Machine:
    devices = hardware(case.device, memory_gb=case.memory_gb)
    constants = dataclasses.replace(constants_of(devices), cores=case.cores)
    return Machine(devices, gpus_per_node=case.gpus_per_node, constants=constants)


def numbers(title: str) -> str:
    """What the planner says of a case, and its sums in full."""
    case = CASES[title]
    return "\n".join([f"## {title}", *_lines(config_of(case), machine_of(case), 0.92e9 * case.memory_gb), ""])


def _lines(config: Config, machine: Machine, usable: float) -> Iterator[str]:
    fused, shapes = machine.devices.is_gpu, Shapes(config)
    work = Workload(config, shapes, fused=fused)
    found = evaluate_config(config, machine, usable)
    yield from as_text(found)
    yield (
        f"flops: {flops_per_token(config)} a token, {active_parameters(config)} parameters compute it, "
        f"{parameters_without_embeddings(config)} without embeddings"
    )
    yield f"in host memory: {_row(host_bytes(config), host_bytes(config, fullest=True))}"
    yield f"kept by every rank: {kept_at_least(config, fused=fused, anywhere=True)[0]}"
    yield f"helpful: {helpful_flags(config, found.stages[found.worst_stage], fused=fused)}"
    time = step_time(config, shapes, machine)
    yield f"seconds: {_named(time.parts)}; bubble {time.bubble_share:.10g}; sent {time.sent_bytes:.10g}"
    yield f"hidden: {_named(time.hidden_by_axis)}"
    yield f"bounds: {_row(at_least(work, machine), formula_at_least(work, machine))}"
    for stage, needs in enumerate(found.stages):
        yield f"stage {stage}: {_named(needs.parts)}"


def _row(*values: float) -> str:
    return " ".join(f"{value:.10g}" for value in values)


def _named(values: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.10g}" for name, value in values.items())


def dry_run(title: str) -> str:
    """What `--dry-run` prints of a launch."""
    return f"## dry run: {title}\n\n{describe(config_of(DRY_RUNS[title]))}\n"


def golden_text() -> str:
    return "\n".join([*map(numbers, CASES), *map(dry_run, DRY_RUNS)])
