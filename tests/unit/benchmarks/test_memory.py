"""What verify/ counts: storages, bytes held by autograd, bytes sent, answers of ranks, the costs of a phase."""

import builtins
import multiprocessing
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import memory, traffic
from benchmarks import rehearsal_meter as meter
from benchmarks.memory import Bytes, bytes_per_rank
from benchmarks.rehearsed_world import Objects, played
from megatron_ext.verify import ranks
from megatron_ext.verify.ranks import RankError, _collect, _rank_main
from tests.support.saved_bytes import HeldForBackward, bytes_held_for_backward

# Storages.


def test_a_storage_counts_once_however_many_tensors_look_into_it() -> None:
    whole, seen = torch.zeros(100), set()
    assert memory._count([whole[:10], None, whole[50:], torch.zeros(3, dtype=torch.bfloat16)], seen) == 400 + 6
    assert memory._count([whole], seen) == 0
    assert memory._count([torch.zeros(5)], seen) == 20


def on_host(params: list[Any]) -> Any:
    return SimpleNamespace(param_groups=[{"params": params}], state={0: {"exp_avg": torch.zeros(3)}})


def part(params: list[Any], states: dict[str, Any], host: list[Any]) -> Any:
    own, moved = (
        SimpleNamespace(state={0: states}),
        [on_host(host)],
    )
    core = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": params}]))
    return SimpleNamespace(core=core, updater=SimpleNamespace(torch_optimizers=[own, *moved], host_optimizers=moved))


@pytest.mark.parametrize("lives_on_host", [False, True])
def test_each_kind_of_state_is_counted_where_it_is(lives_on_host: bool) -> None:
    weights = torch.zeros(10, dtype=torch.bfloat16)
    master, moved = torch.zeros(10), torch.zeros(3)
    master.grad, moved.grad = torch.zeros(10), torch.zeros(3)
    states = {"exp_avg": torch.zeros(10), "exp_avg_sq": torch.zeros(10), "step": 3, "view": master[:2]}
    sharding = SimpleNamespace(
        held_weights=lambda chunk: [weights, None],
        held_gradients=lambda chunk: [torch.zeros(7), master.grad],
        parts=lambda _optimizer: [part([master], states, [moved])],
        lives_on_host=lives_on_host,
    )
    run: Any = SimpleNamespace(chunks=["chunk"], sharding=sharding, optimizer=None)
    found = bytes_per_rank(run)
    if lives_on_host:
        assert found == Bytes(0, 0, 0, host=20 + 28 + 40 + 120 + 36)
    else:
        assert found == Bytes(weights=20, gradients=28 + 40, optimizer=40 + 80, host=12 + 12 + 12)
        assert found.total == 20 + 68 + 120, "what is in host memory does not count"


def test_what_a_graph_holds_counts_each_storage_but_the_known_ones() -> None:
    weight, inputs = torch.zeros(8, 8, requires_grad=True), torch.zeros(4, 8)

    def forward() -> torch.Tensor:
        hidden = inputs @ weight
        return (hidden * hidden).exp().sum()

    assert bytes_held_for_backward(forward, [weight, inputs]) == 128 + 128  # hidden, once, and the exponentials
    assert bytes_held_for_backward(forward, [weight]) == 128 + 128 + 128  # and the inputs, for the weight's gradient


def test_the_most_that_is_held_is_that_of_all_microbatches_in_flight() -> None:
    weight = torch.zeros(8, 8, requires_grad=True)

    def loss(rows: int) -> torch.Tensor:
        hidden = torch.zeros(rows, 8) @ weight
        return (
            (hidden * hidden).exp().sum()
        )  # the inputs, the hidden states (held twice, counted once), the exponentials

    each = 3 * 128
    with HeldForBackward([weight]) as held:
        losses = [loss(4) for _ in range(3)]
        assert held.now == held.most == 3 * each
        losses.pop().backward()
        assert (held.now, held.most) == (2 * each, 3 * each)
        losses.append(loss(2))
        assert (held.now, held.most) == (2 * each + each // 2, 3 * each)
        losses.clear()
        assert (held.now, held.most) == (0, 3 * each)


# Traffic.


def test_nested_tensors_are_counted_by_their_types() -> None:
    tensor = torch.zeros(3, 2, dtype=torch.float64)
    assert traffic._bytes(tensor) == 48
    assert traffic._bytes([[tensor, tensor[:1]], (torch.zeros(3, dtype=torch.int8),)]) == 48 + 16 + 3


@pytest.mark.parametrize(
    ("splits", "share"), [(None, 0.75), ([], 0.75), ([0, 0, 0, 0], 0.75), ([1, 2, 3, 4], 0.7), ([0, 0, 5, 0], 0.0)]
)
def test_rows_that_stay_on_their_rank_are_not_sent(
    splits: list[int] | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic.dist, "get_world_size", lambda _group: 4)
    monkeypatch.setattr(traffic.dist, "get_rank", lambda _group: 2)
    values = {} if splits is None else {"input_split_sizes": splits}
    assert traffic._share_for_others(values, None) == pytest.approx(share)  # pyright: ignore[reportArgumentType]


def counted(monkeypatch: pytest.MonkeyPatch, world: int, operator: str, **values: Any) -> dict[Any, Any]:
    monkeypatch.setattr(traffic.dist, "get_world_size", lambda _group: world)
    monkeypatch.setattr(traffic.dist, "get_rank", lambda _group: 0)
    monkeypatch.setattr(traffic, "_group", lambda _values: None)
    monkeypatch.setattr(traffic, "_members", lambda _group: (0, 1))
    counter = traffic.Traffic()
    counter._axes = {(0, 1): "dp"}
    names = [SimpleNamespace(name=name) for name in values]
    func = SimpleNamespace(_schema=SimpleNamespace(name=f"c10d::{operator}", arguments=names))
    for _ in range(2):
        counter._count(func, tuple(values.values()), {})
    return {key: (sent.calls, sent.bytes) for key, sent in counter.sent.items()} | {"total": counter.total}


TENSOR = torch.zeros(10)


@pytest.mark.parametrize(
    ("operator", "values", "kind", "each"),
    [
        ("allreduce_", {"tensors": [TENSOR]}, "all-reduce", 2 * 0.75 * 40),
        ("all_reduce_coalesced", {"inputs": [TENSOR, TENSOR]}, "all-reduce", 2 * 0.75 * 80),
        ("_allgather_base_", {"output_tensor": TENSOR, "input_tensor": TENSOR[:2]}, "all-gather", 0.75 * 40),
        ("allgather_", {"output_tensors": [[TENSOR]], "input_tensors": [TENSOR[:2]]}, "all-gather", 0.75 * 40),
        ("all_gather_into_tensor", {"input": TENSOR}, "all-gather", 3 * 40),
        ("all_gather_into_tensor_coalesced", {"inputs": [TENSOR, TENSOR]}, "all-gather", 3 * 80),
        ("_reduce_scatter_base_", {"output_tensor": TENSOR[:2], "input_tensor": TENSOR}, "reduce-scatter", 0.75 * 40),
        ("reduce_scatter_tensor", {"input": TENSOR}, "reduce-scatter", 0.75 * 40),
        ("broadcast_", {"tensors": [TENSOR]}, "broadcast", 0.75 * 40),
        ("reduce_", {"tensors": [TENSOR]}, "reduce", 0.75 * 40),
        (
            "alltoall_base_",
            {"output": TENSOR, "input": TENSOR, "input_split_sizes": [4, 2, 2, 2]},
            "all-to-all",
            0.6 * 40,
        ),
        ("send", {"tensors": [TENSOR]}, "send", 40),
    ],
)
def test_a_collective_sends_what_the_best_algorithm_does(
    operator: str, values: dict[str, Any], kind: str, each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(monkeypatch, 4, operator, **values)
    assert found == {(kind, "dp"): (2, pytest.approx(2 * each)), "total": pytest.approx(2 * each)}
    assert counted(monkeypatch, 1, operator, **values) == {"total": 0}
    assert counted(monkeypatch, 2, operator, **values)["total"] > 0


def test_a_receive_sends_nothing_and_an_unknown_collective_is_our_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    for silent in ("recv_", "barrier", "wait_tensor"):
        assert counted(monkeypatch, 4, silent, tensors=[TENSOR]) == {"total": 0}
    with pytest.raises(AssertionError, match="a collective that nobody counts"):
        counted(monkeypatch, 4, "gather_", tensors=[TENSOR])


def test_bytes_are_summed_over_the_axes_asked_for() -> None:
    counter = traffic.Traffic()
    counter.sent = {
        ("all-gather", "dp"): traffic.Sent(1, 10.0),
        ("all-gather", "tp"): traffic.Sent(2, 5.0),
        ("send", "pp"): traffic.Sent(1, 3.0),
    }
    assert counter.bytes("all-gather") == 15.0
    assert counter.bytes("all-gather", "tp") == 5.0
    assert counter.bytes("all-gather", "tp", "dp", "pp") == 15.0
    assert counter.bytes("send", "tp") == 0.0
    assert counter.total == 18.0


# Ranks.


def answers(*sent: Any, timeout: float = 5.0) -> list[Any]:
    """What the parent makes of the ranks' answers; None is a rank that died."""
    pipes = []
    for answer in sent:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        if answer is not None and answer != "silent":
            sender.send_bytes(pickle.dumps(answer))
        if answer != "silent":
            sender.close()
        pipes.append((receiver, sender))
    processes = [SimpleNamespace(join=lambda _seconds: None, exitcode=-9 - rank) for rank in range(len(sent))]
    return _collect([receiver for receiver, _ in pipes], processes, timeout)


def test_results_are_in_the_order_of_the_ranks() -> None:
    assert answers((True, "a"), (True, None), (True, 3)) == ["a", None, 3]


def test_each_rank_that_failed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankError) as raised:
        answers((True, 1), (False, "what it raised"), None)
    assert raised.value.tracebacks == [(1, "what it raised"), (2, "ended without a result, exit code -11")]
    assert str(raised.value).startswith("--- rank 1 ---\nwhat it raised\n--- rank 2 ---\n")
    waits: list[float | None] = []
    wait = ranks.wait

    def recorded(pipes: Any, timeout: float | None = None) -> Any:
        waits.append(timeout)
        return wait(pipes, 0.0)

    monkeypatch.setattr(ranks, "wait", recorded)
    with pytest.raises(RankError) as raised:
        answers((False, "first"), "silent", timeout=100.0)
    assert raised.value.tracebacks == [(0, "first")], "the others get a moment, and are not blamed"
    assert 99.0 < (waits[0] or 0) <= 100.0
    assert waits[1] == 2.0


def test_ranks_that_say_nothing_in_time_are_named() -> None:
    with pytest.raises(RankError) as raised:
        answers((True, 1), "silent", "silent", timeout=0.02)
    assert raised.value.tracebacks == [(1, "no result within 0 s"), (2, "no result within 0 s")]


class Sender:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_bytes(self, text: bytes) -> None:
        self.sent.append(pickle.loads(text))

    def close(self) -> None:
        self.sent.append("closed")


def test_a_rank_answers_with_its_result_or_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    good, bad = Sender(), Sender()
    settings = {"OMP_NUM_THREADS": "3", "RANK": "1"}
    _rank_main(good, settings, divmod, (7, 2))  # pyright: ignore[reportArgumentType]
    _rank_main(bad, settings, divmod, (7, 0))  # pyright: ignore[reportArgumentType]
    assert good.sent == [(True, (3, 1)), "closed"]
    assert bad.sent[0][0] is False
    assert bad.sent[0][1].rstrip().endswith("ZeroDivisionError: integer division or modulo by zero")
    assert os.environ == settings
    assert threads == [3, 3]


# A rank that is played.


def test_what_rank_0_tells_is_heard_in_its_order() -> None:
    zero, other = Objects(0), Objects(3, heard=[pickle.dumps(["first"]), pickle.dumps([2])])
    told = ["first"]
    zero.broadcast_object_list(told)
    zero.broadcast_object_list([2])
    assert [pickle.loads(text) for text in zero.told] == [["first"], [2]]
    for expected in (["first"], [2]):
        heard = [None]
        other.broadcast_object_list(heard)
        assert heard == expected
    assert other.told == []


def test_rank_0_gathers_what_each_rank_sent_at_that_time() -> None:
    sent = [[pickle.dumps(f"{rank}.{time}") for time in range(2)] for rank in (1, 2)]
    zero = Objects(0, gathered=sent)
    for time in range(2):
        everyones: list[Any] = [None] * 3
        zero.gather_object(f"0.{time}", everyones)
        assert everyones == [f"0.{time}", f"1.{time}", f"2.{time}"]
    other = Objects(1)
    other.gather_object("mine")
    assert [pickle.loads(text) for text in other.sent] == ["mine"]
    everyones = [None, None]
    other.all_gather_object(everyones, "own")
    assert everyones == ["own", "own"]


@pytest.mark.parametrize(("rank", "world", "local", "of"), [(13, 64, 5, 8), (3, 4, 3, 4), (8, 9, 0, 8)])
def test_a_played_rank_has_its_place_in_a_node_and_leaves_nothing_behind(
    rank: int, world: int, local: int, of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    gather = torch.distributed.gather_object
    with played(rank, world) as objects:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert [int(os.environ[name]) for name in names] == [rank, world, local, of]
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (rank, world)
        torch.distributed.gather_object("sent")
        assert [pickle.loads(text) for text in objects.sent] == ["sent"]
    assert os.environ["RANK"] == "77"
    assert "WORLD_SIZE" not in os.environ
    assert torch.distributed.gather_object is gather
    assert not torch.distributed.is_initialized()


def test_a_phase_counts_groups_files_and_calls_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    collected: list[float] = []
    monkeypatch.setattr(meter.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(meter.gc, "collect", lambda: collected.append(clock[0]))
    (tmp_path / "data.bin").write_bytes(b"x" * 5000)
    (tmp_path / "code.py").write_text("")
    measured = meter.Meter()
    with played(0, 4), measured.phase("one"):
        clock[0] += 2.5
        torch.distributed.new_group([0, 1])
        torch.distributed.new_group([2, 3])
        with builtins.open(tmp_path / "data.bin", "rb", buffering=0) as file:
            file.read(4096)
        with builtins.open(tmp_path / "code.py"):
            pass
    with measured.phase("two"):
        clock[0] += 1.0
    one, two = measured.phases
    assert (one.name, one.seconds, one.groups, one.new_group_calls, one.files) == ("one", 2.5, 1, 2, 1)
    assert one.bytes_read >= 4096
    assert (two.name, two.seconds, two.groups, two.new_group_calls, two.files) == ("two", 1.0, 0, 0, 0)
    assert collected == [0.0, 2.5], "before each phase, whose time it is not"
    assert torch.distributed.new_group.__name__ == "new_group"


def test_a_meter_that_does_not_measure_has_no_phases() -> None:
    silent = meter.Meter(measures=False)
    with silent.phase("one"):
        pass
    assert silent.phases == []


def test_files_of_code_and_of_the_system_are_no_files_of_the_program() -> None:
    for path in ("a/b.py", "b.pyc", "c.so", "/proc/self/stat", "/dev/null", "/sys/x"):
        assert meter._is_code(path), path
    for path in ("a/b.bin", "config.yaml", "data/proc", "py"):
        assert not meter._is_code(path), path
