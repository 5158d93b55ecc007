"""Judges which rank holds up a run, from the reports of ranks and from the ranks that do not answer.

The ranks that wait are not to blame. In this order, the cause is a rank that does not answer; that waits for its data;
that is busy and has not begun a collective in which others wait; that has begun fewer collectives of a group than the
others of that group; that is busy although it has begun all of them, since its device may not have.

The texts of the watch about a rank's last heartbeat and about a hang are made here, too.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_ext.parallel.operations import END_OF_BATCH, MESSAGES
from megatron_ext.resilience.peer_processes import ProcessName
from megatron_ext.resilience.progress import LOADER

RECORD = "nccl_trace_rank_"
"""File name, before the rank's number, of a dump of NCCL's flight recorder; torch's torchfrtrace reads a folder of
them."""

_BETWEEN_TWO = frozenset((*MESSAGES, END_OF_BATCH))  # operations between two ranks, which nobody counts


@dataclass(frozen=True)
class RankReport:
    """Says where a rank is. It is plain data, which goes through JSON."""

    iteration: int | None
    """The step it works on, from 1; None before the first."""

    phase: str

    operation: str | None = None
    """The collective that it waits in, or `LOADER`; None where it waits for nothing."""

    group: str = ""
    """torch's name of that collective's group, equal on all its ranks."""

    group_title: str = ""
    """The group's readable name."""

    members: tuple[int, ...] = ()
    """Ranks of that group."""

    seconds: float = 0.0
    """Seconds that the rank has waited."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Collectives begun, by the group's name."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RankReport":
        """Return the report from its `as_json` form."""
        return cls(**{**fields, "members": tuple(fields["members"])})

    @property
    def waits_for_ranks(self) -> bool:
        """Whether the rank waits in a collective."""
        return self.operation is not None and self.operation != LOADER

    @property
    def whereabouts(self) -> str:
        """Where the rank is, in words."""
        where = "before the first step" if self.iteration is None else f"at iteration {self.iteration}"
        return f"{where}, in {self.phase}"


def hang_text(reports: Mapping[int, RankReport], silent: Mapping[int, str]) -> str:
    """Return the rank that did not come and the ranks that wait for it, in one or two sentences, without advice.

    Args:
        reports: the ranks that answered.
        silent: the ranks that did not, each with its last known state, for example "is stopped; last heard of at ...".
    """
    waiting = {rank: report for rank, report in reports.items() if report.waits_for_ranks}
    if silent:
        cause = "; ".join(f"rank {rank} did not come: it {text}" for rank, text in sorted(silent.items()))
        return f"{cause}. {_waiters(waiting, silent)}".rstrip()
    loading = {rank: report for rank, report in reports.items() if report.operation == LOADER}
    if loading:
        cause = "; ".join(
            f"rank {rank} waits for its data loader, since {report.seconds:.1f} s, {report.whereabouts}"
            for rank, report in sorted(loading.items())
        )
        return f"{cause}. {_waiters(waiting, loading)}".rstrip()
    busy = {rank: report for rank, report in reports.items() if report.operation is None}
    absent = {rank: report for rank, report in busy.items() if _is_missed(rank, report, waiting)}
    if absent:
        return _busy_text(absent, waiting)
    behind = _behind(waiting)
    if behind:
        cause = "; ".join(_behind_text(rank, waiting[rank], waiting[ahead]) for rank, ahead in sorted(behind.items()))
        return f"{cause}. {_waiters(waiting, behind)}".rstrip()
    members = {member for report in waiting.values() for member in report.members}
    if not members.isdisjoint(busy):
        return _busy_text({rank: report for rank, report in busy.items() if rank in members}, waiting)
    nobody = "all ranks are there and none is behind, but they cannot exchange data."
    return f"{nobody} {_waiters(waiting, ())}".rstrip()


def numbers_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    pieces: list[str] = []
    ordered = sorted(ranks)
    start = 0
    for index, rank in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != rank + 1:
            first = ordered[start]
            pieces.append(str(first) if first == rank else f"{first}-{rank}")
            start = index + 1
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(pieces)}"


def _is_missed(rank: int, report: RankReport, waiting: Mapping[int, RankReport]) -> bool:
    """Return whether another rank waits in a collective that this rank has not begun, or for a message."""
    return any(
        rank in other.members and (_count(report, other) < _count(other, other) or other.operation in _BETWEEN_TWO)
        for other in waiting.values()
    )


def _busy_text(busy: Mapping[int, RankReport], waiting: Mapping[int, RankReport]) -> str:
    cause = "; ".join(f"rank {rank} did not come: it is {report.whereabouts}" for rank, report in sorted(busy.items()))
    return f"{cause}. {_waiters(waiting, busy)}".rstrip()


def _behind(waiting: Mapping[int, RankReport]) -> dict[int, int]:
    """Return the ranks that have begun fewer collectives of a group than a rank that waits in it -> the waiting rank.

    A rank that skipped a collective goes on to another group, and waits in it for ranks that wait in the first. The
    group with the most waiting ranks is taken to be right; of several with as many, all count.
    """
    waiters = Counter(report.group for report in waiting.values())
    waited_for: dict[int, int] = {}
    most = 0
    for other, report in sorted(waiting.items(), key=lambda item: -waiters[item[1].group]):
        late = [
            rank
            for rank in report.members
            if rank in waiting and _count(waiting[rank], report) < _count(report, report)
        ]
        if late and waiters[report.group] >= most:
            most = waiters[report.group]
            for rank in late:
                waited_for.setdefault(rank, other)
    return waited_for


def _count(report: RankReport, of: RankReport) -> int:
    return report.counts.get(of.group, 0)


def _behind_text(rank: int, report: RankReport, ahead: RankReport) -> str:
    return (
        f"rank {rank} did not come to collective {_count(ahead, ahead)} of {ahead.group_title}: it has begun "
        f"{_count(report, ahead)}, and waits in {report.operation} of {report.group_title}, {report.whereabouts}"
    )


def _waiters(waiting: Mapping[int, RankReport], to_blame: Collection[int]) -> str:
    """Return the waiting ranks with their operation and group, longest wait first."""
    places: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for rank, report in sorted(waiting.items(), key=lambda item: -item[1].seconds):
        if rank not in to_blame:
            places.setdefault((report.operation or "", report.group_title, report.members), []).append(rank)
    texts = []
    for (operation, title, members), ranks in places.items():
        longest = max(waiting[rank].seconds for rank in ranks)
        verb = "waits" if len(ranks) == 1 else "wait"
        texts.append(
            f"{numbers_text(ranks)} {verb} in {operation} of {title} ({numbers_text(members)}) since {longest:.1f} s"
        )
    said = "; ".join(texts)
    return f"{said[:1].upper()}{said[1:]}." if texts else ""


THE_END = "the end of the run"
"""The phase of a rank that has left."""


def where(beat: Mapping[str, Any]) -> str:
    """Return where a rank was at a heartbeat."""
    return RankReport(iteration=beat["iteration"], phase=beat["phase"]).whereabouts


def silence_text(beat: Mapping[str, Any], end: str | None, *, stopped: bool) -> str:
    """Return the last known state of a rank that does not answer, in words.

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
    return f"{how} (process {name.pid} on {name.host}), last heard of {where(beat)}"


def last_words(step: int, cause: str, folder: str | None, *, timeout: float, recorded: bool) -> str:
    """Return the line that ends a run which hangs.

    Args:
        step: the step, from 1; 0 before the first.
        cause: whole sentences.
        folder: where stacks were written, if they were.
        timeout: seconds that a rank may wait.
        recorded: whether the folder also has dumps of NCCL's flight recorders.
    """
    where = f"at iteration {step}" if step else "before the first step"
    stacks = f"Stacks of the ranks that live: {folder}. " if folder else ""
    if folder and recorded:
        stacks += f"What they exchanged: torchfrtrace {folder}. "
    resume = " --load resumes from the last checkpoint." if step else ""
    return (
        f"hang {where}: {cause} {stacks}If it is not stuck but slow, raise --distributed-timeout-minutes (now "
        f"{timeout / 60.0:g}); else look at that rank's output and machine, and start again.{resume}"
    )
