"""The comparison of two runs, and the joining of shards, on values made by hand."""

import dataclasses
import math

import numpy as np
import pytest

from megatron_ext.plugins.prove import cases, parity
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.gather import Shard, assemble
from megatron_ext.plugins.prove.parity import bf16_distance, compare, farthest
from megatron_ext.plugins.prove.recorded_training import RunRecord
from tests.support.small_models import LLAMA, small_config

RUN = RunRecord(
    losses=[5.0, 4.0],
    grad_norms=[1.0, 2.0],
    validation_loss=4.5,
    weights={"a": np.ones(4, np.float32), "b": np.ones(2, np.float32)},
    gradients={"a": np.full(4, 0.5, np.float32), "b": np.zeros(2, np.float32)},
    flaws=(),
)


def test_a_run_agrees_with_itself() -> None:
    found = compare(RUN, RUN)
    assert found.none
    assert found.problems() == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"losses": [5.0 + 2e-6, 4.0]}, "first loss is 2.0e-06 off (tolerance 1e-06)"),
        ({"losses": [5.0, 4.0 - 3e-5]}, "loss is 3.0e-05 off (tolerance 1e-05)"),
        ({"losses": [5.0, math.nan]}, "loss is nan off (tolerance 1e-05)"),
        ({"grad_norms": [1.0, 2.0 + 2e-5]}, "gradient norm is 2.0e-05 off (tolerance 1e-05)"),
        ({"grad_norms": [1.0, None]}, "gradient norm is nan off (tolerance 1e-05)"),
        ({"validation_loss": None}, "validation loss is nan off (tolerance 1e-05)"),
        ({"flaws": ("first gradients: a: ranks disagree",)}, "first gradients: a: ranks disagree"),
    ],
)
def test_each_difference_is_named(change: dict, problem: str) -> None:
    found = compare(RUN, dataclasses.replace(RUN, **change))
    assert found.problems() == [problem]
    assert not found.none


def test_a_gradient_is_measured_by_its_own_norm() -> None:
    off = RUN.gradients["a"] * np.float32(1 + 2e-5)
    found = compare(RUN, dataclasses.replace(RUN, gradients={**RUN.gradients, "a": off}))
    assert found.worst_gradient == "a"
    assert found.gradients["a"] == pytest.approx(2e-5, rel=0.01)
    assert [problem.split(" is ")[0] for problem in found.problems()] == ["first gradient of a"]


def test_a_gradient_that_is_none_is_beyond_the_tolerance() -> None:
    found = compare(RUN, dataclasses.replace(RUN, gradients={**RUN.gradients, "a": np.full(4, math.nan, np.float32)}))
    assert [problem.split(" is ")[0] for problem in found.problems()] == ["first gradient of a"]


@pytest.mark.parametrize("wrong", [1e-30, math.nan])
def test_a_gradient_of_zero_must_be_met_exactly(wrong: float) -> None:
    found = compare(RUN, dataclasses.replace(RUN, gradients={**RUN.gradients, "b": np.full(2, wrong, np.float32)}))
    assert found.worst_gradient == "b"
    assert len(found.problems()) == 1


def test_weights_are_compared_bit_by_bit() -> None:
    weights = {**RUN.weights, "b": np.nextafter(RUN.weights["b"], np.float32(2))}
    other = dataclasses.replace(RUN, weights=weights)
    assert compare(RUN, other).weights == ("b",)
    assert other.weight_hash != RUN.weight_hash


def test_bf16_is_measured_from_both_curves_of_one_process() -> None:
    bf16 = dataclasses.replace(RUN, losses=[5.0, 4.25])
    other = dataclasses.replace(RUN, losses=[5.0, 3.5])
    assert bf16_distance(RUN, bf16, other) == (0.75, 0.25)
    assert farthest([1.0], [1.0]) == 0.0


def _shards(tp_size: int) -> list[Shard]:
    """Every parameter of a small model as `tp_size` shards of zeros."""
    from megatron_ext.parts.catalogue import parameters

    return [
        Shard(parameter.name, rank, np.zeros(parameter.local_shape(tp_size), np.float32))
        for rank in range(tp_size)
        for parameter in parameters(small_config(LLAMA))
    ]


def _spoil(shards: list[Shard], name: str, rank: int, row: int) -> None:
    next(shard for shard in shards if (shard.name, shard.tp_rank) == (name, rank)).values[row] = 1.0


def test_shards_that_agree_have_no_flaw() -> None:
    tensors, flaws = assemble(small_config(LLAMA), _shards(2))
    assert flaws == []
    assert tensors["output_layer.weight"].shape == (250, 64)


def test_padding_that_is_not_zero_is_a_flaw() -> None:
    shards = _shards(2)
    _spoil(shards, "output_layer.weight", rank=1, row=-1)
    assert assemble(small_config(LLAMA), shards)[1] == ["output_layer.weight: vocabulary padding is not zero"]


def test_padding_begins_behind_the_last_entry_of_the_vocabulary() -> None:
    """250 entries: rank 1 of 2 has the rows from 128 on."""
    for row, flaws in ((121, []), (122, ["output_layer.weight: vocabulary padding is not zero"])):
        shards = _shards(2)
        _spoil(shards, "output_layer.weight", rank=1, row=row)
        assert assemble(small_config(LLAMA), shards)[1] == flaws


def test_ranks_that_disagree_are_a_flaw() -> None:
    shards = _shards(2)
    _spoil(shards, "decoder.final_layernorm.weight", rank=1, row=0)
    copies = _shards(2)
    _spoil(copies, "output_layer.weight", rank=0, row=0)
    assert set(assemble(small_config(LLAMA), [*shards, *copies])[1]) == {
        "decoder.final_layernorm.weight: ranks disagree",
        "output_layer.weight: ranks disagree",
        "decoder.final_layernorm.weight: tensor-parallel ranks disagree",
    }


def test_pieces_of_a_strided_tensor_return_to_their_places() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    shards = _shards(2)
    # Gate and up projection have 96 rows each; a shard has 48 of the gate above 48 of the other.
    _spoil(shards, name, rank=1, row=0)
    _spoil(shards, name, rank=0, row=48)
    for arrived in (shards, shards[::-1]):
        whole = assemble(small_config(LLAMA), arrived)[0][name]
        assert np.flatnonzero(whole.any(axis=1)).tolist() == [48, 96], "in whatever order the ranks' shards come"


@pytest.mark.parametrize(("field", "tolerance"), [("losses", 1e-6), ("losses", 1e-5), ("gradients", 1e-5)])
def test_what_is_within_a_tolerance_is_no_problem(field: str, tolerance: float) -> None:
    if field == "gradients":
        near: dict = {"gradients": {**RUN.gradients, "a": RUN.gradients["a"] * np.float32(1 + 0.9 * tolerance)}}
    else:
        near = {"losses": [5.0 + 0.9 * tolerance, 4.0] if tolerance == 1e-6 else [5.0, 4.0 - 0.9 * tolerance]}
    found = compare(RUN, dataclasses.replace(RUN, **near))
    assert found.problems() == []
    assert not found.none


def test_the_validation_loss_is_a_part_of_a_bf16_curve() -> None:
    bf16 = dataclasses.replace(RUN, validation_loss=4.0)
    other = dataclasses.replace(RUN, validation_loss=6.0)
    assert bf16_distance(RUN, bf16, other) == (2.0, 0.5)


def test_curves_of_two_models_are_not_compared() -> None:
    for field in ("weights", "gradients"):
        other = dataclasses.replace(RUN, **{field: {"a": RUN.weights["a"]}})
        with pytest.raises(AssertionError):
            compare(RUN, other)
    with pytest.raises(AssertionError):
        farthest([1.0], [1.0, 1.0])


def test_the_worst_gradient_is_the_farthest_off_and_none_wins() -> None:
    far = {"a": RUN.gradients["a"] * np.float32(3), "b": RUN.gradients["b"] + np.float32(1)}
    assert compare(RUN, dataclasses.replace(RUN, gradients=far)).worst_gradient == "b", "0 is to be met exactly"
    known = dataclasses.replace(RUN, gradients={**RUN.gradients, "b": np.ones(2, np.float32)})
    found = compare(known, dataclasses.replace(known, gradients={**far, "b": np.full(2, math.nan, np.float32)}))
    assert found.worst_gradient == "b"
    assert found.gradients["a"] == pytest.approx(2.0)


def test_a_reference_is_trained_once_and_a_case_has_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple] = []

    def record(flags: list[str], world_size: int, steps: int, sabotage: object = None) -> RunRecord:
        trained.append((flags, world_size, steps, sabotage))
        return RUN

    monkeypatch.setattr(parity, "record", record)
    experiment = parity.Experiment(["--data", "here"], steps=7)
    for _ in range(2):
        experiment.reference("tied")
    experiment.reference("tied", bf16=True)
    case = cases.CASES["TP2 SP, tied"]
    experiment.train(case, bf16=True, sabotage=len)  # pyright: ignore[reportArgumentType]
    base = [*RECIPE.split(), *MODELS["tied"].split(), "--data", "here"]
    assert trained == [
        (base, 1, 7, None),
        ([*base, "--bf16"], 1, 7, None),
        ([*base, "--bf16", *case.flags], case.world_size, 7, len),
    ]


def test_ranks_that_hold_nan_alike_agree() -> None:
    shards = _shards(2)
    for rank in (0, 1):
        next(s for s in shards if (s.name, s.tp_rank) == ("decoder.final_layernorm.weight", rank)).values[:] = math.nan
    assert assemble(small_config(LLAMA), shards)[1] == []


def test_a_tensor_that_the_catalogue_does_not_have_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="not in the catalogue"):
        assemble(small_config(LLAMA), [*_shards(1), Shard("decoder.extra", 0, np.zeros(1, np.float32))])


def test_a_divided_axis_is_joined_in_the_order_of_ranks() -> None:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    shards = _shards(2)
    for shard in shards:
        if shard.name == name:
            shard.values[:] = shard.tp_rank + 1
    whole = assemble(small_config(LLAMA), shards)[0][name]
    assert whole.shape == (64, 96)
    assert (whole[:, :48] == 1).all()
    assert (whole[:, 48:] == 2).all()


def test_the_hash_of_the_weights_follows_names_and_bits_and_not_their_order() -> None:
    turned = dataclasses.replace(RUN, weights=dict(reversed(RUN.weights.items())))
    renamed = dataclasses.replace(RUN, weights={"c": RUN.weights["a"], "b": RUN.weights["b"]})
    assert turned.weight_hash == RUN.weight_hash != renamed.weight_hash
