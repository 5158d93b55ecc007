"""The planner at its bounds: what may be chosen, what a measured run corrects, what frees memory, how links count."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config.batch import num_microbatches
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan import calibrate, choices, economics, scaling, schedule, sensitivity
from megatron_ext.plan import verdict as verdicts
from megatron_ext.plan.calibrate import believed, corrected, read_metrics, saved_values
from megatron_ext.plan.constants import ASSUMED_RANGE, CALIBRATED_RANGE, CPU, RANGE, Constants
from megatron_ext.plan.costs import Prices, _hours, cost, count_of_tokens, lines
from megatron_ext.plan.estimate import Times, _in_turn, step_time
from megatron_ext.plan.evaluation import _alike, _communication, as_candidate, evaluate_config
from megatron_ext.plan.goodput import Failures, daly, useful_share, young
from megatron_ext.plan.hardware import TABLE, Machine, constants_of, hardware
from megatron_ext.plan.limits import _winner
from megatron_ext.plan.links import latency, span, transfer
from megatron_ext.plan.memory import MemoryEstimate
from megatron_ext.plan.presentation import _gb, name, simpler, why
from megatron_ext.plan.preview import _shown
from megatron_ext.plan.question import placeholders, question
from megatron_ext.plan.relief import described, helpful_flags, host_bytes, kept_at_least
from megatron_ext.plan.schedule import few_microbatches, most_held, order
from megatron_ext.plan.search import fewest_ranks, with_offloads
from megatron_ext.plan.shapes import Shapes
from megatron_ext.plan.simulate import by_formula, shortest, simulate
from megatron_ext.plan.timeline import Block, Lane, Pass, Timeline, duration, size, slow_stages
from megatron_ext.plan.traffic import Term, sent
from megatron_ext.plan.verdict import verdict
from tests.support import planner_numbers
from tests.support.planner_numbers import CASES, Case, config_of, machine_of
from tests.support.small_models import small_config

_SHAPE = {"num_attention_heads": 16, "num_layers": 12, "seq_length": 4096}


def chosen(name: str, world_size: int, gpus_per_node: int = 8, **values: Any) -> list[Any]:
    """The values of a flag that layouts have, each once, in their order."""
    found = choices.layouts({**_SHAPE, **values}, world_size, gpus_per_node)
    return list(dict.fromkeys(layout.get(name) for layout in found))


# What may be chosen.


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
    for split, units in choices._splits({}, layers, stages):
        if "decoder_last_pipeline_num_layers" in split:
            assert units == layers
            found.append(f"last {split['decoder_last_pipeline_num_layers']}")
        else:
            found.append(names[len(split)] + (f", {units}" if split else ""))
    assert found == ways
    assert choices._splits({"account_for_loss_in_pipeline_split": True}, layers, stages) == [({}, layers)]


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
    assert [choice[name] for choice in choices._chunks({}, layers, stages)] == chunks
    for given in (name, "num_layers_per_virtual_pipeline_stage", "decoder_last_pipeline_num_layers"):
        assert choices._chunks({given: 2}, layers, stages) == [{}]


def test_experts_are_whole_and_gathered_where_that_sends_less() -> None:
    """Of 2 experts a token: below 4 ranks."""
    values = {"num_experts": 8}
    kinds = {
        each["expert_model_parallel_size"]: each["moe_token_dispatcher_type"] for each in choices._experts(values, 8)
    }
    assert kinds == {1: "alltoall", 2: "alltoall", 4: "alltoall", 8: "alltoall"}
    found = choices._experts({**values, "moe_router_topk": 2}, 12)
    assert [(each["expert_model_parallel_size"], each["moe_token_dispatcher_type"]) for each in found] == [
        (1, "alltoall"),
        (2, "allgather"),
        (4, "alltoall"),
    ]
    assert {each["expert_tensor_parallel_size"] for each in found} == {1}
    assert choices._experts({}, 8) == [{}]
    given = choices._experts({**values, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}, 8)
    assert given == [{"expert_model_parallel_size": 4, "moe_token_dispatcher_type": "alltoall"}]


def test_copies_of_fsdp_are_one_in_each_node() -> None:
    layout = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    assert choices.hybrid({}, layout, 64, 8) == {"use_torch_fsdp2": True, "num_distributed_optimizer_instances": 4}
    assert choices.hybrid({}, {**layout, "tensor_model_parallel_size": 8}, 128, 8) is None, "TP has the whole node"
    assert choices.hybrid({}, layout, 16, 8) is None, "a node has all of them"
    assert choices.hybrid({}, {**layout, "pipeline_model_parallel_size": 3}, 60, 8) is None, (
        "5 ranks are no whole pairs"
    )


def test_what_was_given_stays_as_it_is() -> None:
    assert list(choices.shardings({})) == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"]
    assert list(choices.shardings({"use_distributed_optimizer": True})) == ["ZeRO-1"]
    assert choices.shardings({"use_distributed_optimizer": True, "overlap_grad_reduce": False}) == {
        "ZeRO-1": {"overlap_param_gather": True}
    }
    assert list(choices.shardings({"use_distributed_optimizer": False})) == ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"]
    assert choices.shardings({"use_torch_fsdp2": True, "use_megatron_fsdp": True}) == {"as given": {}}
    assert choices.recomputations({}) == choices.RECOMPUTATIONS
    assert choices.recomputations({"recompute_granularity": None}) == {"none": {}}
    for given in ({"recompute_granularity": "full"}, {"recompute_activations": True}):
        assert choices.recomputations(given) == {"as given": {}}
    assert choices.micro_batches({}, 12) == [1, 2, 4]
    assert choices.micro_batches({}, 64) == [1, 2, 4, 8, 16, 32]
    assert choices.micro_batches({"micro_batch_size": 3}, 64) == [3]


def test_flags_are_those_that_are_no_defaults() -> None:
    assert choices.flags(
        {
            "tensor_model_parallel_size": 1,
            "sequence_parallel": True,
            "use_distributed_optimizer": False,
            "recompute_modules": ("mlp", "layernorm"),
            "micro_batch_size": 4,
            "recompute_granularity": None,
        }
    ) == ["--sequence-parallel", "--recompute-modules", "mlp", "layernorm", "--micro-batch-size", "4"]


# A measured run.


def metrics(folder: Path, *rows: Any) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def row(elapsed_ms: Any, batch: int = 8, **more: Any) -> dict[str, Any]:
    return {"elapsed_ms": elapsed_ms, "global_batch_size": batch, "world_size": 4, **more}


def test_the_speed_is_the_median_of_what_comes_behind_the_warm_up(tmp_path: Path) -> None:
    slow = [row(9000)] * 2
    found = read_metrics(metrics(tmp_path, *slow, row(100), row(110), row(120), row(5000), *[row(130)] * 4))
    assert (found.seconds, found.global_batch_size, found.world_size) == (0.13, 8, 4)
    found = read_metrics(metrics(tmp_path, *[row(9000)] * 10, *[row(200)] * 7, *[row(300)] * 83))
    assert found.seconds == 0.3
    assert read_metrics(metrics(tmp_path, *[row(9000)] * 10, *[row(200)] * 45, *[row(300)] * 45)).seconds == 0.25
    assert read_metrics(metrics(tmp_path, row(50))).seconds == 0.05


def test_only_steps_of_the_last_batch_size_count(tmp_path: Path) -> None:
    rows = [row(10, 2)] * 5 + [row(40, 8), row(50, 8), row(45, 8)]
    assert read_metrics(metrics(tmp_path, *rows)).seconds == 0.045


def test_what_is_no_step_is_left_out(tmp_path: Path) -> None:
    others = ("", "{", "[1]", "3", row(0), row(-1), row("1"), row(None), {"validation_loss": 1.0})
    assert read_metrics(metrics(tmp_path, row(20), *others, row(30), row(40))).seconds == 0.03
    with pytest.raises(ConfigurationError, match="has no row with elapsed_ms"):
        read_metrics(metrics(tmp_path, *others))
    with pytest.raises(ConfigurationError, match="is no file"):
        read_metrics(tmp_path)


def test_a_file_may_have_so_many_bytes_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = metrics(tmp_path, row(20))
    monkeypatch.setattr(calibrate, "_MOST_BYTES", path.stat().st_size)
    assert read_metrics(path).seconds == 0.02
    monkeypatch.setattr(calibrate, "_MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(ConfigurationError, match="has more than"):
        read_metrics(path)


def test_values_are_those_of_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "read_saved", lambda path: {"from": path.parent.name})
    assert saved_values(tmp_path / "metrics.jsonl") is None
    for number, when in (("1", 30), ("2", 50), ("3", 40)):
        (tmp_path / f"iter_{number}").mkdir()
        (tmp_path / f"iter_{number}" / "config.yaml").touch()
        os.utime(tmp_path / f"iter_{number}" / "config.yaml", (when, when))
    assert saved_values(tmp_path / "metrics.jsonl") == {"from": "iter_2"}


def test_a_run_is_believed_as_far_as_programs_differ() -> None:
    assert believed(1.0) == 1.0
    # r t^2 / (t^2 + s^2), where r is within t^2 + s^2; else t^2 = r^2 - s^2.
    assert believed(math.exp(0.05), 0.03, 0.05) == pytest.approx(math.exp(0.05 * 0.0009 / (0.0009 + 0.0025)))
    assert believed(2.0, 0.03, 0.05) == pytest.approx(math.exp(math.log(2) * (1 - 0.0025 / math.log(2) ** 2)))
    assert believed(0.5, 0.03, 0.05) == pytest.approx(1 / believed(2.0, 0.03, 0.05))


def test_the_correction_is_that_of_the_measured_layout_and_batch() -> None:
    case = CASES["ZeRO-1, gathers alone late"]
    values = {**planner_numbers.parse(case.flags.split()).values, "lr": 1e-3, "train_iters": 9, "mock_data": True}
    machine, facts = machine_of(case), Facts(cuda_available=True)
    estimate = step_time(config_of(case), Shapes(config_of(case)), machine).total
    for measured, known in (
        (calibrate.Measured(2 * estimate, 64, 16), values),
        (calibrate.Measured(2 * estimate, None, 2), {**values, "world_size": 16}),
        (calibrate.Measured(2 * estimate, 64, 16), {**values, "global_batch_size": 16}),
    ):
        found = corrected(replace(machine, correction=7.0), known, facts, measured)
        assert found.measured_ratio is not None
        assert found.measured_ratio == pytest.approx(2.0, rel=1e-9)
        assert found.correction == believed(found.measured_ratio)
    assumed = Machine(hardware("b200"))
    other = corrected(assumed, values, facts, calibrate.Measured(1.0, 64, 16))
    assert other.correction == believed(other.measured_ratio or 0.0, calibrate.ASSUMED_PROGRAMS_DIFFER)
    with pytest.raises(ConfigurationError) as raised:
        corrected(machine, {**values, "tensor_model_parallel_size": 3}, facts, calibrate.Measured(1.0, 64, 16))
    assert all(
        problem.startswith("the run of --calibrate: --") or "world size" in problem for problem in raised.value.problems
    )


# Costs.


def test_tokens_are_rounded_up_to_whole_steps_and_failures_cost() -> None:
    failures = Failures(1e12, 1e-6, 0.0)
    found = cost(1001, 100, 7200.0, 4, failures, Prices(2.0, 500.0))
    assert (found.steps, found.tokens) == (11, 1001)
    assert found.goodput.share == pytest.approx(1.0)
    hours = 11 * 2.0 / found.goodput.share
    assert (found.days, found.device_hours) == (pytest.approx(hours / 24), pytest.approx(hours * 4))
    assert (found.dollars, found.kilowatt_hours) == (pytest.approx(hours * 8), pytest.approx(hours * 2))
    assert cost(1000, 100, 1.0, 4, failures, Prices()).steps == 10
    assert cost(1000, 100, 1.0, 4, failures, Prices()).dollars is None
    assert cost(1000, 100, 1.0, 4, failures, Prices(0.0, 0.0)).dollars == 0.0
    assert cost(1000, 100, 1.0, 4, failures, Prices(0.0, 0.0)).kilowatt_hours == 0.0


def test_the_cost_in_words() -> None:
    failures = Failures(50000.0, 30.0, 600.0)
    found = cost(10**12, 2**22, 5.0, 1024, failures, Prices(2.0, None))
    text = lines(found, failures, 5.0, (0.5, 2.0))
    assert text[0].startswith(
        f"1,000,000,000,000 tokens are 238,419 steps: {found.days:,.1f} days ({found.days / 2:,.1f} to "
        f"{found.days * 2:,.1f}), {found.device_hours:,.0f} device-hours, ${found.dollars:,.0f}"
    )
    assert text[1].startswith(f"    of that time {found.goodput.share:.1%} is useful: something breaks every 2.03 days")
    assert f"(--save-interval {round(found.goodput.interval / 5.0)})" in text[2]
    assert "kWh" not in text[0]
    assert "(--save-interval 1)" in lines(found, failures, 1e9)[2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(172800, "2 days"), (172799, "48 hours"), (7200, "2 hours"), (7199, "120 minutes"), (90, "1.5 minutes")],
)
def test_times_have_the_unit_of_their_size(seconds: float, text: str) -> None:
    assert _hours(seconds) == text


def test_numbers_of_tokens_have_suffixes() -> None:
    known = {"1": 1, "4096": 4096, "2K": 2000, "1.5M": 1_500_000, "300B": 3 * 10**11, "15T": 15 * 10**12}
    known |= {"1,000": 1000, "1_000": 1000, "1.5e12": 1_500_000_000_000, "1e+3": 1000}
    for text, number in known.items():
        assert count_of_tokens(text) == number
    for text in ("0", "0.9", "1e18", "-1", "15 T", "T", "", "nan", "1e-3", "1P"):
        with pytest.raises(ConfigurationError):
            count_of_tokens(text)


def test_daly_is_young_with_more_terms_and_bounded() -> None:
    assert young(50.0, 1e4) == 1000.0
    x = math.sqrt(50.0 / 2e4)
    assert daly(50.0, 1e4) == pytest.approx(1000.0 * (1 + x / 3 + x * x / 9) - 50.0)
    assert daly(2e4, 1e4) == 1e4 == daly(3e4, 1e4)
    failures = Failures(1.0, 30.0, 600.0)
    between = 3600.0 / 2
    expected = 100.0 / (between * math.exp(600.0 / between) * (math.exp(130.0 / between) - 1))
    assert useful_share(100.0, failures, 2) == pytest.approx(expected)


def options(**given: Any) -> Any:
    names = ("tokens", "dollars_per_hour", "watts", "stall", "over_devices", "over_seq_lengths", "html")
    rest = {"mtbf_hours": 100.0, "restart_minutes": 10.0, "evaluate": False, "limits": False}
    return SimpleNamespace(**{**dict.fromkeys(names), **rest, **given})


def test_what_was_not_said_of_a_run_is_taken_from_the_layout() -> None:
    memory = MemoryEstimate(4e9, 9e9, 8e9, 9e9, 9e9, 9e9)
    best: Any = SimpleNamespace(memory=memory)
    asked: Any = SimpleNamespace(machine=Machine(hardware("h100")))
    wanted = economics._wanted(asked, best, options(tokens="2K"))
    assert (wanted.tokens, wanted.failures) == (2000, Failures(100.0, 6.0, 600.0)), "12 GB at 2 GB/s"
    assert wanted.prices == Prices(None, 700.0)
    wanted = economics._wanted(asked, best, options(stall=0.0, watts=0.0, dollars_per_hour=0.0, restart_minutes=2.0))
    assert (wanted.tokens, wanted.failures, wanted.prices) == (None, Failures(100.0, 0.0, 120.0), Prices(0.0, 0.0))


def test_numbers_to_plan_for_are_above_0_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for over in ("over_devices", "over_lengths"):
        monkeypatch.setattr(
            economics, over, lambda _question, numbers, _wanted, over=over: asked.append((over, numbers))
        )
    economics._groups(None, options(over_devices=[8, 1, 8], over_seq_lengths=[3, 2]), None)  # pyright: ignore
    assert asked == [("over_devices", [1, 8]), ("over_lengths", [2, 3])]
    with pytest.raises(ConfigurationError, match="--over-seq-lengths 0 is not above 0"):
        economics._groups(None, options(over_seq_lengths=[5, 0]), None)  # pyright: ignore[reportArgumentType]


def test_costs_without_tokens_and_searches_without_a_choice_are_refused() -> None:
    for given, words in (
        ({"stall": 0.0}, "--stall is part of what a whole run costs"),
        ({"watts": 1.0}, "--watts is part"),
        ({"evaluate": True, "over_devices": [1]}, "search, but --evaluate chooses nothing"),
        ({"evaluate": True, "html": Path("x")}, "search, but --evaluate chooses nothing"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            economics.economics(None, [None], options(**given))  # pyright: ignore[reportArgumentType]


# Machines and links.


def test_a_process_has_its_share_of_the_cores_of_its_node() -> None:
    machine = Machine(hardware("cpu"), gpus_per_node=4, constants=replace(CPU, cores=2))
    assert [machine.processes_share(world) for world in (1, 2, 3, 4, 16)] == [1.0, 1.0, 2 / 3, 0.5, 0.5]
    assert Machine(hardware("cpu")).processes_share(64) == 1.0


def test_what_was_given_wins_over_the_table() -> None:
    plain = Machine(hardware("h100"))
    given = Machine(hardware("h100"), efficiency=0.3675, link_efficiency=0.5)
    assert (given.matmul_share, given.intra_share, given.inter_share) == (0.3675, 0.5, 0.5)
    assert (plain.matmul_share, plain.intra_share, plain.inter_share) == (0.735, 0.8, 0.95)
    assert given.attention_share == pytest.approx(plain.attention_share / 2)
    assert given.fsdp_attention_share == pytest.approx(plain.fsdp_attention_share / 2) == pytest.approx(0.093)
    assert (plain.range, Machine(hardware("b200")).range) == (RANGE, ASSUMED_RANGE)
    assert replace(plain, correction=1.0).range == CALIBRATED_RANGE == Machine(hardware("b200"), correction=2.0).range
    assert (constants_of(hardware("cpu")), constants_of(hardware("l40s"))) == (CPU, Constants())


def test_a_bandwidth_of_another_row_of_the_chip_means_that_row() -> None:
    assert hardware("a100", memory_bandwidth_gb_s=1555.0).memory_gb == TABLE["a100-40"].memory_gb
    assert hardware("a100", memory_bandwidth_gb_s=1555.0 * 1.029).name == "a100-40"
    assert hardware("a100", memory_bandwidth_gb_s=1555.0 * 1.04).name == "a100"
    assert hardware("a100", memory_bandwidth_gb_s=1555.0 * 1.04).memory_bandwidth_gb_s == 1555.0 * 1.04
    assert hardware("h100", memory_bandwidth_gb_s=4800.0, memory_gb=100.0).memory_gb == 100.0
    assert hardware("h100", memory_gb=0.0).memory_gb == 0.0


def test_the_peak_is_that_of_the_precision() -> None:
    training = small_config().training
    row = TABLE["a100"]
    assert row.peak_flops(training) == 19.5e12
    assert row.peak_flops(replace(training, tf32=True)) == 156e12
    for kind in ("bf16", "fp16"):
        assert row.peak_flops(replace(training, **{kind: True})) == 312e12


def layout(**sizes: int | bool) -> LayoutConfig:
    return LayoutConfig(**{"world_size": 64, **sizes})  # pyright: ignore[reportArgumentType]


TPCP = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}


def test_groups_lie_as_the_order_of_ranks_puts_them() -> None:
    """TP, then CP, then DP, then PP; with the mapping PP before DP. Stride, then number."""
    plain, mapped = layout(**TPCP), layout(**TPCP, use_tp_pp_dp_mapping=True)
    copies = layout(**TPCP, num_distributed_optimizer_instances=4, use_distributed_optimizer=True)
    for axis, found, between_stages, of_copies in (
        ("tp", (1, 2), (1, 2), (1, 2)),
        ("cp", (2, 2), (2, 2), (2, 2)),
        ("dp", (2, 16), (4, 16), (2, 4)),
        ("between", (32, 1), (64, 1), (8, 4)),
    ):
        assert (span(axis, plain), span(axis, mapped), span(axis, copies)) == (found, between_stages, of_copies), axis
    experts = layout(expert_model_parallel_size=4, expert_tensor_parallel_size=2, pipeline_model_parallel_size=2)
    assert (span("ep", experts), span("edp", experts)) == ((1, 8), (8, 4))
    mapped = replace(experts, use_tp_pp_dp_mapping=True)
    assert (span("ep", mapped), span("edp", mapped)) == ((1, 8), (16, 4))
    copied = replace(experts, num_distributed_optimizer_instances=2)
    assert span("edp", copied) == (8, 2)


FABRIC = Machine(
    replace(hardware("h100"), intra_node_gb_s=100.0, inter_node_gb_s=10.0),
    gpus_per_node=8,
    link_efficiency=1.0,
    constants=replace(Constants(), hop=1000.0, hop_inside=1.0),
)


@pytest.mark.parametrize(
    ("axis", "collective", "sizes", "seconds", "hops"),
    [
        ("tp", "all-reduce", {"tensor_model_parallel_size": 8}, 1.0, 14.0),
        ("tp", "all-gather", {"tensor_model_parallel_size": 8}, 1.0, 7.0),
        # 16 ranks in two nodes: 8 adapters of 10 GB/s together, 80.
        ("tp", "all-gather", {"tensor_model_parallel_size": 16}, 1.25, 14 / 2 + 1000.0),
        ("tp", "all-reduce", {"tensor_model_parallel_size": 16}, 1.25, 2 * (7 + 1000.0)),
        ("tp", "all-reduce", {"tensor_model_parallel_size": 64}, 1.25, 2 * (7 + 3000.0)),
        # Ranks 2 apart: 4 of a node, 40 GB/s.
        ("dp", "reduce-scatter", {"tensor_model_parallel_size": 2}, 2.5, 24 / 8 + 7000.0),
        ("cp", "send", {"context_parallel_size": 8}, 1.0, 1.0),
        ("cp", "send", {"context_parallel_size": 16}, 10.0, 1000.0),
        ("cp", "all-to-all", {"context_parallel_size": 8}, 1.0, 1.0),
        ("cp", "all-to-all", {"context_parallel_size": 16}, 10.0 * 8 / 15, 1000.0),
        ("pp", "send", {"pipeline_model_parallel_size": 8}, 10.0, 1000.0),
        ("pp", "send", {"pipeline_model_parallel_size": 8, "use_tp_pp_dp_mapping": True}, 1.0, 1000.0),
        ("pp", "send", {"pipeline_model_parallel_size": 16, "use_tp_pp_dp_mapping": True}, 10.0, 1000.0),
        ("pp", "send", {"pipeline_model_parallel_size": 8, "world_size": 8}, 1.0, 1.0),
    ],
)
def test_bytes_and_hops_go_over_the_links_of_their_group(
    axis: str, collective: str, sizes: dict[str, Any], seconds: float, hops: float
) -> None:
    term = Term(axis, collective, 100e9, "")
    assert transfer(term, layout(**sizes), FABRIC) == pytest.approx(seconds)
    assert latency(term, layout(**sizes), FABRIC) == pytest.approx(hops)


# What takes memory away.


def with_state(case: str, **parts: float) -> tuple[Any, MemoryEstimate]:
    return config_of(CASES[case]), MemoryEstimate(
        **{**dict.fromkeys(("weights", "gradients", "optimizer"), 1e9), **parts}
    )  # pyright: ignore


MORE = "more ranks with a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"
_AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("case", "activations", "flags"),
    [
        ("larger micro batches, SGD", 3.1e9, [_AGAIN, "--micro-batch-size 2"]),
        ("larger micro batches, SGD", 2.9e9, ["--use-distributed-optimizer"]),
        ("TP2, tied, dropout", 4e9, [_AGAIN, "--sequence-parallel"]),
        ("recomputed: full", 4e9, []),
        ("one device, GPT-2 with dropout in fp32", 4e9, [_AGAIN, "--bf16"]),
        ("one device", 1e9, ["--optimizer-cpu-offload"]),
        ("one rank that shards", 1e9, ["--optimizer-cpu-offload"]),
        ("fp16", 1e9, ["--use-torch-fsdp2 in place of --use-distributed-optimizer"]),
        ("FSDP2", 1e9, []),
        ("host memory", 1e9, ["--use-torch-fsdp2 in place of --use-distributed-optimizer"]),
        ("CPU ranks with a core each", 1e9, []),
    ],
)
def test_helpful_flags_are_those_of_what_fills_the_memory(case: str, activations: float, flags: list[str]) -> None:
    config, needed = with_state(case, activations=activations, loss=0.0, work=0.0)
    assert helpful_flags(config, needed, fused=CASES[case].device != "cpu") == [*flags, MORE]


def test_a_rank_keeps_its_state_and_without_training_its_weights() -> None:
    config = config_of(CASES["PP4, uneven"])
    kept = {
        stage: planner_numbers.evaluate_config(config, Machine(hardware("h100")), 1.0).stages[stage]
        for stage in range(4)
    }
    state = {stage: needed.weights + needed.gradients + needed.optimizer for stage, needed in kept.items()}
    least, parts = kept_at_least(config, fused=True, anywhere=True)
    most, of_most = kept_at_least(config, fused=True, anywhere=False)
    assert (least, sum(parts.values())) == (min(state, key=lambda stage: state[stage]), min(state.values()))
    assert (most, sum(of_most.values())) == (max(state, key=lambda stage: state[stage]), max(state.values()))
    idle = replace(config, training=replace(config.training, skip_train=True))
    assert list(kept_at_least(idle, fused=True, anywhere=True)[1]) == ["weights"]


def test_host_memory_is_that_of_the_emptiest_or_the_fullest_stage() -> None:
    config = config_of(Case(4, CASES["PP4, uneven"].flags.replace("--global-batch-size 16", "--global-batch-size 4")))
    moved = replace(
        config, optimizer=replace(config.optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    )
    sizes = [Shapes(config).parameters_of_stage(stage)[0] * 12 * 0.5 for stage in range(4)]
    assert (host_bytes(moved), host_bytes(moved, fullest=True)) == (min(sizes), max(sizes))
    assert host_bytes(config) == 0.0


def test_what_holds_how_much_is_said_the_largest_first() -> None:
    assert described({"a": 1e9, "b": 3.14e9, "c": 0.02e9, "d": 0.03e9}) == "b 3.1 GB, a 1.0 GB, d 30.0 MB"
    assert described({"a": 0.005, "b": 0.995}) == "b 0.0 MB, a 0.0 MB", "half a percent is said"


# Questions.


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


# Pipelines.


def test_the_first_moment_of_the_most_is_told() -> None:
    works = order(0, 2, 1, 4, 2)
    assert most_held(works, [2.0], [1.0]) == schedule.Most(5.0, 0, [2])
    interleaved = order(0, 2, 2, 4, 2)
    found = most_held(interleaved, [1.0, 3.0], [0.0, 5.0])
    now, most = [0, 0], (-1.0, 0, [0, 0])
    for forward, chunk, _ in interleaved:
        now[chunk] += forward
        held = now[0] + 3.0 * now[1] + (0.0, 5.0)[chunk]
        if held > most[0]:
            most = (held, chunk, now.copy())
        now[chunk] -= not forward
    assert (found.bytes, found.chunk, found.flight) == most


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches", "group", "few"),
    [(4, 1, 16, 4, 16), (4, 1, 17, 4, 16), (4, 1, 99, 4, 16), (4, 2, 17, 4, 17), (4, 2, 100, 6, 28), (2, 2, 99, 4, 19)],
)
def test_few_microbatches_leave_the_same_last_group(
    stages: int, chunks: int, microbatches: int, group: int, few: int
) -> None:
    assert few_microbatches(stages, chunks, microbatches, group) == few
    assert chunks == 1 or few % group == microbatches % group


def test_pipelines_of_equal_stages_wait_by_the_formula() -> None:
    forward, backward = [[1.0, 1.0]] * 4, [[2.0, 2.0]] * 4
    assert by_formula(forward, backward, 8, 0.5) == Times(8 * 6 + 3 / 2 * 6 + 2 * 3 * 0.5, 48.0)
    assert shortest(forward, backward, 8, 0.5) == Times(48 + 3 * (3 + 1.0), 48.0)
    assert simulate(forward, backward, 8, 4).total == 48 + 3 * 3
    assert simulate([[1.0]] * 4, [[2.0]] * 4, 100, 4).total == pytest.approx(3 * 103)
    assert simulate([[1.0]], [[2.0]], 5, 1) == Times(15.0, 15.0)
    times = Times(20.0, 16.0)
    assert (times.bubble, times.bubble_share) == (0.25, pytest.approx(0.2))
    assert (Times(0.0, 0.0).bubble, Times(0.0, 0.0).bubble_share) == (0.0, 0.0)


def test_stages_that_share_cores_take_the_sum_of_their_work_or_the_longest_wait() -> None:
    assert _in_turn(Times(30.0, 20.0), 0.5, 18.0) == Times(18.0, 18.0)
    assert _in_turn(Times(40.0, 20.0), 0.5, 18.0) == Times(20.0, 18.0)


@pytest.mark.parametrize(
    ("stages", "chunks", "there_are", "group", "wanted", "shown"),
    [
        (1, 1, 99, 1, None, 4), (4, 1, 99, 4, None, 8), (4, 1, 8, 4, None, 8), (2, 2, 99, 6, None, 12),
        (4, 1, 99, 4, 3, 3), (4, 2, 99, 4, 3, 4), (4, 2, 99, 4, 11, 8), (4, 2, 9, 4, 9, 9), (4, 2, 10, 4, 9, 8),
    ],
)  # fmt: skip
def test_whole_groups_are_drawn(
    stages: int, chunks: int, there_are: int, group: int, wanted: int | None, shown: int
) -> None:
    assert _shown(stages, chunks, there_are, group, wanted) == shown


def lane(name: str, *microbatches: float) -> Lane:
    passes = [
        Pass(True, 0, number, 10.0 * number, 10.0 * number + seconds) for number, seconds in enumerate(microbatches)
    ]
    return Lane(name, tuple(passes))


def test_a_stage_is_slow_from_the_factor_on_against_the_others() -> None:
    others = [lane("a", 1.0, 1.0, 9.0), lane("b", 1.0), lane("c", 1.0)]
    assert slow_stages([*others, lane("d", 1.5)], 1.5) == [
        "d is slow: a microbatch takes 1.5 s there, 1.50 times the 1 s of the other stages."
    ]
    assert slow_stages([*others, lane("d", 1.49)], 1.5) == []
    assert len(slow_stages([lane("a", 1.0), lane("b", 2.0)], 1.5)) == 1, "itself is not among the others"
    assert slow_stages([lane("a", 1.0)]) == []


def test_a_pipeline_fills_until_all_have_begun_and_drains_when_the_first_is_done() -> None:
    passes = [(Pass(True, 0, 0, 0.0, 4.0),), (Pass(True, 0, 0, 1.0, 5.0), Pass(False, 0, 0, 6.0, 9.0)), ()]
    timeline = Timeline("", tuple(Lane("", each) for each in passes), 1, 10.0)
    assert (timeline.fill, timeline.drain, timeline.passes_end, timeline.most_memory) == (1.0, 4.0, 9.0, 0.0)
    late = Timeline("", (Lane("", (Pass(True, 0, 0, 0.0, 1.0),)), Lane("", (Pass(True, 0, 0, 2.0, 3.0),))), 1, 3.0)
    assert late.drain == 2.0
    blocks = (Block("communication", 0.0, 0.5), Block("messages", 0.0, 5.0), Block("communication", 1.0, 1.25))
    assert Lane("", (), blocks, ((0.0, 1.0), (1.0, 3.0), (2.0, 3.0))).peak == (1.0, 3.0)
    assert Lane("", (), blocks).communicated == 0.75


def test_times_and_sizes_change_their_unit_at_its_bound() -> None:
    assert [duration(seconds) for seconds in (1.0, 0.9994, 0.001, 0.0009994, 999.0, 1000.0)] == [
        "1 s", "999 ms", "1 ms", "999 us", "999 s", "1,000 s",
    ]  # fmt: skip
    assert (size(1e9), size(0.9994e9), duration(1.2345, "")) == ("1 GB", "999 MB", "1.23")


# Answers.


def test_bytes_are_written_with_two_digits_where_there_are_few() -> None:
    assert [_gb(held) for held in (0.0, 0.1e9, 0.0999e9, 0.00123e9, 12.34e9)] == ["0.0", "0.1", "0.1", "0.0012", "12.3"]


def test_stages_that_need_the_same_are_in_one_row() -> None:
    one, two = MemoryEstimate(1, 1, 1, 1, 1, 1), MemoryEstimate(1, 1, 1, 1, 1, 2)
    assert _alike([one, one, one, two, one, one]) == [("0-2", one), ("3", two), ("4-5", one)]


def test_a_layout_fits_up_to_what_may_be_filled() -> None:
    found = planner_numbers.evaluate_config(config_of(CASES["one device"]), Machine(hardware("h100")), 1.0)
    needs = found.memory_bytes
    assert replace(found, usable_bytes=needs).fits
    assert not replace(found, usable_bytes=needs - 1).fits
    assert "stages over it: 0" in "\n".join(planner_numbers.as_text(replace(found, usable_bytes=needs - 1)))
    config = config_of(CASES["one device"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "USABLE", 0.5)  # whose product with a size is exact
        gigabytes = 2 * (found.stages[0].total / 1e9)
        assert verdict(config, device_memory_gb=gigabytes)[1]
        assert not verdict(config, device_memory_gb=math.nextafter(gigabytes, 0.0))[1]
    assert verdict(config)[1]
    assert "of 36.8 GB (92% of 40)" in verdict(config, device_memory_gb=40.0, device_name="h100")[0][1]
    assert verdict(config, device_name="h100")[0][1].startswith("on h100              fits: ")
    with pytest.raises(ConfigurationError, match="--device-name x is not one of a100, a100-40"):
        verdict(config, device_name="x")


def test_hidden_traffic_is_named_also_where_none_is_exposed() -> None:
    time: Any = SimpleNamespace(
        parts={"tp": 0.0, "cp": 0.0, "ep": 0.5, "pp": 0.0, "dp": 0.25}, hidden_by_axis={"tp": 0.125, "dp": 0.5}
    )
    assert _communication(time) == "tp 0 s exposed, 0.125 hidden; ep 0.5 s exposed; dp 0.25 s exposed, 0.5 hidden"
    nothing: Any = SimpleNamespace(parts=dict.fromkeys(time.parts, 0.0), hidden_by_axis={})
    assert _communication(nothing) == "none"


def test_a_thousandth_is_no_win() -> None:
    assert _winner([1.0, 0.9995, 2.0]) == 0
    assert _winner([1.0, 0.9985, 0.9]) == 2


def test_16_times_as_many_devices_are_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.plan import search as module

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


def test_a_longer_sequence_has_positions_and_a_shorter_one_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(scaling, "_point", lambda number, question, _wanted: asked.append((number, question.values)))
    values = {"seq_length": 1024, "global_batch_size": 8, "max_position_embeddings": 1536}
    base: Any = replace(question(values, Facts(), 2, Machine(hardware("h100")), 0.5), values=values)
    scaling.over_lengths(base, [512, 2048, 16384], scaling.Wanted())
    names = ("seq_length", "global_batch_size", "max_position_embeddings")
    assert [tuple(found[name] for name in names) for _, found in asked] == [
        (512, 16, 1536),
        (2048, 4, 2048),
        (16384, 1, 16384),
    ]
    asked.clear()
    scaling.over_lengths(replace(base, values={**values, "max_position_embeddings": None}), [4096], scaling.Wanted())
    assert asked[0][1]["max_position_embeddings"] is None


def test_near_batches_are_no_further_than_a_quarter_and_others() -> None:
    assert sensitivity._near_batches(64, [3, 6, 12, 24, 48]) == [48, 72, 60]
    assert sensitivity._near_batches(8, [16]) == []
    assert 64 not in sensitivity._near_batches(64, [1, 2, 4, 64])


def test_latency_of_gradients_that_are_reduced_in_every_microbatch_counts_each() -> None:
    for kind, times in (("optim", 1), ("optim_grads", 4), ("optim_grads_params", 4)):
        config = config_of(CASES[f"Megatron-FSDP {kind}"])
        assert num_microbatches(config, 64) == 4
        [reduced] = [term for term in sent(config, 0) if (term.axis, term.collective) == ("dp", "reduce-scatter")]
        units = 4 if kind == "optim" else 9  # 136 M parameters in buckets of 40 M; 8 layers and what is in none
        assert reduced.calls == times * units


def test_one_overlap_hides_what_is_its_own() -> None:
    """Of the distributed optimizer's traffic --overlap-grad-reduce hides sums, --overlap-param-gather gathers."""
    flags = CASES["ZeRO-1, gathers alone late"].flags
    plain = flags.replace("--overlap-grad-reduce ", "")
    machine = machine_of(CASES["ZeRO-1, gathers alone late"])

    def hidden(words: str, **gathers: bool) -> float:
        config = config_of(Case(16, words))
        config = replace(config, layout=replace(config.layout, **gathers))
        return step_time(config, Shapes(config), machine).hidden_by_axis["dp"]

    sums, both = hidden(flags), hidden(flags, overlap_param_gather=True)
    assert hidden(plain) == 0.0 < sums < both
    assert hidden(plain, overlap_param_gather=True) == pytest.approx(both - sums)


@pytest.mark.parametrize(
    ("case", "sizes", "rest"),
    [
        ("one device", "TP1 CP1 PP1 DP1", ""),
        ("PP4 VPP2, ZeRO-1, TP2 SP", "TP2+SP CP1 PP4x2 DP2", ""),
        ("CP2, a2a", "TP2+SP CP2 PP1 DP4", ""),
        ("TP2, tied, dropout", "TP2 CP1 PP1 DP2", ""),
        ("EP4, all-to-all", "TP1 CP1 PP1 DP16 EP4", ""),
        ("experts on one device", "TP1 CP1 PP1 DP1 EP1", ""),
        ("host memory", "TP1 CP1 PP1 DP8", ", optimizer in host memory"),
        ("FSDP2 in host memory", "TP1 CP1 PP1 DP8", ", weights and optimizer in host memory"),
    ],
)
def test_a_layout_is_named_by_its_sizes(case: str, sizes: str, rest: str) -> None:
    found = as_candidate(evaluate_config(config_of(CASES[case]), machine_of(CASES[case]), 1.0))
    assert name(found) == f"{sizes}, as given, recompute as given, micro batch 1{rest}"
    assert name(replace(found, recomputation="none", sharding="DDP")) == f"{sizes}, DDP, micro batch 1{rest}"


def test_what_is_in_host_memory_is_not_moved_there_again() -> None:
    """A layout that has the optimizer in host memory, or all of it, has no further such flag to try."""
    asked: Any = None
    for case in ("host memory", "FSDP2 in host memory"):
        found = as_candidate(evaluate_config(config_of(CASES[case]), machine_of(CASES[case]), 1.0))
        assert with_offloads(asked, found) == {}


def test_what_fits_exactly_is_said_to_fit() -> None:
    found = as_candidate(evaluate_config(config_of(CASES["one device"]), machine_of(CASES["one device"]), 1.0))
    asked = question({"global_batch_size": 4}, Facts(), 1, Machine(hardware("h100")), 0.5)
    for usable, words in ((found.memory.total, "fits"), (found.memory.total - 1, "does not fit")):
        said = simpler([replace(found, recomputation="full")], replace(asked, usable_bytes=usable))
        assert said[1].startswith(f"    {'as given, recompute full':<24}{words}, 4.0 GB: ")
    assert simpler([found], asked)[1].startswith(f"    {'as given':<24}")


def test_why_the_first_is_first() -> None:
    case = CASES["one device"]
    found = as_candidate(evaluate_config(config_of(case), machine_of(case), 1.0))
    assert found.time is not None
    asked = question({"global_batch_size": 4}, Facts(), 1, Machine(hardware("h100")), 0.5)
    slower = {
        share: replace(found, time=replace(found.time, pp=found.seconds * share)) for share in (0.0009, 0.005, 0.02)
    }
    assert why([found], asked).endswith("% of its time is matrix products")
    assert why([found, slower[0.0009]], asked).endswith("is matrix products. 2 takes as long, and is less simple")
    assert ". 2 takes 0.5% longer: pp 0 s -> 0.000114" in why([found, slower[0.005]], asked)
    assert ". 2 takes 2.0% longer: pp 0 s -> 0.000456" in why([found, slower[0.02]], asked)
