"""Which layouts may be chosen, what a question leaves open, and where searches among them end."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts
from megatron_ext.cost.hardware import Machine, hardware
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner import layout_choices, sensitivity
from megatron_ext.plugins.planner.layout_evaluation import as_candidate, evaluate_config
from megatron_ext.plugins.planner.search import fewest_ranks, with_offloads
from megatron_ext.plugins.planner.search_input import placeholders, question
from megatron_ext.plugins.planner.sensitivity import _winner
from tests.support.planner_numbers import CASES, config_of, machine_of

_SHAPE = {"num_attention_heads": 16, "num_layers": 12, "seq_length": 4096}


def chosen(name: str, world_size: int, gpus_per_node: int = 8, **values: Any) -> list[Any]:
    """The values of a flag that layouts have, each once, in their order."""
    found = layout_choices.layouts({**_SHAPE, **values}, world_size, gpus_per_node)
    return list(dict.fromkeys(layout.get(name) for layout in found))


def test_tensor_parallelism_stays_in_a_node_and_divides_it_and_the_heads() -> None:
    tensor = "tensor_model_parallel_size"
    assert chosen(tensor, 64) == [1, 2, 4, 8]
    assert chosen(tensor, 64, 4) == [1, 2, 4]
    assert chosen(tensor, 48, 6, num_attention_heads=12) == [1, 2, 3, 6]
    assert chosen(tensor, 48, 6) == [1, 2]
    assert chosen(tensor, 16, tensor_model_parallel_size=4) == [4]


def test_context_parallelism_leaves_1024_positions() -> None:
    assert chosen("context_parallel_size", 64) == [1, 2, 4]
    assert chosen("context_parallel_size", 64, seq_length=4095) == [1, 2]
    assert chosen("context_parallel_size", 64, seq_length=512) == [1]
    assert chosen("context_parallel_size", 64, context_parallel_size=8) == [8]


def test_stages_have_at_least_a_layer() -> None:
    assert chosen("pipeline_model_parallel_size", 16, num_layers=4, tensor_model_parallel_size=1) == [1, 2, 4]
    assert chosen("pipeline_model_parallel_size", 16, num_layers=1) == [1]
    assert chosen("sequence_parallel", 4, tensor_model_parallel_size=1) == [False]
    assert chosen("sequence_parallel", 4, tensor_model_parallel_size=2) == [True]
    assert chosen("sequence_parallel", 4, tensor_model_parallel_size=2, sequence_parallel=False) == [None]


@pytest.mark.parametrize(
    ("layers", "stages", "ways"),
    [
        (12, 1, ["12 layers"]),
        (12, 4, ["12 layers"]),
        (14, 4, ["both, 16"]),
        (10, 3, ["both, 12"]),
        (11, 3, ["loss, 12"]),
        (15, 4, ["loss, 16"]),
        (13, 4, ["last 1"]),
        (17, 4, ["last 2"]),
        (4, 4, ["4 layers"]),  # counted ones would leave a stage the embedding alone
        (2, 4, []),
        (6, 4, ["both, 8"]),
        (9, 5, ["loss, 10"]),
    ],
)
def test_layers_are_divided_evenly_with_or_without_the_ends(layers: int, stages: int, ways: list[str]) -> None:
    names = {0: f"{layers} layers", 1: "loss", 2: "both"}
    found = []
    for split, units in layout_choices._splits({}, layers, stages):
        if "decoder_last_pipeline_num_layers" in split:
            assert units == layers
            found.append(f"last {split['decoder_last_pipeline_num_layers']}")
        else:
            found.append(names[len(split)] + (f", {units}" if split else ""))
    assert found == ways
    assert layout_choices._splits({"account_for_loss_in_pipeline_split": True}, layers, stages) == [({}, layers)]


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"),
    [
        (8, 1, [None]),
        (8, 2, [None, 2, 4]),
        (16, 2, [None, 2, 8]),
        (32, 2, [None, 2, 8]),
        (4, 2, [None, 2]),
        (5, 5, [None]),
    ],
)
def test_the_fewest_and_the_most_chunks_are_tried(layers: int, stages: int, chunks: list[int | None]) -> None:
    name = "num_virtual_stages_per_pipeline_rank"
    assert [choice[name] for choice in layout_choices._chunks({}, layers, stages)] == chunks
    for given in (name, "num_layers_per_virtual_pipeline_stage", "decoder_last_pipeline_num_layers"):
        assert layout_choices._chunks({given: 2}, layers, stages) == [{}]


def test_experts_are_whole_and_gathered_where_that_sends_less() -> None:
    """Of 2 experts a token: below 4 ranks."""
    values = {"num_experts": 8}
    kinds = {
        each["expert_model_parallel_size"]: each["moe_token_dispatcher_type"]
        for each in layout_choices._experts(values, 8)
    }
    assert kinds == {1: "alltoall", 2: "alltoall", 4: "alltoall", 8: "alltoall"}
    found = layout_choices._experts({**values, "moe_router_topk": 2}, 12)
    assert [(each["expert_model_parallel_size"], each["moe_token_dispatcher_type"]) for each in found] == [
        (1, "alltoall"),
        (2, "allgather"),
        (4, "alltoall"),
    ]
    assert {each["expert_tensor_parallel_size"] for each in found} == {1}
    assert layout_choices._experts({}, 8) == [{}]
    given = layout_choices._experts({**values, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}, 8)
    assert given == [{"expert_model_parallel_size": 4, "moe_token_dispatcher_type": "alltoall"}]


def test_copies_of_fsdp_are_one_in_each_node() -> None:
    layout = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    assert layout_choices.hybrid({}, layout, 64, 8) == {
        "use_torch_fsdp2": True,
        "num_distributed_optimizer_instances": 4,
    }
    assert layout_choices.hybrid({}, {**layout, "tensor_model_parallel_size": 8}, 128, 8) is None, (
        "TP has the whole node"
    )
    assert layout_choices.hybrid({}, layout, 16, 8) is None, "a node has all of them"
    assert layout_choices.hybrid({"num_distributed_optimizer_instances": 2}, layout, 64, 8) is None
    assert layout_choices.hybrid({}, {**layout, "pipeline_model_parallel_size": 3}, 60, 8) is None, (
        "5 ranks are no whole pairs"
    )


def test_what_was_given_stays_as_it_is() -> None:
    assert list(layout_choices.shardings({})) == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"]
    assert list(layout_choices.shardings({"use_distributed_optimizer": True})) == ["ZeRO-1"]
    assert layout_choices.shardings({"use_distributed_optimizer": True, "overlap_grad_reduce": False}) == {
        "ZeRO-1": {"overlap_param_gather": True}
    }
    assert list(layout_choices.shardings({"use_distributed_optimizer": False})) == ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"]
    assert layout_choices.shardings({"use_torch_fsdp2": True, "use_megatron_fsdp": True}) == {"as given": {}}
    assert layout_choices.recomputations({}) == layout_choices.RECOMPUTATIONS
    assert layout_choices.recomputations({"recompute_granularity": None}) == {"none": {}}
    for given in ({"recompute_granularity": "full"}, {"recompute_activations": True}):
        assert layout_choices.recomputations(given) == {"as given": {}}
    assert layout_choices.micro_batches({}, 12) == [1, 2, 4]
    assert layout_choices.micro_batches({}, 64) == [1, 2, 4, 8, 16, 32]
    assert layout_choices.micro_batches({"micro_batch_size": 3}, 64) == [3]


def test_flags_are_those_that_are_no_defaults() -> None:
    assert layout_choices.flags(
        {
            "tensor_model_parallel_size": 1,
            "sequence_parallel": True,
            "use_distributed_optimizer": False,
            "recompute_modules": ("mlp", "layernorm"),
            "micro_batch_size": 4,
            "recompute_granularity": None,
        }
    ) == ["--sequence-parallel", "--recompute-modules", "mlp", "layernorm", "--micro-batch-size", "4"]


def test_what_was_typed_wins_over_the_model_that_was_found() -> None:
    facts = Facts(world_size=4, cuda_available=False, huggingface={"num_layers": 3, "hidden_size": 8})
    asked = question({"num_layers": 5, "global_batch_size": 8}, facts, 16, Machine(hardware("h100")), 0.5)
    assert (asked.values["num_layers"], asked.values["hidden_size"], asked.world_size) == (5, 8, 16)
    assert (asked.facts.world_size, asked.facts.cuda_available) == (None, True)
    assert asked.usable_bytes == 85e9 * 0.5
    assert not question({"global_batch_size": 8}, facts, 16, Machine(hardware("cpu")), 0.5).facts.cuda_available
    with pytest.raises(ConfigurationError, match="a plan needs the samples of a step"):
        question({}, facts, 16, Machine(hardware("h100")), 0.5)


def test_placeholders_are_what_is_missing() -> None:
    assert placeholders({}) == {"lr": 1e-4, "train_iters": 1000, "mock_data": True}
    assert placeholders({"lr": 0.0, "train_samples": 5, "data_path": ("a",)}) == {}
    assert placeholders({"train_iters": 5, "mock_data": True}) == {"lr": 1e-4}
    assert placeholders({"lr": 1.0, "train_iters": 5, "valid_data_path": ("a",)}) == {}


def test_a_thousandth_is_no_win() -> None:
    assert _winner([1.0, 0.9995, 2.0]) == 0
    assert _winner([1.0, 0.9985, 0.9]) == 2


def test_16_times_as_many_devices_are_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.plugins.planner import search as module

    tried: list[int] = []

    def candidates(asked: Any) -> list[Any]:
        tried.append(asked.world_size)
        return [SimpleNamespace(memory=SimpleNamespace(total=10.0 if asked.world_size >= 32 else 10.5))]

    monkeypatch.setattr(module, "_candidates", candidates)
    asked = question({"global_batch_size": 8}, Facts(), 2, Machine(hardware("h100")), 0.5)
    asked = replace(asked, usable_bytes=10.0)
    assert (fewest_ranks(asked, 32), tried) == (32, [4, 8, 16, 32])
    assert fewest_ranks(asked, 31) is None
    assert fewest_ranks(replace(asked, usable_bytes=9.0), 64) is None
    assert max(tried) == 64


def test_near_batches_are_no_further_than_a_quarter_and_others() -> None:
    assert sensitivity._near_batches(64, [3, 6, 12, 24, 48]) == [48, 72, 60]
    assert sensitivity._near_batches(8, [16]) == []
    assert 64 not in sensitivity._near_batches(64, [1, 2, 4, 64])


def test_what_is_in_host_memory_is_not_moved_there_again() -> None:
    """A layout that has the optimizer in host memory, or all of it, has no further such flag to try."""
    asked: Any = None
    for case in ("host memory", "FSDP2 in host memory"):
        found = as_candidate(evaluate_config(config_of(CASES[case]), machine_of(CASES[case]), 1.0))
        assert with_offloads(asked, found) == {}
