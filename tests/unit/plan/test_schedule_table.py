"""Bubbles and activations of tables, against the formulas of their papers."""

import pytest

from megatron_ext.plan.schedule import most_held
from megatron_ext.plan.schedule_table import named
from megatron_ext.plan.simulate import simulate
from megatron_ext.plan.simulated_timeline import equal_stages


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("groups", [2, 4])
def test_bubbles_are_those_of_the_papers(stages: int, groups: int) -> None:
    """In units of a microbatch, whose F, I and W take a third each: (p-1)/v without a split (Huang et al. 2019;
    Lamy-Poirier 2022, arXiv:2211.05953), a third of that for ZB-H1 (Qi et al. 2023, arXiv:2401.10241, section 2.3)."""
    microbatches = stages * groups
    assert named("gpipe", stages, 1, microbatches).bubble == pytest.approx(stages - 1)
    assert named("looped-bfs", stages, 2, microbatches).bubble == pytest.approx((stages - 1) / 2)
    assert named("interleaved-zero-bubble", stages, 1, microbatches).bubble == pytest.approx((stages - 1) / 3)
    for name in ("interleaved-zero-bubble", "zbv", "dualpipe-v"):
        assert named(name, stages, 2, microbatches).bubble <= (stages - 1) / 6 + 1e-9


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v"])
def test_a_v_holds_as_much_on_every_rank_as_1f1b_on_the_first(name: str) -> None:
    table = named(name, 4, 2, 16)
    held = [most_held(table.order(rank), [0.5, 0.5], [0.0, 0.0]).bytes for rank in range(4)]
    assert max(held) <= 4.5
    assert max(held) - min(held) <= 0.5


def test_stages_that_differ_are_simulated_pass_by_pass() -> None:
    """One microbatch by hand: 0F to 1, 1F from 1.5 to 3.5, 2F to 6.5, 3F from 7 to 11, 3I to 15; 2I from 15.5 to 18.5,
    2W to 21.5, 1I to 23.5; 0I from 24 to 25, 0W to 26."""
    forward, backward = [[1.0, 4.0], [2.0, 3.0]], [[2.0, 8.0], [4.0, 6.0]]
    assert simulate(named("zbv", 2, 2, 1), forward, backward, delay=0.5).total == 26.0


def test_the_picture_shows_the_halves() -> None:
    timeline = equal_stages(2, 2, 4, name="zbv")
    passes = timeline.lanes[0].passes
    assert {each.half for each in passes} == {"", "inputs", "weights"}
    assert sum(each.end - each.begin for each in passes) == pytest.approx(12.0)
    assert [each.begin for each in passes] == sorted(each.begin for each in passes)
