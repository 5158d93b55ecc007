"""Which layers a stage has, against megatron-core's own arithmetic and grammar, and by hand."""

import random
import shlex

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_ext.config.derived.pipeline_split import core_layout, is_uneven, layer_counts, read_pipeline_layout
from megatron_ext.config.derived.rank_order import chunk_layers
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.dry_run import describe
from megatron_ext.parts.catalogue import count_per_stage
from megatron_ext.rules.validate import problems
from tests.support.small_models import small_config
from tests.support.wrong_flags import BASE

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"

SPLITS = [
    # layers, stages, chunks, flags
    (8, 1, 1, ""),
    (8, 4, 2, ""),
    (8, 2, 1, f"{FIRST} 3"),
    (8, 2, 1, f"{LAST} 3"),
    (8, 2, 1, f"{FIRST} 6 {LAST} 2"),
    (30, 4, 1, f"{FIRST} 6"),
    (30, 4, 1, f"{FIRST} 5 {LAST} 7"),
    (20, 4, 2, f"{FIRST} 2"),
    (20, 4, 2, f"{LAST} 2"),
    (20, 4, 2, f"{FIRST} 2 {LAST} 6"),
    (7, 2, 1, EMBEDDING),
    (7, 2, 2, LOSS),
    (30, 4, 1, f"{EMBEDDING} {LOSS}"),
    (30, 4, 4, f"{EMBEDDING} {LOSS}"),
    (6, 2, 4, f"{EMBEDDING} {LOSS}"),
]


def configuration(layers: int, stages: int, chunks: int, flags: str) -> Config:
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    line = (
        f"{BASE} --num-layers {layers} --world-size {stages} --pipeline-model-parallel-size {stages} "
        f"--global-batch-size {4 * stages} {virtual} {flags}"
    )
    config = resolve(parse(shlex.split(line)).values, Facts())
    assert problems(config, Facts()) == []
    return config


@pytest.mark.parametrize(("layers", "stages", "chunks", "flags"), SPLITS)
def test_split_is_megatron_cores_own(layers: int, stages: int, chunks: int, flags: str):
    config = configuration(layers, stages, chunks, flags)
    layout = config.layout
    core = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=layout.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=layout.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=layout.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=layout.account_for_loss_in_pipeline_split,
    )
    for stage, held in enumerate(chunk_layers(config)):
        for chunk, of_chunk in enumerate(held):
            vp_stage = chunk if chunks > 1 else None
            assert len(of_chunk) == get_num_layers_to_build(core, vp_stage, stage)
            assert of_chunk.start == get_transformer_layer_offset(core, vp_stage, stage)


def test_two_stages_with_numbers_of_their_own_may_interleave():
    """There megatron-core divides by the number of stages between them, which is 0; it is handed a layout instead."""
    config = configuration(8, 2, 2, f"{FIRST} 2 {LAST} 6")
    assert chunk_layers(config) == [[range(0, 1), range(4, 5)], [range(1, 4), range(5, 8)]]


@pytest.mark.parametrize("text", ["Et*3|(tt|)*2tL", "E|t*4|t*4|L", "E,tt|(t|)*4,ttL", "Et*4|t*2|tt|L"])
def test_layout_string_is_what_megatron_core_reads(text: str):
    theirs = PipelineParallelLayerLayout(text, 2)
    config = configuration(8, 2, 1, f"--pipeline-model-parallel-layout '{text}'")
    counts = layer_counts(config)
    assert config.layout.virtual_pipeline_model_parallel_size == theirs.virtual_pipeline_model_parallel_size
    assert PipelineParallelLayerLayout(core_layout(counts), 2).layout == theirs.layout
    flat = [
        layer for chunk in range(len(counts[0])) for stage in range(2) for layer in chunk_layers(config)[stage][chunk]
    ]
    assert flat == list(range(8))


def test_grammar_is_megatron_cores():
    """Random strings: what it reads, we read alike; what it refuses, we refuse."""
    draw = random.Random(7)
    pieces = ["E", "t", "m", "L", "|", "t*3", "|*2", "(t|)*2", "(tt,t|t)*3", "(t*2|)*2", ",", "x", "(", "t*", "t*0"]
    read = 0
    for _ in range(2000):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 7)))
        try:
            expected = PipelineParallelLayerLayout.parse_str_to_list(text)
        except AssertionError:
            with pytest.raises(ValueError, match="none of E, t, m, L"):
                read_pipeline_layout(text)
            continue
        letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        assert read_pipeline_layout(text) == ["".join(letters[kind.name] for kind in chunk) for chunk in expected]
        read += 1
    assert 500 < read < 1900


def test_parameters_and_report_follow_the_split():
    config = configuration(7, 2, 4, EMBEDDING)
    report = describe(config)
    assert "    0  none 1 3 5 " in report
    assert "    1  0 2 4 6 " in report
    even = count_per_stage(configuration(8, 2, 1, ""))
    uneven = count_per_stage(configuration(8, 2, 1, f"{FIRST} 1"))
    layer = (even[1] - uneven[1]) // -3
    assert (uneven[0], uneven[1]) == (even[0] - 3 * layer, even[1] + 3 * layer)
    assert layer > 0


def test_chunks_of_a_layout_go_around_the_stages() -> None:
    """In the order in which a microbatch passes them: stage 0, stage 1, stage 0 again."""
    split = {"pipeline_model_parallel_layout": "Et*3|t|tt|L", "pipeline_model_parallel_size": 2, "world_size": 2}
    config = small_config({"num_layers": 6}, {**split, "num_virtual_stages_per_pipeline_rank": 2})
    assert layer_counts(config) == [[3, 2], [1, 0]]


@pytest.mark.parametrize(
    ("counts", "uneven"),
    [
        ([[2]], False),
        ([[2, 2], [2, 2]], False),
        ([[1, 3], [2, 2]], True),
        ([[2, 2], [2, 1]], True),
        ([[1, 3], [1, 3]], True),
        ([[3], [3], [2]], True),
    ],
)
def test_a_split_is_uneven_where_two_chunks_differ(counts: list[list[int]], uneven: bool) -> None:
    assert is_uneven(counts) == uneven


def test_a_split_as_the_engine_takes_it() -> None:
    """Chunk after chunk in the order of a microbatch."""
    t = "decoder"
    assert core_layout([[1, 0], [2, 3]]) == [["embedding", t], [t, t], [], [t, t, t, "loss"]]
    assert core_layout([[1]]) == [["embedding", t, "loss"]]
    assert core_layout([[1], [1]], depths=2) == [["embedding", t], [t, "mtp", "mtp", "loss"]]
    assert read_pipeline_layout(" E t,t | (t|)*2 tm*2L ") == ["Ett", "t", "t", "tmmL"]
    for text in ("Et*999999L", f"E{'t*60000' * 2}L", "E((t*1000)*1000)*2L"):
        with pytest.raises(ValueError, match="it has more than 100000 layers"):
            read_pipeline_layout(text)
