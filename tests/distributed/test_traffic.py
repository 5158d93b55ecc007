"""What is counted at the collectives is what they send, and the layouts keep and send what the formulas say."""

from typing import Any

import pytest
import torch

from benchmarks import sharding
from benchmarks.sharding import MODEL, TOLERANCE, Count, measure, write_into
from megatron_ext.config.parse.arguments import parse
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks

# Of the second tier: what the planner counts, tests/unit/cost computes.
pytestmark = pytest.mark.full

KILO = 1000  # elements
RANKS = 4


def send_one_of_each() -> dict[str, tuple[int, float]]:
    """Calls and bytes by collective, of messages of KILO fp32 elements."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    from benchmarks.traffic import Traffic

    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    part, whole = torch.ones(KILO), torch.ones(RANKS * KILO)
    with Traffic() as traffic:
        dist.all_reduce(part)
        functional.all_reduce(part, "sum", group).sum()
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather([torch.empty(KILO) for _ in range(RANKS)], part)
        functional.all_gather_tensor(part, 0, group).sum()
        dist.reduce_scatter_tensor(part, whole)
        functional.reduce_scatter_tensor(whole, "sum", 0, group).sum()
        dist.all_to_all_single(torch.empty_like(whole), whole)
        # Every rank keeps one row of ten and sends three to each other.
        splits = [1 if other == rank else 3 for other in range(RANKS)]
        dist.all_to_all_single(torch.empty(10, 100), torch.ones(10, 100), splits, splits)
        dist.broadcast(part, 0)
        if rank == 0:
            dist.send(part, 1)
        elif rank == 1:
            dist.recv(part, 0)
        dist.barrier()
        alone = dist.new_group([rank], use_local_synchronization=True)
        dist.all_reduce(part, group=alone)  # pyright: ignore[reportArgumentType]
    dist.all_reduce(part)  # outside
    return {kind: (sent.calls, sent.bytes) for (kind, _), sent in traffic.sent.items()}


def test_every_collective_is_counted_by_what_it_sends() -> None:
    first, *others = run_ranks(RANKS, send_one_of_each)
    message = 4.0 * KILO
    expected = {
        "all-reduce": (2, 2 * 2 * 0.75 * message),
        "all-gather": (3, 3 * 3 * message),
        "reduce-scatter": (2, 2 * 3 * message),
        "all-to-all": (2, 3 * message + 9 * 400.0),
        "broadcast": (1, 0.75 * message),
    }
    assert others == [expected] * 3
    assert first == {**expected, "send": (1, message)}


LEAST = {"ZeRO-1": 16, "TP + SP, PP, ZeRO-1": 8}
"""By scheme: the global batch with which each rank has two microbatches."""


@pytest.mark.parametrize("scheme", LEAST)
def test_counts_are_the_formulas(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "MODEL", f"{MODEL} --num-layers 2 --global-batch-size {LEAST[scheme]}")
    count = measure(scheme)
    assert count.sent_formula > 0
    assert count.kept_off <= TOLERANCE
    assert count.sent_off <= TOLERANCE


# A group of keys that both ranks have; weights that are whole on both next to norms, and positions that are added to
# words; keys that are gathered to be measured.
SHAPES = {
    "--group-query-attention --num-query-groups 1": "TP + SP",
    "--disable-bias-linear=false --add-qkv-bias --position-embedding-type learned_absolute": "TP + SP",
    "--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 --v-head-dim 16": "TP + SP",
    "--qk-clip": "CP, all_gather",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_of_other_shapes_are_the_formulas(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "MODEL", f"{MODEL} --num-layers 2 --global-batch-size 4 {shape}")
    count = measure(SHAPES[shape])
    assert max(count.kept_off, count.sent_off) < 1e-3, count.terms


def lose_one_gather() -> None:
    """One all-gather of a sequence is not made: the rank repeats its own part."""
    from megatron.core.tensor_parallel import layers

    gather = layers.dist_all_gather_func
    calls = 0

    def sometimes(output: torch.Tensor, part: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal calls
        if options.get("async_op"):
            return gather(output, part, *args, **options)
        calls += 1
        if calls != 100:  # a step has 72
            return gather(output, part, *args, **options)
        output.copy_(part.repeat(output.size(0) // part.size(0), *[1] * (part.dim() - 1)))
        return None

    layers.dist_all_gather_func = sometimes


@pytest.mark.slow  # shows that the counts above can fail
def test_a_lost_gather_changes_the_count() -> None:
    whole, less = measure("TP + SP"), measure("TP + SP", lose_one_gather)
    values = parse(MODEL.split()).values
    activation = 2 * values["seq_length"] * values["micro_batch_size"] * values["hidden_size"]
    assert whole.sent["all-gather tp"] - less.sent["all-gather tp"] == activation / 2
    assert {kind: sent for kind, sent in whole.sent.items() if "gather" not in kind} == {
        kind: sent for kind, sent in less.sent.items() if "gather" not in kind
    }
    assert abs(whole.sent["all-gather tp"] - _formula(whole)) < 1 < abs(less.sent["all-gather tp"] - _formula(less))


def _formula(count: Count) -> float:
    return sum(sent for kind, sent, _ in count.terms if kind == "all-gather")


def test_the_table_goes_between_its_marks(tmp_path: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ConfigurationError, match="lacks the lines"):
        write_into(page, "table")
    page.write_text("a\n<!-- benchmarks/sharding.py: begin -->\nold\n<!-- benchmarks/sharding.py: end -->\nb\n")
    write_into(page, "new")
    assert page.read_text() == (
        "a\n<!-- benchmarks/sharding.py: begin -->\nnew\n<!-- benchmarks/sharding.py: end -->\nb\n"
    )


def test_what_muon_exchanges_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: matrices in rows go to the rank that computes them and back, and are gathered there over TP."""
    monkeypatch.setattr(sharding, "MODEL", f"{MODEL} --num-layers 2 --global-batch-size 8 --optimizer muon")
    monkeypatch.setitem(sharding.SCHEMES, "TP, FSDP2, Muon", (4, "--tensor-model-parallel-size 2 --use-torch-fsdp2"))
    count = measure("TP, FSDP2, Muon")
    of_matrices = {kind: size for kind, size, formula in count.terms if "M" in formula}
    assert of_matrices == {"all-to-all": count.sent["all-to-all dp"], "all-gather": count.sent["all-gather tp"]}
    assert count.kept_off <= TOLERANCE
    assert count.sent_off <= TOLERANCE
