"""What torch's flight recorders saw of a hang, in words; a dump is a pickle that a stranger may have written."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.doctor.flight_recorder import explain, read_dumps

ROOT = Path(__file__).resolve().parents[3]
GROUPS = {"0": ("default_pg", [0, 1, 2]), "1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1])}


def operation(
    group: str, number: int, name: str, state: str = "completed", size: int = 8, **more: Any
) -> dict[str, Any]:
    """One entry, as torch writes it."""
    return {
        "process_group": (group, GROUPS[group][0]),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[size, 4]],
        "input_dtypes": ["Float"],
        "state": state,
        "is_p2p": False,
        "time_created_ns": 1_800_000_000_000_000_000,
        **more,
    }


def write(folder: Path, ranks: dict[int, list[dict[str, Any]]]) -> Path:
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in GROUPS.items()}
    for rank, entries in ranks.items():
        content = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    (folder / "rank-0.txt").write_text("stacks")
    return folder


def said(folder: Path, ranks: dict[int, list[dict[str, Any]]]) -> list[str]:
    return explain(read_dumps(write(folder, ranks)))


WAITS = [operation("0", 1, "all_reduce"), operation("0", 2, "all_reduce", "started")]


def test_a_rank_that_left_a_collective_out(tmp_path: Path) -> None:
    skipped = [operation("0", 1, "all_reduce"), operation("1", 1, "_all_gather_base", "scheduled")]
    cause, *last = said(tmp_path, {0: WAITS, 1: skipped, 2: WAITS})
    assert cause == (
        "rank 1 did not come to collective 2 of the group of all ranks: it has begun 1, and waits in _all_gather_base "
        "of the group tensor-model-parallel, in _all_gather_base 1 (Float [8, 4]). Ranks 0, 2 wait in all_reduce of "
        "the group of all ranks (ranks 0-2)."
    )
    assert last[0] == (
        "rank 0: waits in all_reduce 2 (Float [8, 4]) of the group of all ranks; the last that it has ended is "
        "all_reduce 1 (Float [8, 4]) of the group of all ranks"
    )
    assert len(last) == 3


def test_a_rank_that_does_something_else(tmp_path: Path) -> None:
    cause = said(tmp_path, {0: WAITS, 1: WAITS[:1], 2: WAITS})[0]
    assert cause.startswith(
        "rank 1 did not come: it is in no operation; the last that it has ended is all_reduce 1 (Float [8, 4]) of the "
    )


def test_a_rank_that_left_no_dump(tmp_path: Path) -> None:
    cause = said(tmp_path, {0: WAITS, 2: WAITS})[0]
    assert cause.startswith("rank 1 did not come: it has left no dump (it was stopped or had ended, ")
    assert cause.endswith("Ranks 0, 2 wait in all_reduce of the group of all ranks (ranks 0-2).")


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (operation("0", 2, "all_reduce", "started", size=9), "rank 1 calls all_reduce of Float [9, 4]"),
        (operation("0", 2, "broadcast", "started"), "rank 1 calls broadcast of Float [8, 4]"),
    ],
)
def test_ranks_that_call_other_things(tmp_path: Path, other: dict[str, Any], text: str) -> None:
    cause = said(tmp_path, {0: WAITS, 1: [WAITS[0], other], 2: WAITS})[0]
    assert cause == (
        "collective 2 of the group of all ranks is not the same on all ranks: ranks 0, 2 call all_reduce of Float "
        f"[8, 4]; {text}."
    )


def test_all_are_there(tmp_path: Path) -> None:
    cause = said(tmp_path, dict.fromkeys(range(3), WAITS))[0]
    assert cause.startswith("all ranks are there and none is behind, but they cannot exchange data. Ranks 0-2 wait in")


def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    receives = operation("1", 0, "recv 0<-1", "started", is_p2p=True, p2p_seq_id=3)
    cause, first, *_ = said(tmp_path, {0: [WAITS[0], receives], 1: WAITS[:1], 2: WAITS[:1]})
    assert cause.startswith("rank 1 did not come: it is in no operation; ")
    assert "Rank 0 waits in recv 0<-1 of the group tensor-model-parallel (ranks 0-1)." in cause
    assert first.startswith("rank 0: waits in recv 0<-1 (Float [8, 4]) of the group tensor-model-parallel; ")


def test_a_rank_waits_in_the_oldest_of_what_is_under_way(tmp_path: Path) -> None:
    """The device takes them in order: those of another group that were handed over after it do not run."""
    many = [*WAITS, operation("1", 1, "_all_gather_base", "scheduled"), operation("0", 3, "broadcast", "scheduled")]
    cause, *last = said(tmp_path, {0: many, 1: WAITS[:1], 2: WAITS})
    assert cause == (
        "rank 1 did not come: it is in no operation; the last that it has ended is all_reduce 1 (Float [8, 4]) of the "
        "group of all ranks. Ranks 0, 2 wait in all_reduce of the group of all ranks (ranks 0-2)."
    )
    assert last[0] == (
        "rank 0: waits in all_reduce 2 (Float [8, 4]) of the group of all ranks; the last that it has ended is "
        "all_reduce 1 (Float [8, 4]) of the group of all ranks"
    )


def test_what_is_handed_over_behind_a_collective_is_not_begun(tmp_path: Path) -> None:
    """The device of rank 0 has another one to do behind that in which it waits, and is behind the others."""
    done = [operation("0", 1, "all_reduce"), operation("0", 2, "all_reduce")]
    others = {rank: [*done, operation("0", 3, "all_reduce", "started")] for rank in (1, 2)}
    for behind in ([], [operation("0", 3, "all_reduce", "scheduled")]):
        cause = said(tmp_path, {0: [*WAITS, *behind], **others})[0]
        assert cause.startswith(
            "rank 0 did not come to collective 3 of the group of all ranks: it has begun 2, and waits"
        )


def test_a_message_after_a_collective_leaves_its_count_as_it_is(tmp_path: Path) -> None:
    """Messages are not counted: rank 1 has begun what the others wait in, and then sent a message."""
    sent = operation("0", 0, "send 1->2", is_p2p=True, p2p_seq_id=1)
    cause = said(tmp_path, {0: WAITS, 1: [*WAITS[:1], operation("0", 2, "all_reduce"), sent], 2: WAITS})[0]
    assert cause.startswith("rank 1 did not come: it is in no operation; the last that it has ended is send 1->2")
    behind = said(tmp_path, {0: WAITS, 1: [*WAITS, sent], 2: [WAITS[0], operation("1", 1, "barrier", "started")]})[0]
    assert behind.startswith("rank 2 did not come to collective 2 of the group of all ranks: it has begun 1, and")
    assert "rank 1" not in behind.partition(".")[0]


def test_who_waits_for_a_message_keeps_the_count_of_its_group(tmp_path: Path) -> None:
    before = operation("1", 1, "all_reduce")
    receives = operation("1", 0, "recv 0<-1", "started", is_p2p=True, p2p_seq_id=1)
    cause = said(tmp_path, {0: [before, receives], 1: [before, operation("1", 2, "all_reduce", "started")]})[0]
    assert "rank 0 did not come to collective 2 of the group tensor-model-parallel: it has begun 1, and waits" in cause


def test_the_last_that_has_ended_is_named(tmp_path: Path) -> None:
    done = [operation("0", 1, "all_reduce"), operation("1", 1, "broadcast"), operation("0", 2, "barrier")]
    last = said(tmp_path, {0: done, 1: [*done, operation("0", 3, "all_reduce", "started")]})[1:]
    assert last == [
        "rank 0: the last that it has ended is barrier 2 (Float [8, 4]) of the group of all ranks",
        "rank 1: waits in all_reduce 3 (Float [8, 4]) of the group of all ranks; the last that it has ended is barrier "
        "2 (Float [8, 4]) of the group of all ranks",
    ]


def test_what_nccl_gave_up_has_not_ended(tmp_path: Path) -> None:
    """It retires operations that timed out, too; gloo notes nothing else."""
    given_up = [WAITS[0], operation("0", 2, "all_reduce", "started", retired=True)]
    assert said(tmp_path, {0: given_up})[1].startswith("rank 0: waits in all_reduce 2 ")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, ""),
        (1, "(Float [1])"),
        (3, "(Float [1], Float [2], Float [3])"),
        (5, "(Float [1], Float [2], Float [3] and 2 more)"),
    ],
)
def test_the_first_three_inputs_are_shown(number: int, text: str, tmp_path: Path) -> None:
    sizes = [[place] for place in range(1, number + 1)]
    many = operation("0", 1, "alltoall", "started", input_sizes=sizes, input_dtypes=["Float"] * number)
    assert said(tmp_path, {0: [many]})[1] == (
        f"rank 0: waits in alltoall 1 {text}".rstrip() + " of the group of all ranks; it has ended none"
    )


@pytest.mark.parametrize(
    ("name", "is_even"),
    [
        ("all_reduce", True),
        ("allreduce", True),
        ("broadcast", True),
        ("_broadcast_oop", True),
        ("_all_gather_base", True),
        ("_reduce_scatter_base", True),
        ("all_gather", False),
        ("all_to_all", False),
        ("gather", False),
    ],
)
def test_sizes_differ_between_ranks_only_where_they_may(name: str, is_even: bool, tmp_path: Path) -> None:
    ranks = {rank: [operation("0", 1, name, "started", size=8 + rank)] for rank in range(2)}
    found = said(tmp_path, ranks)[0]
    assert found.startswith("collective 1 of the group of all ranks is not the same on all ranks: ") == is_even
    if is_even:
        assert found.endswith(f"rank 0 calls {name} of Float [8, 4]; rank 1 calls {name} of Float [9, 4].")


def test_the_first_mismatch_of_each_group_is_told_the_earliest_first(tmp_path: Path) -> None:
    def calls(kind: str) -> list[dict[str, Any]]:
        same = operation("0", 1, "barrier")
        return [same, *(operation("0", number, kind) for number in (2, 3)), operation("1", 1, kind, "started")]

    first, second, *last = said(
        tmp_path, {0: calls("all_reduce"), 1: calls("broadcast"), 2: [operation("0", 1, "barrier")]}
    )
    assert first.startswith(
        "collective 1 of the group tensor-model-parallel is not the same on all ranks: rank 0 calls"
    )
    assert second.startswith(
        "collective 2 of the group of all ranks is not the same on all ranks: rank 0 calls all_red"
    )
    assert [line[:7] for line in last] == ["rank 0:", "rank 1:", "rank 2:"], "no cause is guessed next to it"


def test_messages_are_named_by_the_ranks_of_the_launch_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count within their group; a place that it does not have is left as it is."""
    monkeypatch.setitem(GROUPS, "1", ("PIPELINE_MODEL_PARALLEL_GROUP", [4, 6]))
    names = {4: "send 0->1", 6: "recv 1<-0", 7: "recv 1<-2"}
    ranks = {rank: [operation("1", 0, name, "started", is_p2p=True)] for rank, name in names.items()}
    cause, *last = said(tmp_path, ranks)
    assert cause.startswith("all ranks are there and none is behind")
    assert [line.partition(" (Float")[0] for line in last] == [
        "rank 4: waits in send 4->6",
        "rank 6: waits in recv 6<-4",
        "rank 7: waits in recv 6<-2 of the group",
    ]


def of_gloo(folder: Path, ranks: dict[int, list[tuple[str, int, bool]]]) -> list[str]:
    """As gloo writes it: every state is "scheduled", what has ended is retired, no group's ranks are known."""
    for rank, entries in ranks.items():
        operations = [
            operation(group, number, "", "scheduled", retired=ended, profiling_name="gloo:all_reduce")
            for group, number, ended in entries
        ]
        config = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2]"}}
        content = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": operations}
        (folder / f"gloo_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return explain(read_dumps(folder))


def test_gloo_records_less(tmp_path: Path) -> None:
    waits, skipped = [("0", 1, True), ("0", 2, False)], [("0", 1, True), ("1", 1, False)]
    cause = of_gloo(tmp_path, {0: waits, 1: skipped, 2: waits})[0]
    assert cause.startswith(
        "rank 1 did not come to collective 2 of the group of all ranks: it has begun 1, and waits in"
    )
    (tmp_path / "gloo_trace_rank_1").unlink()
    assert of_gloo(tmp_path, {0: waits, 2: waits})[0] == (
        "the ranks below wait for one that left no dump, or they cannot exchange data. Ranks 0, 2 wait in all_reduce "
        "of the group of all ranks (ranks 0, 2)."
    )


def test_nothing_is_under_way(tmp_path: Path) -> None:
    cause = said(tmp_path, {0: WAITS[:1], 1: WAITS[:1], 2: []})[0]
    assert cause == "no operation is under way: ranks 0-2 had ended all that they had begun."


class _Plants:
    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


def test_a_hostile_dump_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "nccl_trace_rank_1"
    good = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [operation("0", 1, "x")]}, protocol=2)
    deep = b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."
    for content in (
        pickle.dumps(_Plants(), protocol=2),
        pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [_Plants()]}, protocol=2),
        b"",
        b"no pickle",
        good[: len(good) // 2],
        good.replace(b"2.10", b"7.10"),
        pickle.dumps([], protocol=2),
        pickle.dumps({"version": 2, "pg_config": {}}, protocol=2),
        pickle.dumps({"version": "2.1", "pg_config": {"0": {"ranks": "[" + "1," * 10 + "x]"}}}, protocol=2),
        pickle.dumps(
            {"version": "2.1", "pg_config": {}, "entries": [operation("0", 1, "x") | {"state": 1}]}, protocol=2
        ),
        deep,
    ):
        bad.write_bytes(content)
        with pytest.raises(DataError, match="nccl_trace_rank_1 is no flight recorder's dump, or damaged: "):
            read_dumps(tmp_path)
    assert not (tmp_path / "planted").exists()
    bad.unlink()
    os.mkfifo(bad)
    with pytest.raises(DataError, match="is no file but a pipe"):
        read_dumps(tmp_path)


def test_the_tool(tmp_path: Path) -> None:
    write(tmp_path, {0: WAITS, 2: WAITS})
    command = [sys.executable, "tools/doctor.py", "--flight-recorder"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (0, explain(read_dumps(tmp_path)))
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "none"):
        with pytest.raises(ConfigurationError, match=r"--flight-recorder \S+.*; give a "):
            read_dumps(folder)
    (empty / "nccl_trace_rank_0").write_bytes(b"?")
    done = subprocess.run([*command, str(empty)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (65, False)
