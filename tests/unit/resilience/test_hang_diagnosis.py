"""Who is to blame for a hang, from what the ranks say."""

import dataclasses
import itertools
import json
from typing import Any

import pytest

from megatron_ext.resilience.hang_diagnosis import (
    THE_END,
    RankReport,
    hang_text,
    last_words,
    numbers_text,
    silence_text,
)
from megatron_ext.resilience.peer_processes import ProcessName
from megatron_ext.resilience.progress import LOADER


def in_collective(
    group: str, members: tuple[int, ...], counts: dict[str, int], operation: str = "allreduce"
) -> RankReport:
    return RankReport(
        iteration=5,
        phase="the update",
        operation=operation,
        group=group,
        group_title=f"the group {group}",
        members=members,
        seconds=4.04,
        counts=counts,
    )


WAITS = in_collective("all", (0, 1, 2), {"all": 7})
WAITERS = "Ranks 0, 2 wait in allreduce of the group all (ranks 0-2) since 4.0 s."


def test_who_does_not_answer_comes_first() -> None:
    reports = {0: WAITS, 2: WAITS}
    assert hang_text(reports, {1: "is stopped"}) == f"rank 1 did not come: it is stopped. {WAITERS}"


def test_all_who_do_not_answer_are_named_in_their_order() -> None:
    text = hang_text({0: WAITS}, {2: "is stopped", 1: "ended"})
    assert text.startswith("rank 1 did not come: it ended; rank 2 did not come: it is stopped. Rank 0 waits in ")


def test_then_who_waits_for_its_data() -> None:
    loads = RankReport(iteration=6, phase="the batch", operation=LOADER, seconds=4.2)
    text = hang_text({0: WAITS, 1: loads, 2: WAITS}, {})
    assert text == f"rank 1 waits for its data loader, since 4.2 s, at iteration 6, in the batch. {WAITERS}"
    assert hang_text({0: loads}, {}) == "rank 0 waits for its data loader, since 4.2 s, at iteration 6, in the batch."


def test_then_who_does_something_else() -> None:
    busy = RankReport(iteration=None, phase="the save")
    text = hang_text({0: WAITS, 1: busy, 2: WAITS, 3: busy}, {})
    assert text == f"rank 1 did not come: it is before the first step, in the save. {WAITERS}", (
        "nobody waits for rank 3"
    )


def test_who_has_done_its_part_is_not_missed() -> None:
    """Rank 1 has begun the collective in which others wait, and computes; rank 2 has left it out."""
    busy = RankReport(iteration=5, phase="the save", counts={"all": 7})
    behind = dataclasses.replace(WAITS, counts={"all": 6})
    assert hang_text({0: WAITS, 1: busy, 2: behind}, {}).startswith(
        "rank 2 did not come to collective 7 of the group all"
    )
    assert hang_text({0: WAITS, 1: busy, 2: WAITS}, {}).startswith(
        "rank 1 did not come: it is at iteration 5, in the s"
    )


def test_who_sends_no_message_is_missed() -> None:
    """Messages are not counted."""
    receives = in_collective("pair", (0, 1), {"all": 7}, "recv")
    busy = RankReport(iteration=5, phase="the batch", counts={"all": 7})
    text = hang_text({0: receives, 1: busy, 2: busy}, {})
    assert text == (
        "rank 1 did not come: it is at iteration 5, in the batch. Rank 0 waits in recv of the group pair (ranks 0-1) "
        "since 4.0 s."
    )


def test_who_sends_no_message_is_missed_before_who_is_behind_for_want_of_it() -> None:
    receives = in_collective("pair", (0, 1), {"all": 6}, "recv")
    busy = RankReport(iteration=5, phase="the batch", counts={"all": 7})
    text = hang_text({0: receives, 1: busy, 2: WAITS}, {})
    assert text.startswith("rank 1 did not come: it is at iteration 5, in the batch. ")


def test_then_who_left_out_a_collective_and_is_in_another_group() -> None:
    ahead = in_collective("all", (0, 1, 2), {"all": 7, "pair": 3})
    behind = in_collective("pair", (1, 2), {"all": 6, "pair": 4}, "barrier")
    text = hang_text({0: ahead, 1: behind, 2: ahead}, {})
    assert text == (
        "rank 1 did not come to collective 7 of the group all: it has begun 6, and waits in barrier of the group pair, "
        f"at iteration 5, in the update. {WAITERS}"
    )


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    first, second = in_collective("a", (0, 1), {"a": 2, "b": 1}), in_collective("b", (0, 1), {"a": 1, "b": 2})
    text = hang_text({0: first, 1: second}, {})
    assert "rank 0 did not come to collective 2 of the group b: it has begun 1, and" in text
    assert "rank 1 did not come to collective 2 of the group a: it has begun 1, and" in text


def test_then_who_left_out_a_collective_and_is_in_the_same_group() -> None:
    behind = dataclasses.replace(WAITS, counts={"all": 6})
    text = hang_text({0: WAITS, 1: behind, 2: WAITS}, {})
    assert text.startswith("rank 1 did not come to collective 7 of the group all: it has begun 6, and waits in ")
    assert text.endswith(WAITERS)


def test_last_the_network() -> None:
    text = hang_text(dict.fromkeys(range(3), WAITS), {})
    assert text.startswith("all ranks are there and none is behind, but they cannot exchange data. Ranks 0-2 wait in ")


def waits(seconds: float, members: tuple[int, ...] = (0, 1, 2, 3, 4), operation: str = "allreduce") -> RankReport:
    return dataclasses.replace(WAITS, seconds=seconds, members=members, operation=operation)


def test_the_longest_wait_comes_first_and_is_what_a_place_is_told_by() -> None:
    pair = waits(9.0, (2, 3), "barrier")
    reports = {0: waits(1.0), 1: waits(5.0), 2: pair, 3: dataclasses.replace(pair, seconds=7.0)}
    assert hang_text(reports, {4: "is stopped"}) == (
        "rank 4 did not come: it is stopped. Ranks 2-3 wait in barrier of the group all (ranks 2-3) since 9.0 s; ranks "
        "0-1 wait in allreduce of the group all (ranks 0-4) since 5.0 s."
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, " since 0.0 s."), (0.04, " since 0.0 s."), (61.25, " since 61.2 s.")]
)
def test_how_long_a_rank_has_waited(seconds: float, text: str) -> None:
    assert hang_text({0: waits(seconds)}, {4: "is stopped"}) == (
        f"rank 4 did not come: it is stopped. Rank 0 waits in allreduce of the group all (ranks 0-4){text}"
    )


def test_a_rank_that_is_behind_several_is_told_by_the_place_where_most_wait() -> None:
    """Rank 0 is behind in two groups: where three ranks wait counts, and it is named once."""
    behind = in_collective("own", (0, 5), {"all": 6, "pair": 2, "own": 1}, "barrier")
    most = in_collective("all", (0, 1, 2, 3), {"all": 7, "pair": 3})
    few = in_collective("pair", (0, 4), {"all": 7, "pair": 3}, "broadcast")
    for reports in ({0: behind, 1: most, 2: most, 3: most, 4: few}, {4: few, 3: most, 2: most, 1: most, 0: behind}):
        text = hang_text(reports, {})
        assert text.startswith("rank 0 did not come to collective 7 of the group all: it has begun 6, and waits in ")
        assert text.count("did not come") == 1
        assert "anks 1-3 wait in allreduce" in text
        assert "ank 4 waits in broadcast" in text


def test_of_those_that_are_busy_only_members_are_named() -> None:
    """They have begun all; another that is busy as well is in nobody's way."""
    busy = RankReport(iteration=5, phase="the save", counts={"all": 7})
    text = hang_text({0: WAITS, 1: busy, 2: WAITS, 3: busy}, {})
    assert text == f"rank 1 did not come: it is at iteration 5, in the save. {WAITERS}"


def test_who_waits_for_data_waits_for_no_rank() -> None:
    found = [RankReport(1, "x", operation).waits_for_ranks for operation in (None, LOADER, "allreduce", "recv")]
    assert found == [False, False, True, True]


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 0, 1, 2], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")]
)
def test_numbers(ranks: list[int], text: str) -> None:
    assert numbers_text(ranks) == text


def test_a_report_survives_json() -> None:
    assert RankReport.from_json(json.loads(json.dumps(WAITS.as_json()))) == WAITS


def test_ranks_are_named_in_ranges() -> None:
    for count in range(1, 6):
        for ranks in itertools.combinations((0, 1, 2, 3, 9, 10, 11), count):
            title, _, listed = numbers_text(ranks[::-1]).partition(" ")
            assert title == ("rank" if count == 1 else "ranks")
            named = []
            for piece in listed.split(", "):
                first, _, last = piece.partition("-")
                assert last != first
                named.append(list(range(int(first), int(last or first) + 1)))
            assert [rank for piece in named for rank in piece] == list(ranks)
            assert all(before[-1] + 1 < after[0] for before, after in itertools.pairwise(named))


def test_the_last_words_of_a_hang_say_what_to_look_at() -> None:
    assert last_words(0, "why.", None, timeout=90.0, recorded=True) == (
        "hang before the first step: why. If it is not stuck but slow, raise --distributed-timeout-minutes (now 1.5); "
        "else look at that rank's output and machine, and start again."
    )
    found = last_words(7, "why.", "/save/hang-7", timeout=600.0, recorded=True)
    assert found == (
        "hang at iteration 7: why. Stacks of the ranks that live: /save/hang-7. What they exchanged: torchfrtrace "
        "/save/hang-7. If it is not stuck but slow, raise --distributed-timeout-minutes "
        "(now 10); else look at that rank's output and machine, and start again. --load resumes from the last "
        "checkpoint."
    )
    assert "torchfrtrace" not in last_words(7, "why.", "/save/hang-7", timeout=600.0, recorded=False)


BEAT = {"iteration": 7, "phase": "the update", "process": ProcessName(99, "node9", "boot", 5).as_json()}
HEARD = "(process 99 on node9), last heard of at iteration 7, in the update"


@pytest.mark.parametrize(
    ("beat", "end", "stopped", "text"),
    [
        (BEAT | {"phase": THE_END}, "was killed", True, "has left the run"),
        (BEAT, "was killed", True, "was killed"),
        (BEAT, None, True, f"is stopped, by SIGSTOP or a debugger {HEARD}"),
        (BEAT, None, False, f"does not answer {HEARD}"),
        ({}, None, False, "does not answer, never heard of"),
        ({}, None, True, "is stopped, by SIGSTOP or a debugger, never heard of"),
    ],
)
def test_the_best_that_is_known_of_a_silent_rank_is_said(
    beat: dict[str, Any], end: str | None, stopped: bool, text: str
) -> None:
    assert silence_text(beat, end, stopped=stopped) == text
