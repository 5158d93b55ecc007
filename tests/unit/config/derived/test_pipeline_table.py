"""Tables of a pipeline's passes: every pass is there, on its rank, and no rank waits for ever."""

import itertools

import pytest

from megatron_ext.config.derived.pipeline_table import KINDS, Walk, rank_of
from megatron_ext.cost.schedule import named
from megatron_ext.pipeline_tables import Action, rows, with_messages

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


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), TABLES)
def test_the_tables_of_torch_are_right(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    found = named(name, ranks, chunks, microbatches)
    assert found.v_shaped == (name in ("zbv", "dualpipe-v"))
    for rank, row in enumerate(found.rows):
        assert {found.rank_of(action.stage) for action in row} == {rank}
    done = Walk(found.rows, ranks * chunks).ends([1.0] * ranks * chunks * len(KINDS))
    for kinds in ("F", "BW"):  # a backward pass is whole, or in two halves
        passes = [action[::2] for action in done if action.kind in kinds]
        assert sorted(passes) == list(itertools.product(range(ranks * chunks), range(microbatches)))
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


def test_a_message_takes_time_between_ranks_alone() -> None:
    walk = Walk(rows("zbv", 2, 2, 1), 4)
    done = walk.ends([1.0] * 4 * len(KINDS), delay=10.0)
    assert [done[Action(stage, "F", 0)] for stage in range(4)] == [1.0, 12.0, 13.0, 24.0]
