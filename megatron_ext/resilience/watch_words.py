"""What the watch says of a rank by its last heartbeat, and of a hang."""

from collections.abc import Mapping
from typing import Any

from megatron_ext.resilience.peer_processes import ProcessName
from megatron_ext.resilience.verdict import RankReport

THE_END = "the end of the run"
"""The phase of a rank that has left."""


def place(beat: Mapping[str, Any]) -> str:
    """Return where a rank was at a heartbeat."""
    return RankReport(iteration=beat["iteration"], phase=beat["phase"]).place


def silence_text(beat: Mapping[str, Any], end: str | None, *, stopped: bool) -> str:
    """Return what is known of a rank that does not answer.

    Args:
        beat: its last heartbeat; empty where there was none.
        end: how its process ended, where that was seen.
        stopped: whether a rank of its machine sees that its process is stopped.
    """
    if beat.get("phase") == THE_END:
        return "has left the run"
    if end is not None:
        return end
    how = "is stopped, by SIGSTOP or a debugger" if stopped else "does not answer"
    if not beat:
        return f"{how}, never heard of"
    name = ProcessName.from_json(beat["process"])
    return f"{how} (process {name.pid} on {name.host}), last heard of {place(beat)}"


def last_words(step: int, cause: str, folder: str | None, *, timeout: float, recorded: bool) -> str:
    """Return the line that ends a run which hangs.

    Args:
        step: the step, from 1; 0 before the first.
        cause: whole sentences.
        folder: where stacks were written, if they were.
        timeout: seconds that a rank may wait.
        recorded: whether a flight recorder's dump is there too.
    """
    where = f"at iteration {step}" if step else "before the first step"
    stacks = f"Stacks of the ranks that live: {folder}. " if folder else ""
    if folder and recorded:
        stacks += f"What they exchanged: tools/doctor.py --flight-recorder {folder}. "
    resume = " --load resumes from the last checkpoint." if step else ""
    return (
        f"hang {where}: {cause} {stacks}If it is not stuck but slow, raise --distributed-timeout-minutes (now "
        f"{timeout / 60.0:g}); else look at that rank's output and machine, and start again.{resume}"
    )
