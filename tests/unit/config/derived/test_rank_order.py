"""Layout, batch and cost arithmetic against independent sources: brute force, megatron-core, published sizes."""

import itertools
import shlex
from dataclasses import replace

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_ext.config.derived.rank_order import (
    AXES,
    chunk_layers,
    context_chunks,
    coordinates,
    expert_axis_sizes,
    expert_coordinates,
    groups,
    rank_of,
)
from megatron_ext.config.derived.sharding import SCHEMES
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, padded_vocabulary, resolve
from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.cost.dry_run import describe
from megatron_ext.cost.flops import (
    active_parameters,
    flops_per_token,
    parameters_without_embeddings,
)
from megatron_ext.cost.state_bytes import StateBytes, state_bytes
from megatron_ext.parts.catalogue import count, count_per_rank
from megatron_ext.rules.validate import problems
from tests.support.wrong_flags import BASE

LAYOUTS = [
    # tensor, context, pipeline, data
    *((1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 2, 2), (4, 1, 2, 3), (2, 1, 4, 1)),
    *((1, 2, 1, 1), (2, 2, 2, 2), (2, 4, 1, 3)),
]
CP2 = "--context-parallel-size 2 --attention-dropout 0"


def configuration(line: str) -> Config:
    facts = Facts()
    config = resolve(parse(shlex.split(f"{BASE} {line}")).values, facts)
    assert problems(config, facts) == []
    return config


def layout(tensor: int, context: int, pipeline: int, data: int, more: str = "") -> Config:
    return configuration(
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} --attention-dropout 0 "
        f"--context-parallel-size {context} --world-size {tensor * context * pipeline * data} {more}"
    )


ORDERS = {"": "tp-cp-ep-dp-pp", "--use-tp-pp-dp-mapping": "tp-cp-ep-pp-dp"}


@pytest.mark.parametrize("mapping", ORDERS)
@pytest.mark.parametrize(("tensor", "context", "pipeline", "data"), LAYOUTS)
def test_groups_are_those_that_megatron_core_makes(tensor: int, context: int, pipeline: int, data: int, mapping: str):
    ours = layout(tensor, context, pipeline, data, mapping).layout
    core = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=ORDERS[mapping])
    for axis in AXES:
        assert sorted(groups(ours, axis)) == sorted(core.get_ranks(axis))


@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (4, 2)])
def test_every_layer_is_in_one_chunk_and_the_pipeline_passes_them_in_order(pipeline: int, chunks: int):
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    config = configuration(
        f"--world-size {pipeline} --pipeline-model-parallel-size {pipeline} --global-batch-size {pipeline} {virtual}"
    )
    stages = chunk_layers(config)
    passed = [layer for chunk in range(chunks) for stage in range(pipeline) for layer in stages[stage][chunk]]
    assert passed == list(range(8))


def test_gpt2_small_has_its_published_size():
    config = configuration(
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
        "--make-vocab-size-divisible-by 1"
    )
    assert count(config) == 124_439_808  # transformers' GPT2LMHeadModel("gpt2").num_parameters()
    assert parameters_without_embeddings(config) == 124_439_808 - 50257 * 768 - 1024 * 768
    matrices = 12 * 12 * 768 * 768 + 50257 * 768
    assert flops_per_token(config) == 6 * matrices + 6 * 12 * 768 * 1024


def test_llama_8b_has_its_published_size():
    config = configuration(
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192"
    )
    assert count(config) == 8_030_261_248  # the model card of Llama 3 8B: 8.03B
    assert flops_per_token(config) == 6 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 6 * 32 * 4096 * 8192


MIXTRAL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 32 --vocab-size 32000 --seq-length 4096 "
    "--num-experts 8"
)


def test_mixtral_8x7b_has_its_published_size():
    config = configuration(MIXTRAL)
    assert count(config) == 46_702_792_704  # the tensors of the published checkpoint
    active = 46_702_792_704 - 6 * 32 * 3 * 4096 * 14336  # two of eight experts in each layer: 12.9B
    assert active_parameters(config) == active
    assert flops_per_token(config) == 6 * (active - 32000 * 4096 - 65 * 4096) + 6 * 32 * 4096 * 4096


def test_experts_are_shared_by_ranks_of_their_own():
    layout = "--world-size 16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    line = f"{MIXTRAL} {layout} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    config = configuration(f"{line} --bf16 --use-distributed-optimizer")
    assert expert_axis_sizes(config.layout) == (1, 4, 2, 2)
    assert [expert_coordinates(config.layout, rank) for rank in (0, 1, 5, 15)] == [
        (0, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 1, 1, 0),
        (0, 3, 1, 1),
    ]
    # Two whole experts of each of 16 layers, whatever tensor parallelism does to the rest.
    assert count_per_rank(config, experts=True) == [16 * 2 * 3 * 4096 * 14336] * 2
    assert state_bytes(config).total == 6 + 12 / 4
    assert state_bytes(config, expert=True).total == 6 + 12 / 2
    report = describe(config)
    assert "experts on them: ETP 1 x EP 4 x expert DP 2 x PP 2" in report
    assert "(9 bytes a parameter, 12 of an expert)" in report
    assert "  15  (1, 0, 3, 1)  (0, 3, 1, 1)" in report


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--bf16", 18),
        ("--bf16 --use-distributed-optimizer", 6 + 12 / 4),
        ("", 16),
        ("--use-distributed-optimizer", 8 + 8 / 4),
        (f"--use-distributed-optimizer {CP2}", 8 + 8 / 4),  # context-parallel ranks hold the same weights
        ("--fp16", 16),
        ("--bf16 --optimizer sgd", 14),
        ("--bf16 --optimizer sgd --sgd-momentum 0", 10),
        ("--bf16 --optimizer lion", 14),
        ("--bf16 --optimizer lion --use-distributed-optimizer", 6 + 8 / 4),
        ("--use-torch-fsdp2", 16 / 4),
        ("--bf16 --use-torch-fsdp2", 16 / 4),  # the shards are the fp32 masters
        ("--bf16 --use-torch-fsdp2 --num-distributed-optimizer-instances 2", 16 / 2),
        ("--bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2", 6 + 12 / 2),
        ("--bf16 --use-megatron-fsdp --num-distributed-optimizer-instances 2", 18 / 2),
        (
            "--bf16 --use-megatron-fsdp --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
            6 / 2 + 12 / 4,
        ),
        ("--bf16 --use-torch-fsdp2 --torch-fsdp2-cpu-offload", 0),
    ],
)
def test_bytes_per_parameter(line: str, expected: float):
    assert state_bytes(configuration(f"--world-size 4 {line}")).total == expected


@pytest.mark.parametrize(
    ("kind", "gigabytes"), [("no_shard", 112), ("optim", 49), ("optim_grads", 38.5), ("optim_grads_params", 28)]
)
def test_zero_of_seven_billion_parameters_on_four_ranks(kind: str, gigabytes: float):
    """As the paper counts: 16-bit weights and gradients, and 12 bytes of optimizer state."""
    scheme = next(each for each in SCHEMES if each.values.get("data_parallel_sharding_strategy") == kind)
    assert StateBytes(2, 2, 12, scheme.shares(4)).total * 7 == gigabytes


@pytest.mark.parametrize("tensor_parallel_size", range(1, 9))
def test_the_vocabulary_is_padded_as_megatron_does(tensor_parallel_size: int) -> None:
    """Megatron-LM goes up by one until the divisor times the tensor-parallel size divides the number."""
    for size, divisor in itertools.product((1, 127, 128, 129, 32000, 50257, 128256, 151643), (1, 16, 128)):
        expected = size
        while expected % (divisor * tensor_parallel_size):
            expected += 1
        assert padded_vocabulary(size, divisor, tensor_parallel_size) == expected
    values = {"vocab_size": 50257, "tensor_model_parallel_size": tensor_parallel_size}
    assert resolve(values, Facts()).model.padded_vocab_size == padded_vocabulary(50257, 128, tensor_parallel_size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
def test_every_context_parallel_rank_has_a_chunk_of_the_head_and_one_of_the_tail(size: int) -> None:
    """Each chunk is on one rank, and the costs of a rank's two are together the same, under the causal mask."""
    held = [context_chunks(rank, size) for rank in range(size)]
    assert sorted(chunk for pair in held for chunk in pair) == list(range(2 * size))
    assert {head + tail for head, tail in held} == {2 * size - 1}
    assert all(head < size <= tail for head, tail in held)


@pytest.mark.parametrize("mapping", [False, True])
def test_places_of_ranks(mapping: bool) -> None:
    """2 x 3 x 5 x 7 ranks: each axis has a size of its own."""
    layout = LayoutConfig(
        world_size=210,
        tensor_model_parallel_size=2,
        context_parallel_size=3,
        pipeline_model_parallel_size=7,
        use_tp_pp_dp_mapping=mapping,
    )
    for rank in range(210):
        place = coordinates(layout, rank)
        outer = place.dp * 7 + place.pp if mapping else place.pp * 5 + place.dp
        assert rank == place.tp + 2 * (place.cp + 3 * outer) == rank_of(layout, place)
        assert (place.tp < 2, place.cp < 3, place.dp < 5, place.pp < 7) == (True,) * 4
    sizes = {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 3}
    experts = replace(layout, **sizes)
    for rank in range(210):
        place = expert_coordinates(experts, rank)
        outer = place.edp * 7 + place.pp if mapping else place.pp * 10 + place.edp
        assert rank == place.etp + 1 * (place.ep + 3 * outer)
        assert (place.etp, place.ep < 3, place.edp < 10, place.pp < 7) == (0, True, True, True)
