"""What is wrong with a table of a pipeline's passes is found before anything starts."""

import itertools

import pytest

from megatron_ext.config.derived.pipeline_table import KINDS, Walk, flaws, rank_of
from megatron_ext.cost.schedule import named
from megatron_ext.pipeline_tables import Action, Rows, rows, with_messages

SPLIT = {"interleaved-zero-bubble", "zbv", "dualpipe-v"}
TABLES = [
    (name, ranks, chunks, microbatches)
    for ranks in (2, 3, 4, 8)
    for name, chunks in (
        ("gpipe", 1),
        ("looped-bfs", 1),
        ("looped-bfs", 3),
        ("interleaved-zero-bubble", 1),
        ("interleaved-zero-bubble", 2),
        ("zbv", 2),
        ("dualpipe-v", 2),
    )
    for microbatches in (1, 2 * ranks, 4 * ranks)
    if name != "dualpipe-v" or microbatches > 1
]


def table(text: str) -> Rows:
    """'0F0 0B0 | 1F0 1B0' is the table of two ranks."""
    return tuple(
        tuple(Action(int(entry[0]), entry[1], int(entry[2:])) for entry in line.split()) for line in text.split("|")
    )


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), TABLES)
def test_the_tables_of_torch_are_right(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    found = named(name, ranks, chunks, microbatches)
    assert found.v_shaped == (name in ("zbv", "dualpipe-v"))
    assert list(flaws(found.rows, ranks, chunks, microbatches, v_shaped=found.v_shaped)) == []
    assert any(action.kind == "W" for row in found.rows for action in row) == (name in SPLIT)


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), TABLES)
def test_messages_arrive_even_if_each_waits_for_its_receive(
    name: str, ranks: int, chunks: int, microbatches: int
) -> None:
    """Every rank does one thing after another, and a send returns when its receive is reached, as without a buffer."""
    v_shaped = name in ("zbv", "dualpipe-v")
    of = tuple(rank_of(virtual, ranks, v_shaped=v_shaped) for virtual in range(ranks * chunks))
    left = [list(row) for row in with_messages(rows(name, ranks, chunks, microbatches), of)]
    crossings = sum(one != other for one, other in itertools.pairwise(of))
    met = 0
    while any(left):
        before = sum(map(len, left))
        for row in left:
            while row and row[0].kind in "FBIW":
                row.pop(0)
            if row and row[0].kind.startswith("SEND"):
                send = row[0]
                peer = send.stage + (1 if send.kind == "SEND_F" else -1)
                wanted = Action(peer, send.kind.replace("SEND", "RECV"), send.microbatch)
                if left[of[peer]][:1] == [wanted]:
                    row.pop(0)
                    left[of[peer]].pop(0)
                    met += 1
        assert sum(map(len, left)) < before, "ranks that wait for each other"
    assert met == 2 * crossings * microbatches


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0F1 0B0 0B1", "it has 1 lines, and --pipeline-model-parallel-size is 2"),
        ("0F0 0F1 0B0 | 1F0 1F1 1B0 1B1", "line 1: 0B1, or 0I1 and 0W1, is missing"),
        ("0F0 0F1 0B0 0I1 | 1F0 1F1 1B0 1B1", "line 1: 0W1 is missing"),
        ("0F0 0B0 | 1F0 1F1 1B0 1B1", "line 1: 0F1 is missing"),
        ("0F0 0F1 0B0 0B1 0B1 | 1F0 1F1 1B0 1B1", "line 1, pass 5 (0B1) is there twice"),
        ("0F0 0F1 0B0 0B1 0I1 | 1F0 1F1 1B0 1B1", "line 1, pass 5 (0I1) is there twice"),
        ("0F0 0F1 0B0 0B1 | 1F0 1B0 1B1 1F1", "line 2, pass 3 (1B1) comes before 1F1"),
        ("0F0 0F1 0B0 0W1 0I1 | 1F0 1B0 1F1 1B1", "line 1, pass 4 (0W1) comes before 0I1"),
        ("0F1 0F0 0B0 0B1 | 1F0 1B0 1F1 1B1", "line 1, pass 1 (0F1) comes before 0F0: forward passes are in the "),
        ("0F0 0F1 0F2 | 1F0", "line 1, pass 3 (0F2): there are 2 stages and 2 microbatches, both from 0"),
        ("0F0 2F0 | 1F0", "line 1, pass 2 (2F0): there are 2 stages and 2 microbatches"),
        ("0F0 1F0 | 1F0", "line 1, pass 2 (1F0): stage 1 of a loop of 2 ranks is on line 2"),
        ("0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1", "wait for each other for ever: line 1 to begin 0B0, line 2 to begin 1F1"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, said: str) -> None:
    found = list(flaws(table(text), 2, 1, 2, v_shaped=False))
    assert len(found) == 1
    assert said in found[0]


def test_a_message_takes_time_between_ranks_alone() -> None:
    walk = Walk(rows("zbv", 2, 2, 1), 4)
    assert walk.stuck == []
    done = walk.ends([1.0] * 4 * len(KINDS), delay=10.0)
    assert [done[Action(stage, "F", 0)] for stage in range(4)] == [1.0, 12.0, 13.0, 24.0]
