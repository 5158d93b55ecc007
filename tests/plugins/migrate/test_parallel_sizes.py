"""Parallel sizes follow from those that a configuration file gives, or contradict each other."""

import dataclasses

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.parallel_sizes import Layout, solve

GIVEN = {"tensor": 2, "context": 2, "pipeline": 2}


@pytest.mark.parametrize(
    ("facts", "world_size", "accumulation", "expected"),
    [
        # tensor, context, pipeline, replicas, data, micro batch, accumulation, global batch
        ({}, None, 1, (1, 1, 1, 1, None, None, 1, None)),
        ({}, None, None, (1, 1, 1, 1, None, None, None, None)),
        ({}, 8, 1, (1, 1, 1, 1, 8, None, 1, None)),
        (GIVEN, 16, 1, (2, 2, 2, 1, 2, None, 1, None)),
        ({"world_size": 8, "tensor": 2}, None, 1, (2, 1, 1, 1, 4, None, 1, None)),
        ({"world_size": 8}, 8, 1, (1, 1, 1, 1, 8, None, 1, None)),
        ({"shard": 4}, None, 1, (1, 1, 1, 1, 4, None, 1, None)),
        ({"shard": 4, "replicate": 2}, None, 1, (1, 1, 1, 2, 8, None, 1, None)),
        ({**GIVEN, "shard": 4, "replicate": 2}, 64, 1, (2, 2, 2, 2, 8, None, 1, None)),
        ({"replicate": 2}, 8, 1, (1, 1, 1, 2, 8, None, 1, None)),
        ({"micro_batch_size": 3}, None, 1, (1, 1, 1, 1, None, 3, 1, None)),
        ({"micro_batch_size": 3}, 4, 1, (1, 1, 1, 1, 4, 3, 1, 12)),
        ({"micro_batch_size": 3, "accumulation": 5}, 4, 1, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"micro_batch_size": 3, "accumulation": 5, "global_batch_size": 60}, 4, 1, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"accumulation": 5, "global_batch_size": 60}, 4, None, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"micro_batch_size": 3, "global_batch_size": 60}, 4, None, (1, 1, 1, 1, 4, 3, 5, 60)),
        ({"global_batch_size": 60}, 4, None, (1, 1, 1, 1, 4, None, None, 60)),
        ({"global_batch_size": 60}, 4, 1, (1, 1, 1, 1, 4, 15, 1, 60)),
        ({"global_batch_size": 60, "micro_batch_size": 3}, None, 1, (1, 1, 1, 1, None, 3, 1, 60)),
    ],
)
def test_sizes_follow_from_those_that_are_given(
    facts: dict[str, int], world_size: int | None, accumulation: int | None, expected: tuple[int | None, ...]
) -> None:
    layout = solve(facts, world_size, accumulation)
    assert dataclasses.astuple(layout) == expected
    data = expected[4]
    model = layout.tensor * layout.context * layout.pipeline
    assert layout.world_size == (None if data is None else model * data)


@pytest.mark.parametrize(
    ("facts", "world_size", "problem"),
    [
        ({"world_size": 8}, 4, "the file is for 8 ranks, not for --world-size 4; leave it out"),
        (GIVEN, 12, "12 ranks are not TP 2 x PP 2 x CP 2 x replicas 1; give --world-size 8, or other sizes"),
        (
            {"tensor": 2, "shard": 4},
            4,
            "4 ranks are not TP 2 x PP 1 x CP 1 x shards 4 x replicas 1; give --world-size 8",
        ),
        (
            {"tensor": 2, "shard": 4, "replicate": 3},
            16,
            "16 ranks are not TP 2 x PP 1 x CP 1 x shards 4 x replicas 3; give --world-size 24, or",
        ),
        ({"replicate": 3}, 8, "8 ranks are not TP 1 x PP 1 x CP 1 x replicas 3; give --world-size 3, or other sizes"),
        ({"tensor": 2, "replicate": 3}, 8, "8 ranks are not TP 2 x PP 1 x CP 1 x replicas 3; give --world-size 6, or"),
        (
            {"global_batch_size": 61},
            4,
            "a global batch of 61 is not micro batch N x accumulation 1 x DP 4; change one of them, or the number",
        ),
        (
            {"global_batch_size": 60, "micro_batch_size": 3, "accumulation": 1},
            4,
            "a global batch of 60 is not micro batch 3 x accumulation 1 x DP 4;",
        ),
        (
            {"global_batch_size": 60, "micro_batch_size": 3, "accumulation": 7},
            4,
            "a global batch of 60 is not micro batch 3 x accumulation 7 x DP 4;",
        ),
        ({"tensor": 0, "world_size": -1}, 0, "tensor 0 is below 1; give a number from 1, or leave it out"),
    ],
)
def test_sizes_that_contradict_each_other_are_named(facts: dict[str, int], world_size: int, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        solve(facts, world_size, 1)
    assert caught.value.problems[0].startswith(problem)


def test_a_layout_as_flags_and_in_words() -> None:
    """Sizes of one are the default; a batch is said, also of one."""
    layout = Layout(2, 3, 5, 7, 14, 1, 4, 56)
    assert layout.flags() == {
        "--tensor-model-parallel-size": "2",
        "--context-parallel-size": "3",
        "--pipeline-model-parallel-size": "5",
        "--num-distributed-optimizer-instances": "7",
        "--micro-batch-size": "1",
        "--global-batch-size": "56",
    }
    assert layout.lines() == [
        "world size       420 = TP 2 x PP 5 x CP 3 x DP 14",
        "effective batch  1 x 4 x DP 14 = 56 samples (TP, CP and PP do not count)",
    ]
    unknown = Layout(1, 1, 1, 1, None, None, None, None)
    assert unknown.flags() == {}
    assert unknown.lines() == [
        "world size       ? = TP 1 x PP 1 x CP 1 x DP ?",
        "effective batch  ? x ? x DP ? = ? samples (TP, CP and PP do not count)",
        "the file does not say how many ranks there are: give --world-size",
    ]
