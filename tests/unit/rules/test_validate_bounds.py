"""Absurd values of flags, and sizes that the configuration counts up to, are answered at once."""

import time

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.catalogue import count, count_per_rank, count_per_stage, parameters, stages, tensor_size
from megatron_ext.parts.stack import stack
from megatron_ext.plan.dry_run import describe
from megatron_ext.plan.flops import active_parameters
from megatron_ext.rules.suggest import divisors
from megatron_ext.train.configure import configure

_BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 64 "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --dry-run --world-size 1 "
)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--num-layers 1000000000", "--num-layers: 1000000000 is above 10000; use 10000 or less"),
        ("--num-layers -1000000000", "--num-layers: -1000000000 is above 10000"),
        (f"--hidden-size {'9' * 4000}", "--hidden-size: this number is above 1000000000000000"),
        (f"--hidden-size {'9' * 5000}", "'999999"),
        ("--world-size 10000000", "--world-size: 10000000 is above 1048576"),
        ("--num-experts 10000000", "--num-experts: 10000000 is above 65536"),
        (
            "--rampup-batch-size 1 1 1000000000 --global-batch-size 1000000000",
            "grows to --global-batch-size 1000000000 in 999999999 phases, more than 10000; use an increment of 333667",
        ),
        ("--hidden-size 999999999999989 --num-attention-heads 2", "is not divisible by"),
    ],
)
def test_absurd_sizes_are_refused_at_once(flags: str, problem: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        configure((_BASE + flags).split())
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.process_time() - started < 2


def test_a_saved_or_a_yaml_value_is_bounded_too(tmp_path) -> None:
    (tmp_path / "flags.yaml").write_text("num_layers: 1000000000\n")
    with pytest.raises(ConfigurationError, match="num_layers: 1000000000 is above 10000"):
        parse(["--config", str(tmp_path / "flags.yaml")])


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers 10000",
        "--num-layers 1000 --num-experts 65536 --disable-bias-linear",
        "--world-size 1048576",
        "--world-size 8192 --pipeline-model-parallel-size 8192 --num-layers 8192 --global-batch-size 8192",
        "--world-size 128 --pipeline-model-parallel-size 128 --num-layers 128 --global-batch-size 128",
    ],
)
def test_the_largest_sizes_are_described_at_once(flags: str) -> None:
    started = time.process_time()
    assert describe(configure((_BASE + flags).split()).config)
    assert time.process_time() - started < 5


def test_few_divisors_of_an_absurd_number() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(10**10)[-1] == 10**10
    started = time.process_time()
    assert divisors(10**15)[:4] == [1, 2, 4, 5]
    assert time.process_time() - started < 0.5


_EXPERTS = (
    "--num-layers 4 --num-experts 8 --moe-ffn-hidden-size 32 --disable-bias-linear --moe-router-topk 3 "
    "--moe-shared-expert-intermediate-size 48 --world-size 4 --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4"
)


@pytest.mark.parametrize(
    "flags",
    ["", "--world-size 4 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --swiglu", _EXPERTS],
    ids=["dense", "TP2 PP2", "experts PP2 EP2 interleaved"],
)
def test_counting_by_kinds_is_counting(flags: str) -> None:
    """The sums that --dry-run shows, against the parameters listed one by one."""
    config = configure((_BASE + flags).split()).config
    every = parameters(config)
    assert count(config) == sum(parameter.size for parameter in every)
    held = [[p for p in every if stage in stages(config, p)] for stage in range(len(count_per_stage(config)))]
    assert count_per_stage(config) == [sum(p.size for p in stage) for stage in held]

    def local(stage: list, routed: bool) -> int:
        sizes = [p.local_shape(tensor_size(config, p)) for p in stage if (p.expert is not None) == routed]
        total = sum(size[0] * (size[1] if len(size) > 1 else 1) for size in sizes)
        return total // config.layout.expert_model_parallel_size if routed else total

    assert count_per_rank(config, experts=False) == [local(stage, False) for stage in held]
    assert count_per_rank(config, experts=True) == [local(stage, True) for stage in held]
    assert count_per_rank(config) == [local(stage, False) + local(stage, True) for stage in held]
    top_k = config.model.moe_router_topk
    assert active_parameters(config) == sum(p.size for p in every if p.expert is None or p.expert < top_k)
    assert len(stack(config).kinds) == 1
