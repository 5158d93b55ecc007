"""One process plays ranks of a world of 64, and all ranks of a world of 4 for the plan of their checkpoint."""

import gc
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from megatron.core.dist_checkpointing.core import CheckpointingException

from benchmarks.rehearsed_rank import rehearse
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.forkserver.ranks import run_ranks

# Of the second tier: an experiment of benchmarks.
pytestmark = pytest.mark.full

MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 16 --micro-batch-size 1
    --train-iters 3 --lr 1e-3 --eval-interval 2 --eval-iters 1 --num-workers 0 --device cpu --bf16
    --use-distributed-optimizer --tensor-model-parallel-size 2
"""
DOCUMENTS = 20_000
RANKS = (0, 1, 33, 63)  # first stage, its other tensor-parallel rank, a stage in the middle, the last one


def _phases(data: str) -> list[dict[str, dict[str, Any]]]:
    flags = [*MODEL.split(), "--pipeline-model-parallel-size", "4", "--global-batch-size", "16", *data.split()]
    told: list[bytes] = []
    found = []
    for rank in RANKS:
        gc.freeze()  # each phase begins with a collection, and a rehearsal ends with an unfreeze
        rehearsed = rehearse(flags, 64, rank, told)
        told = told or rehearsed.told
        found.append({phase.name: asdict(phase) for phase in rehearsed.phases})
    return found


def _plan(data: str) -> tuple[list[int], str, list[str]]:
    """Return how many objects each of the ranks 1 to 3 sent for the plan of all, what rank 0 says where one of them is
    missing, and the phases of rank 0."""
    flags = [*MODEL.split(), "--global-batch-size", "4", *data.split()]
    told = rehearse(flags, 4, 0, measures=False).told
    sent = [rehearse(flags, 4, rank, told, measures=False).sent for rank in range(1, 4)]
    try:
        rehearse(flags, 4, 0, gathered=[sent[0], sent[2], sent[2]], measures=False)
        problem = ""
    except CheckpointingException as error:
        problem = str(error)
    phases = rehearse(flags, 4, 0, gathered=sent).phases
    return [len(of_rank) for of_rank in sent], problem, [phase.name for phase in phases]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    with IndexedWriter(folder / "text", np.uint16) as writer:
        writer.add_tokens((np.arange(DOCUMENTS * 20) % 61).astype(np.uint16).tobytes(), [20] * DOCUMENTS)
    return f"--data-path {folder}/text --split 90,10,0 --data-cache-path {folder}/cache"


@pytest.fixture(scope="module")
def phases(data: str) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(1, _phases, data)[0]


def test_each_rank_makes_its_own_groups_alone(phases: list[dict[str, dict[str, Any]]]) -> None:
    made = [of_rank["process groups"] for of_rank in phases]
    assert [counts["groups"] for counts in made] == [20, 20, 18, 19], "embeddings: both ends; positions: the first"
    assert [counts["new_group_calls"] for counts in made] == [20, 20, 18, 19]


def test_one_rank_of_a_node_reads_the_index_whole(phases: list[dict[str, dict[str, Any]]]) -> None:
    first, *others = (of_rank["data: checks, order, first batch"] for of_rank in phases)
    size = 20 * DOCUMENTS  # of the index, in bytes
    assert first["bytes_read"] > 2 * size, "checked and digested"
    assert all(other["bytes_read"] < size for other in others)
    assert all(0 < other["files"] < first["files"] for other in others)


def test_the_checkpoint_of_all_ranks_is_planned(data: str) -> None:
    ((sent, problem, phases),) = run_ranks(1, _plan, data)
    assert sent == [2] * 3, "metadata to be checked, and the plan"
    assert "Invalid access pattern" in problem
    assert "checkpoint: plan" in phases
