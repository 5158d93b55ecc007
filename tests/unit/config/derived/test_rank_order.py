"""Layout, batch and cost arithmetic against independent sources: brute force, megatron-core, published sizes."""

import itertools
import shlex

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_ext.config.derived.batch_size import (
    BatchPhase,
    batch_phases,
    global_batch_size,
    samples_at_iteration,
    training_steps,
)
from megatron_ext.config.derived.rank_order import (
    AXES,
    axis_sizes,
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
from megatron_ext.config.schema import Config, TrainingConfig
from megatron_ext.parts.catalogue import count, count_per_rank
from megatron_ext.plan.dry_run import describe
from megatron_ext.plan.flops import (
    active_parameters,
    flops_per_token,
    parameters_without_embeddings,
)
from megatron_ext.plan.state_bytes import StateBytes, state_bytes
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


@pytest.mark.parametrize("mapping", ORDERS)
@pytest.mark.parametrize(("tensor", "context", "pipeline", "data"), LAYOUTS)
def test_every_rank_has_its_own_place(tensor: int, context: int, pipeline: int, data: int, mapping: str):
    ours = layout(tensor, context, pipeline, data, mapping).layout
    places = [coordinates(ours, rank) for rank in range(ours.world_size)]
    assert set(places) == set(itertools.product(*map(range, axis_sizes(ours))))
    assert [rank_of(ours, place) for place in places] == list(range(ours.world_size))


@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (4, 2)])
def test_every_layer_is_in_one_chunk_and_the_pipeline_passes_them_in_order(pipeline: int, chunks: int):
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    config = configuration(
        f"--world-size {pipeline} --pipeline-model-parallel-size {pipeline} --global-batch-size {pipeline} {virtual}"
    )
    stages = chunk_layers(config)
    passed = [layer for chunk in range(chunks) for stage in range(pipeline) for layer in stages[stage][chunk]]
    assert passed == list(range(8))


def test_both_virtual_stage_flags_give_the_same_configuration():
    line = "--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2"
    assert configuration(f"{line} --num-virtual-stages-per-pipeline-rank 2") == configuration(
        f"{line} --num-layers-per-virtual-pipeline-stage 2"
    )


RAMPS = ["--rampup-batch-size 4 4 100", "--rampup-batch-size 2 2 7", "--rampup-batch-size 4 12 33"]


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize("length", ["--train-iters 40", "--train-iters 3"])
def test_phases_are_what_stepping_through_the_run_gives(ramp: str, length: str):
    config = configuration(f"--world-size 2 --global-batch-size 16 {ramp} {length}")
    sizes = [phase.global_batch_size for phase in batch_phases(config) for _ in range(phase.steps)]
    consumed = 0
    for step, size in enumerate(sizes):
        assert size == global_batch_size(config, consumed)
        assert samples_at_iteration(config, step) == consumed
        consumed += size
    assert len(sizes) == training_steps(config) == config.training.train_iters


def test_a_ramp_by_hand():
    config = configuration("--global-batch-size 16 --rampup-batch-size 4 4 100 --train-iters 20")
    # 3 increments over 100 samples: a larger batch from 33.3, 66.7 and 100 consumed samples on.
    assert batch_phases(config) == [
        BatchPhase(4, 0, 9),  # 36 samples
        BatchPhase(8, 36, 4),  # 68
        BatchPhase(12, 68, 3),  # 104
        BatchPhase(16, 104, 4),
    ]


@pytest.mark.parametrize("samples", [4, 17, 100, 1000])
def test_a_run_in_samples_takes_no_step_that_it_cannot_fill(samples: int):
    line = f"--train-samples {samples} --global-batch-size 16 --rampup-batch-size 4 4 100"
    config = resolve(
        {**parse(shlex.split(f"{BASE} {line}")).values, "train_iters": None},
        Facts(),
    )
    used = sum(phase.steps * phase.global_batch_size for phase in batch_phases(config))
    assert samples - 16 < used <= samples


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


def test_the_report_shows_layout_batch_and_length():
    report = describe(
        configuration(
            "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
            "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 16"
        )
    )
    assert "world size 8 = TP 2 x PP 2 x CP 1 x DP 2" in report
    assert "    1  2-3 6-7 " in report
    assert "effective batch      1 x 8 x DP 2 = 16 samples" in report
    assert "tokens per step      1,024" in report
    assert "   7  (1, 0, 1, 1)" in report


def test_the_report_on_many_ranks_stays_short():
    report = describe(configuration("--world-size 4096 --pipeline-model-parallel-size 8"))
    assert len(report.splitlines()) < 40
    assert "    7  3584-4095      3584: (0, 0, 0, 7), 3585: (0, 0, 1, 7), 3586: (0, 0, 2, 7), ..." in report


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


@pytest.mark.parametrize("ramp", [(1, 1, 295), (1, 1, 316), (1, 1, 9), (1, 1, 7), (4, 1, 100), (3, 2, 29)])
def test_phases_are_the_steps_also_where_a_quotient_is_rounded(ramp: tuple[int, int, int]) -> None:
    """295 samples over a seventh of 295 is less than 7 in floating point, and Megatron's formula, which is ours, asks
    for the whole part of that; a phase begins where the formula says so. At the last sample of the ramp it still
    counts."""
    start, increment, samples = ramp
    for increments in (1, 2, 3, 6, 7, 11, 13):
        training = TrainingConfig(
            global_batch_size=start + increments * increment, rampup_batch_size=ramp, train_iters=2 * samples
        )
        config = Config(training=training)
        sizes, consumed = [], 0
        for step in range(2 * samples):
            if consumed <= samples + 1 < 50:
                assert samples_at_iteration(config, step) == consumed
            sizes.append(global_batch_size(config, consumed))
            consumed += sizes[-1]
        assert [phase.global_batch_size for phase in batch_phases(config) for _ in range(phase.steps)] == sizes
        at_the_end = start + int(samples / (samples / increments)) * increment
        assert global_batch_size(config, samples) == min(at_the_end, training.global_batch_size)
        assert global_batch_size(config, samples + 1) == training.global_batch_size


def test_a_ramp_whose_last_quotient_is_rounded_down() -> None:
    """58 / (58 / 7) is below 7 in fp64: the step after 58 samples has 8 of them, as the formula gives it."""
    config = configuration("--global-batch-size 9 --rampup-batch-size 2 1 58 --train-iters 40")
    consumed = 0
    for step in range(40):
        assert samples_at_iteration(config, step) == consumed
        consumed += global_batch_size(config, consumed)
    assert global_batch_size(config, 58) == 8
    assert [samples_at_iteration(config, step) for step in range(40)].count(58) == 1
