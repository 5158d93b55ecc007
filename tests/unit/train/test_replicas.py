"""What is said of the whole model from each rank's part: norms of all weights, and which copies differ."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import NumericError
from megatron_ext.parts.catalogue import WORD_EMBEDDINGS
from megatron_ext.resilience.weight_hash import weight_hash
from megatron_ext.train import norms, replicas
from megatron_ext.train.norms import parameters_norm
from megatron_ext.train.replicas import _differences, _raise_together
from tests.support.small_models import small_config

CPU = torch.device("cpu")
NORM, MATRIX = "decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.weight"
EXPERT = "decoder.layers.0.mlp.experts.0:2.linear_fc1.weight"


def _norm(monkeypatch: pytest.MonkeyPatch, *, rank: int, dtype: torch.dtype) -> tuple[float, list[tuple[str, float]]]:
    """The norm, where other ranks add nothing, and what is summed over whom."""
    weights: list[tuple[str, Any]] = [
        (WORD_EMBEDDINGS, torch.nn.Parameter(torch.tensor([1.0, 2.0]))),
        (NORM, torch.nn.Parameter(torch.tensor([4.0]))),
        (MATRIX, torch.nn.Parameter(torch.tensor([[257.0 / 256.0, 0.0]]))),
        (EXPERT, torch.nn.Parameter(torch.tensor([[[3.0]], [[5.0]]]))),
        (WORD_EMBEDDINGS, torch.nn.Parameter(torch.tensor([100.0]))),
    ]
    weights[-1][1].shared = True  # the last stage's copy
    summed: list[tuple[str, float]] = []
    monkeypatch.setattr(norms, "global_named_parameters", lambda chunks: iter(weights))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: summed.append((group, float(total))))
    run: Any = SimpleNamespace(
        config=small_config(),
        device=SimpleNamespace(torch_device=CPU),
        chunks=[],
        optimizer=None,
        gathered_parameters=nullcontext,
        groups=SimpleNamespace(tp=SimpleNamespace(rank=lambda: rank)),
        transformer_config=SimpleNamespace(params_dtype=dtype),
        sharding=SimpleNamespace(holders_of_one_copy=lambda optimizer, groups: ("dense", "experts")),
    )
    return parameters_norm(run), summed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_counts_once_in_the_norm(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensor-parallel ranks the first alone counts what they hold whole. Weights are those that the forward pass
    computes with, 257/256 in bf16 is 1, and their squares are not rounded."""
    entry = 257.0 / 256.0 if dtype == torch.float32 else 1.0
    divided = 5.0 + entry**2
    found, summed = _norm(monkeypatch, rank=0, dtype=dtype)
    assert summed == [("dense", divided + 16.0), ("experts", 34.0)]
    assert found == pytest.approx((divided + 50.0) ** 0.5, rel=1e-15)
    assert _norm(monkeypatch, rank=1, dtype=dtype)[1] == [("dense", divided), ("experts", 34.0)]


def test_squares_of_16_bit_weights_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1 + 2^-7)^2 has 15 bits."""
    weight = torch.nn.Parameter(torch.full((3,), 1.0 + 2.0**-7))
    monkeypatch.setattr(norms, "global_named_parameters", lambda chunks: iter([(MATRIX, weight)]))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: None)
    run: Any = SimpleNamespace(
        config=small_config(),
        device=SimpleNamespace(torch_device=CPU),
        chunks=[],
        optimizer=None,
        gathered_parameters=nullcontext,
        groups=SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0)),
        transformer_config=SimpleNamespace(params_dtype=torch.bfloat16),
        sharding=SimpleNamespace(holders_of_one_copy=lambda optimizer, groups: ("dense", "experts")),
    )
    assert parameters_norm(run) == pytest.approx(3.0**0.5 * (1.0 + 2.0**-7), rel=1e-15)


def _group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size)


def test_parameters_that_differ_are_named_with_who_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 3, 5 and 7: the first weight is everybody's, the second is another one on rank 5."""
    named: Any = [(name, torch.nn.Parameter(torch.full((2,), value))) for name, value in (("a", 1.0), ("b", 2.0))]
    same, other = (
        torch.stack([weight_hash(torch.full((2,), v)) for v in values]) for values in ((1.0, 2.0), (1.0, 3.0))
    )

    def gather(gathered: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        assert torch.equal(own, same)
        gathered.copy_(torch.cat((same, other, same)))

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [3, 5, 7])
    assert _differences(named, _group(3), "copies") == ["rank 5 differs from ranks 3, 7 in b (copies)"]
    other = same
    assert _differences(named, _group(3), "copies") == []
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", None)
    assert _differences(named, _group(1), "copies") == []
    assert _differences([], _group(3), "copies") == []


def _raised(monkeypatch: pytest.MonkeyPatch, of_ranks: list[list[str]], most: int) -> None:
    def maximum(count: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        count.fill_(most)

    def gather(found: list[list[str]], own: list[str]) -> None:
        assert own == of_ranks[0]
        found[:] = of_ranks

    monkeypatch.setattr(torch.distributed, "all_reduce", maximum)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    run: Any = SimpleNamespace(
        device=SimpleNamespace(torch_device=CPU), world_size=len(of_ranks), state=SimpleNamespace(iteration=6)
    )
    _raise_together(run, of_ranks[0], 4)


def test_what_one_rank_finds_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text once, at most three of them, and since when."""
    _raised(monkeypatch, [[], []], 0)
    with pytest.raises(NumericError) as raised:
        _raised(monkeypatch, [[], ["a", "b"], ["b"]], 2)
    text = str(raised.value)
    assert text.startswith("weights that must be equal are not: a; b; found at iteration 7, before its update. At ")
    assert "At iteration 4 they were equal. Next: resume from a checkpoint of iteration 4 or earlier" in text
    with pytest.raises(NumericError, match=r"not: a; b; c, and 2 more; found"):
        _raised(monkeypatch, [["a", "b"], ["c", "d", "e"]], 3)


def test_checks_raise_what_they_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dense weights and of experts, within the groups that hold them; the last good iteration is told."""
    parameters = [("dense", torch.nn.Parameter(torch.ones(1))), ("expert", torch.nn.Parameter(torch.ones(1)))]
    marked: Any = parameters[1][1]
    marked.allreduce = False
    monkeypatch.setattr(replicas, "global_named_parameters", lambda chunks: iter(parameters))
    monkeypatch.setattr(
        replicas, "_differences", lambda named, group, what: [f"{name} of {group} ({what})" for name, _ in named]
    )
    told: list[tuple[list[str], int]] = []
    monkeypatch.setattr(replicas, "_raise_together", lambda run, found, good: told.append((found, good)))
    groups = SimpleNamespace(dp_cp="dp_cp", expt_dp="expt_dp", tp="tp", expt_tp="expt_tp", embd=None)
    run: Any = SimpleNamespace(chunks=[], groups=groups, config=small_config())
    replicas.check_data_parallel_replicas(run, 3)
    replicas.check_model_parallel_copies(run, 5)
    what, copies = "(data-parallel replicas)", "(tensor-parallel copies)"
    assert told == [
        ([f"dense of dp_cp {what}", f"expert of expt_dp {what}"], 3),
        ([f"dense of tp {copies}", f"expert of expt_tp {copies}"], 5),
    ]
