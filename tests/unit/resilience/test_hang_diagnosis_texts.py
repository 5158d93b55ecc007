"""What is said of a hang, and of a rank that does not answer."""

from typing import Any

import pytest

from megatron_ext.resilience.hang_diagnosis import THE_END, last_words, silence_text
from megatron_ext.resilience.peer_processes import ProcessName


def test_the_last_words_of_a_hang_say_what_to_look_at() -> None:
    assert last_words(0, "why.", None, timeout=90.0, recorded=True) == (
        "hang before the first step: why. If it is not stuck but slow, raise --distributed-timeout-minutes (now 1.5); "
        "else look at that rank's output and machine, and start again."
    )
    found = last_words(7, "why.", "/save/hang-7", timeout=600.0, recorded=True)
    assert found == (
        "hang at iteration 7: why. Stacks of the ranks that live: /save/hang-7. What they exchanged: tools/doctor.py "
        "--flight-recorder /save/hang-7. If it is not stuck but slow, raise --distributed-timeout-minutes (now 10); "
        "else look at that rank's output and machine, and start again. --load resumes from the last checkpoint."
    )
    assert "--flight-recorder" not in last_words(7, "why.", "/save/hang-7", timeout=600.0, recorded=False)


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
