"""Says in words what torch's flight recorders saw of a hang: who did not come, and who calls what the others do not.

    python tools/doctor.py --flight-recorder checkpoints/run/hang-40

Every process group of NCCL writes its last operations into a ring in memory; gloo's do so too, without messages and
without the groups' ranks. At a hang the watch writes
that of each rank into `hang-<step>` in --save; torch itself writes it to TORCH_FR_DUMP_TEMP_FILE when a collective
times out. The files end in their rank's number. They are pickles, and are read as data, by a reader that calls nothing.
"""

import functools
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parallel.operations import group_title
from megatron_ext.resilience.hang_diagnosis import NOBODY, RankReport, hang_text, numbers_text
from megatron_ext.untrusted.inert_pickle import read
from megatron_ext.untrusted.untrusted_folder import read_inside

_NAME = re.compile(r"\w*_rank_(\d{1,6})")
_LARGEST = 256 << 20  # bytes of one dump: 2,000 operations take 2 MB, with their stacks 20
_MOST_MEMBERS = 1 << 20
_NOBODY_SEEN = "the ranks below wait for one that left no dump, or they cannot exchange data."
_NO_DUMP = "has left no dump (it was stopped or had ended, or its file is elsewhere)"
# Collectives whose messages are equally large on all ranks of the group.
_EVEN = frozenset({"all_reduce", "allreduce", "broadcast", "broadcast_oop", "all_gather_base", "reduce_scatter_base"})


@dataclass(frozen=True)
class Operation:
    """Describes one operation of a group, as one rank recorded it."""

    group: str
    """The group's name and ranks, equal on all of its ranks."""

    name: str
    """Such as all_reduce, without the backend's."""

    number: int
    """Counts the group's collectives from 1; 0 for a message between two ranks."""

    content: str
    """Types and shapes of the input."""

    has_ended: bool


@dataclass(frozen=True)
class Group:
    """Holds a group's name for people and its ranks."""

    title: str
    members: tuple[int, ...]
    """Empty where nobody recorded them."""


@dataclass(frozen=True)
class Dump:
    """Holds what one rank recorded, in order."""

    operations: Sequence[Operation]
    groups: Mapping[str, Group]


class _RecordedRank(RankReport):
    """A rank's place, of which the recorder knows operations alone."""

    @property
    def whereabouts(self) -> str:
        return self.phase


def read_dumps(folder: Path) -> dict[int, Dump]:
    """Return what each rank recorded.

    Raises:
        ConfigurationError: the folder is not there, or holds no dump.
        DataError: a file is no dump, is damaged, or is larger than 256 MB.
        OSError: the folder or a file cannot be read.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"--flight-recorder {folder}: no such folder; give a hang-<step> of --save")
    dumps: dict[int, Dump] = {}
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        rank = int(match[1])
        if rank in dumps:
            raise DataError(f"{folder} holds several dumps of rank {rank}; give a folder with one a rank")
        try:
            dumps[rank] = _dump(read(read_inside(folder, name, _LARGEST), allowed=()))
        except (pickle.UnpicklingError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{folder / name} is no flight recorder's dump, or damaged: {_short(error)}") from None
    if not dumps:
        raise ConfigurationError(
            f"--flight-recorder {folder} holds no dump (a file for each rank, such as nccl_trace_rank_0); give a "
            "hang-<step> of --save, or the folder of TORCH_FR_DUMP_TEMP_FILE"
        )
    return dumps


def explain(dumps: Mapping[int, Dump]) -> list[str]:
    """Return what the dumps say, one sentence or two each: the cause first, then each rank's last operation."""
    mismatches = _mismatches(dumps)
    reports = {rank: _report(dump, dumps) for rank, dump in dumps.items()}
    waiting = [report for report in reports.values() if report.waits_for_ranks]
    expected = {member for report in waiting for member in report.members}
    silent = dict.fromkeys(expected - set(dumps), _NO_DUMP)
    if not waiting:
        cause = f"no operation is under way: {numbers_text(list(dumps))} had ended all that they had begun."
    elif mismatches:
        cause = ""
    else:
        cause = hang_text(reports, silent)
        if any(not dumps[rank].groups[report.group].members for rank, report in reports.items() if report.operation):
            cause = cause.replace(NOBODY, _NOBODY_SEEN)
    return [*mismatches, *([cause] if cause else []), *(_last_text(rank, dumps[rank]) for rank in sorted(dumps))]


def _dump(content: Any) -> Dump:
    version = _text(content["version"])
    if version.partition(".")[0] != "2":
        raise ValueError(f"its version is {version}, and 2 is known")
    ranks = {name: _members(config["ranks"]) for name, config in _checked(content["pg_config"], dict).items()}
    operations, groups = [], {}
    for entry in _checked(content.get("entries", []), list):
        name, purpose = _checked(entry["process_group"], tuple)
        members = ranks.get(_text(name), ())
        key = f"{name} {members}"
        groups[key] = Group(group_title(name, _text(purpose)), members)
        operations.append(_operation(entry, key, members))
    return Dump(operations, groups)


def _operation(entry: Any, group: str, members: tuple[int, ...]) -> Operation:
    is_message = _checked(entry["is_p2p"], bool)
    backend, _, name = _text(entry["profiling_name"]).rpartition(":")
    is_gloo = backend == "gloo"  # which notes no state; NCCL's retires operations that timed out, too
    if is_message:  # "send 0->1" counts within the group
        name = re.sub(r"\d+", lambda match: _member(members, int(match[0])), name)
    return Operation(
        group=group,
        name=name,
        number=0 if is_message else _checked(entry["collective_seq_id"], int),
        content=_content(entry["input_dtypes"], entry["input_sizes"]),
        has_ended=_text(entry["state"]) == "completed" or (is_gloo and _checked(entry["retired"], bool)),
    )


def _content(dtypes: Any, sizes: Any) -> str:
    pieces = [
        f"{_text(dtype)} {[_checked(size, int) for size in _checked(shape, list)]}"
        for dtype, shape in zip(_checked(dtypes, list), _checked(sizes, list), strict=True)
    ]
    more = f" and {len(pieces) - 3} more" if len(pieces) > 3 else ""
    return ", ".join(pieces[:3]) + more


def _members(text: Any) -> tuple[int, ...]:
    """Return the ranks of a text such as "[0, 1]"."""
    numbers = _text(text).strip("[]").split(",")
    if len(numbers) > _MOST_MEMBERS:
        raise ValueError(f"a group of {len(numbers)} ranks")
    return tuple(int(number) for number in numbers if number.strip())


def _member(members: tuple[int, ...], index: int) -> str:
    return str(members[index]) if index < len(members) else f"{index} of the group"


def _report(dump: Dump, dumps: Mapping[int, Dump]) -> RankReport:
    """Return in which operation a rank waits: the oldest that has not ended, since the device takes them in order."""
    counts: dict[str, int] = {}
    for operation in dump.operations:
        counts[operation.group] = max(counts.get(operation.group, 0), operation.number)
    waits = next((operation for operation in dump.operations if not operation.has_ended), None)
    if waits is None:
        return _RecordedRank(iteration=None, phase=f"in no operation; {_last(dump)}", counts=counts)
    group = dump.groups[waits.group]
    return _RecordedRank(
        iteration=None,
        phase=f"in {_operation_text(waits)}",
        operation=waits.name,
        group=waits.group,
        group_title=group.title,
        members=group.members or tuple(sorted(rank for rank, other in dumps.items() if waits.group in other.groups)),
        seconds=None,
        counts={**counts, waits.group: waits.number or counts[waits.group]},
    )


def _mismatches(dumps: Mapping[int, Dump]) -> list[str]:
    """Return the first collective of each group that its ranks do not call alike."""
    calls: dict[tuple[str, int], dict[int, Operation]] = {}
    titles: dict[str, str] = {}
    for rank, dump in dumps.items():
        titles |= {key: group.title for key, group in dump.groups.items()}
        for operation in dump.operations:
            if operation.number:
                calls.setdefault((operation.group, operation.number), {})[rank] = operation
    lines: dict[str, str] = {}
    for (group, number), of_ranks in sorted(calls.items(), key=lambda item: item[0][1]):
        kinds: dict[str, list[int]] = {}
        for rank, operation in of_ranks.items():
            kinds.setdefault(_call(operation), []).append(rank)
        if len(kinds) > 1 and group not in lines:
            texts = [f"{numbers_text(ranks)} call{'s'[: len(ranks) == 1]} {kind}" for kind, ranks in kinds.items()]
            lines[group] = f"collective {number} of {titles[group]} is not the same on all ranks: {'; '.join(texts)}."
    return list(lines.values())


def _call(operation: Operation) -> str:
    return f"{operation.name} of {operation.content}" if operation.name.lstrip("_") in _EVEN else operation.name


def _last_text(rank: int, dump: Dump) -> str:
    waits = next((operation for operation in dump.operations if not operation.has_ended), None)
    state = "" if waits is None else f"waits in {_operation_text(waits)} of {dump.groups[waits.group].title}; "
    return f"rank {rank}: {state}{_last(dump)}"


def _last(dump: Dump) -> str:
    ended = next((operation for operation in reversed(dump.operations) if operation.has_ended), None)
    if ended is None:
        return "it has ended none"
    return f"the last that it has ended is {_operation_text(ended)} of {dump.groups[ended.group].title}"


def _operation_text(operation: Operation) -> str:
    number = f" {operation.number}" if operation.number else ""
    return f"{operation.name}{number}" + (f" ({operation.content})" if operation.content else "")


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


_text = functools.partial(_checked, kind=str)


def _short(error: BaseException) -> str:
    return ascii(str(error) or type(error).__name__)[1:-1][:200]
