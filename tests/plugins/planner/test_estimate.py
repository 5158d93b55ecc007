"""How long the links and the pipelines of a layout take, and how much of a pipeline is drawn."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.config.derived.batch_size import num_microbatches
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.cost import schedule
from megatron_ext.cost.hardware import Constants, Machine, hardware
from megatron_ext.cost.schedule import Schedule, most_held
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.traffic import Term, sent
from megatron_ext.plugins.planner.estimate import Times, _in_turn, step_time
from megatron_ext.plugins.planner.interconnect import latency, span, transfer
from megatron_ext.plugins.planner.simulate import by_formula, shortest, simulate
from megatron_ext.plugins.planner.simulated_timeline import _shown
from megatron_ext.plugins.planner.timeline import Block, Lane, Pass, Timeline
from tests.support.planner_numbers import CASES, Case, config_of, machine_of


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


def test_the_first_moment_of_the_most_is_told() -> None:
    works = Schedule(2, 1, 4).order(0)
    assert most_held(works, [2.0], [1.0]) == schedule.Most(5.0, 0, [2])
    interleaved = Schedule(2, 2, 4, 2).order(0)
    found = most_held(interleaved, [1.0, 3.0], [0.0, 5.0])
    now, most = [0, 0], (-1.0, 0, [0, 0])
    for forward, chunk, *_ in interleaved:
        now[chunk] += forward
        held = now[0] + 3.0 * now[1] + (0.0, 5.0)[chunk]
        if held > most[0]:
            most = (held, chunk, now.copy())
        now[chunk] -= not forward
    assert (found.bytes, found.chunk, found.flight) == most


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches", "group", "few"),
    [(4, 1, 16, 1, 16), (4, 1, 17, 1, 16), (4, 1, 99, 1, 16), (4, 2, 17, 4, 17), (4, 2, 100, 6, 28), (2, 2, 99, 4, 19)],
)
def test_few_microbatches_leave_the_same_last_group(
    stages: int, chunks: int, microbatches: int, group: int, few: int
) -> None:
    assert Schedule(stages, chunks, microbatches, group).few().microbatches == few
    assert few % group == microbatches % group


def test_pipelines_of_equal_stages_wait_by_the_formula() -> None:
    forward, backward = [[1.0, 1.0]] * 4, [[2.0, 2.0]] * 4
    schedule = Schedule(4, 2, 8, 4)
    assert by_formula(schedule, forward, backward, 0.5) == Times(8 * 6 + 3 / 2 * 6 + 2 * 3 * 0.5, 48.0)
    assert shortest(schedule, forward, backward, 0.5) == Times(48 + 3 * (3 + 1.0), 48.0)
    assert simulate(schedule, forward, backward).total == 48 + 3 * 3
    assert simulate(Schedule(4, 1, 100), [[1.0]] * 4, [[2.0]] * 4).total == pytest.approx(3 * 103)
    assert simulate(Schedule(1, 1, 5), [[1.0]], [[2.0]]) == Times(15.0, 15.0)
    times = Times(20.0, 16.0)
    assert (times.bubble, times.bubble_share) == (0.25, pytest.approx(0.2))
    assert (Times(0.0, 0.0).bubble, Times(0.0, 0.0).bubble_share) == (0.0, 0.0)


def test_stages_that_share_cores_take_the_sum_of_their_work_or_the_longest_wait() -> None:
    assert _in_turn(Times(30.0, 20.0), 0.5, 18.0) == Times(18.0, 18.0)
    assert _in_turn(Times(40.0, 20.0), 0.5, 18.0) == Times(20.0, 18.0)


@pytest.mark.parametrize(
    ("stages", "chunks", "there_are", "group", "wanted", "shown"),
    [
        (1, 1, 99, 1, None, 4), (4, 1, 99, 1, None, 8), (4, 1, 8, 1, None, 8), (2, 2, 99, 6, None, 12),
        (4, 1, 99, 1, 3, 3), (4, 2, 99, 4, 3, 4), (4, 2, 99, 4, 11, 8), (4, 2, 9, 4, 9, 9), (4, 2, 10, 4, 9, 8),
    ],
)  # fmt: skip
def test_whole_groups_are_drawn(
    stages: int, chunks: int, there_are: int, group: int, wanted: int | None, shown: int
) -> None:
    assert _shown(Schedule(stages, chunks, there_are, group), wanted) == shown


def lane(name: str, *microbatches: float) -> Lane:
    passes = [
        Pass(True, 0, number, 10.0 * number, 10.0 * number + seconds) for number, seconds in enumerate(microbatches)
    ]
    return Lane(name, tuple(passes))


def test_a_pipeline_fills_until_all_have_begun_and_drains_when_the_first_is_done() -> None:
    passes = [(Pass(True, 0, 0, 0.0, 4.0),), (Pass(True, 0, 0, 1.0, 5.0), Pass(False, 0, 0, 6.0, 9.0)), ()]
    timeline = Timeline("", tuple(Lane("", each) for each in passes), 1, 10.0)
    assert (timeline.fill, timeline.drain, timeline.passes_end, timeline.most_memory) == (1.0, 4.0, 9.0, 0.0)
    late = Timeline("", (Lane("", (Pass(True, 0, 0, 0.0, 1.0),)), Lane("", (Pass(True, 0, 0, 2.0, 3.0),))), 1, 3.0)
    assert late.drain == 2.0
    blocks = (Block("communication", 0.0, 0.5), Block("messages", 0.0, 5.0), Block("communication", 1.0, 1.25))
    assert Lane("", (), blocks, ((0.0, 1.0), (1.0, 3.0), (2.0, 3.0))).peak == (1.0, 3.0)
    assert Lane("", (), blocks).communicated == 0.75
