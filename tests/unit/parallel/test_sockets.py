"""Rows of weights, watched methods of process groups, and the store that ranks meet at, each by itself."""

import socket
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.parallel import groups, own_groups, rendezvous, sockets
from megatron_ext.parallel.operations import WrappedMethods, group_title
from megatron_ext.parallel.rows import RowShard, local_part, mark, row_shard
from tests.support.of_one_module import replace_in


def test_a_whole_is_put_together_from_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 1 and 2 of five, where other ranks have sevens; of another tensor that is cut alike, its own type."""

    def sum_of_ranks(whole: torch.Tensor, group: Any) -> None:
        assert group == "group"
        assert whole[0].tolist() == [0.0, 0.0]
        assert not whole.requires_grad
        whole[[0, 3, 4]] += 7

    monkeypatch.setattr(torch.distributed, "all_reduce", sum_of_ranks)
    group: Any = "group"
    shard = RowShard(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True), 1, (5, 2), group)
    assert shard.stop == 3
    assert shard.gather().tolist() == [[7.0, 7.0], [1.0, 2.0], [3.0, 4.0], [7.0, 7.0], [7.0, 7.0]]
    other = shard.gather(torch.tensor([[5, 6], [7, 8]]))
    assert other.dtype == torch.int64
    assert other.tolist() == [[7, 7], [5, 6], [7, 8], [7, 7], [7, 7]]


def test_a_whole_that_one_rank_holds_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", None)
    local = torch.ones(2, 2)
    whole = RowShard(local, 0, (2, 2), None).gather()
    whole.zero_()
    assert local.tolist() == [[1.0, 1.0]] * 2


def test_a_part_is_the_rows_or_all_of_a_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 2))
    assert row_shard(weight) is None
    assert local_part(weight).shape == (4, 2)
    assert not local_part(weight).requires_grad
    shard = RowShard(torch.zeros(1, 2), 3, (4, 2), None)
    mark(weight, shard)
    assert row_shard(weight) is shard
    assert local_part(weight) is shard.local


class _Backend:
    def send(self) -> str:
        return "sent"

    def recv(self) -> str:
        return "received"


class _Gloo(_Backend):
    def send(self) -> str:
        return "sent by gloo"


def test_methods_are_wrapped_and_put_back() -> None:
    """The last first, so that one that is wrapped twice is as it was; what was inherited is so again."""
    wrapped = WrappedMethods()

    def told(by: str) -> Any:
        return lambda method: lambda self: f"{by}: {method(self)}"

    wrapped.wrap(_Gloo, "send", told("first"))
    wrapped.wrap(_Gloo, "send", told("second"))
    wrapped.wrap(_Gloo, "recv", told("first"))
    wrapped.wrap(_Gloo, "no_such_method", told("first"))
    assert _Gloo().send() == "second: first: sent by gloo"
    assert _Gloo().recv() == "first: received"
    assert _Backend().recv() == "received"
    assert not hasattr(_Gloo, "no_such_method")
    wrapped.put_back()
    assert (_Gloo().send(), _Gloo().recv()) == ("sent by gloo", "received")
    assert "recv" not in vars(_Gloo)
    wrapped.put_back()
    assert _Gloo().send() == "sent by gloo"


@pytest.mark.parametrize(
    ("purpose", "title"),
    [
        ("default_pg", "the group of all ranks"),
        ("", "the group 17"),
        ("undefined", "the group 17"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "the group tensor-model-parallel"),
        ("EXPERT_DATA", "the group expert-data"),
    ],
)
def test_groups_have_names_for_people(purpose: str, title: str) -> None:
    assert group_title("17", purpose) == title


def test_experts_have_tensor_parallel_ranks_of_their_own() -> None:
    of: Any = SimpleNamespace(tp="tp", expt_tp="expt_tp")
    assert groups.tensor_group(of, expert=True) == "expt_tp"
    assert groups.tensor_group(of, expert=False) == "tp"


@pytest.mark.parametrize(
    ("bound", "plain", "waits", "backend", "left_out"),
    [
        (None, True, None, "gloo", True),
        (None, True, "0", "nccl", True),
        (torch.device("cpu"), True, None, "nccl", False),
        (None, False, None, "gloo", False),
        (None, True, "1", "gloo", False),
        (None, True, None, "mpi", False),
    ],
)
def test_when_groups_of_others_may_be_left_out(
    bound: Any, plain: bool, waits: str | None, backend: str, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Group:
        bound_device_id = bound

    class _Other(_Group):
        """A group of another kind, which may do more when it is made."""

    everyone = _Group() if plain else _Other()
    monkeypatch.setattr(own_groups.c10d, "_get_default_group", lambda: everyone)
    monkeypatch.setattr(torch.distributed, "ProcessGroup", _Group)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.delenv("TORCH_DIST_INIT_BARRIER", raising=False)
    if waits is not None:
        monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", waits)
    assert own_groups._others_may_be_left_out() == left_out


def test_groups_of_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names a group by the number of those before it."""
    counted: list[Any] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(own_groups.c10d, "_process_group_name", lambda ranks, use_hashed_name: counted.append(ranks))
    create = own_groups._if_member(lambda ranks, **options: ("made", ranks, options))
    assert create([1, 2], timeout=5) == ("made", [1, 2], {"timeout": 5})
    assert counted == []
    assert create([1, 3], timeout=5) == own_groups.c10d.GroupMember.NON_GROUP_MEMBER
    assert counted == [[1, 3]]


def test_the_engine_has_its_functions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them has failed."""
    core = own_groups.parallel_state
    create, generate = core.create_group, core.generate_masked_orthogonal_rank_groups
    monkeypatch.setattr(own_groups, "_if_member", lambda create: "ours")
    for left_out in (True, False):
        monkeypatch.setattr(own_groups, "_others_may_be_left_out", lambda left_out=left_out: left_out)
        with suppress(KeyError), own_groups.own_groups_only():
            assert core.generate_masked_orthogonal_rank_groups is own_groups.rank_groups
            assert core.create_group == ("ours" if left_out else create)
            raise KeyError
        assert (core.create_group, core.generate_masked_orthogonal_rank_groups) == (create, generate)


def test_the_launchers_store_is_shared_by_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has keys of its own there."""
    store = HashStore()
    monkeypatch.setattr(rendezvous, "open_store", lambda timeout: (store, 0, 1))
    found, rank, size = rendezvous.meet(timedelta(seconds=5))
    found.set("key", "value")
    assert (rank, size, store.check(["key"]), found.check(["key"])) == (0, 1, False, True)
    [token] = [store.get("meeting/token").decode()]
    assert store.get(f"attempt/{token}/key") == b"value"


def test_pauses_grow_to_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    replace_in(monkeypatch, rendezvous, "time", sleep=slept.append)
    pause = 0.01
    for _ in range(12):
        pause = rendezvous._wait(pause)
    assert slept[:3] == pytest.approx([0.01, 0.015, 0.0225])
    assert slept[-1] == pause == 0.25


def test_ranks_of_one_machine_meet_on_its_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one listens, at the port that the launcher names; the other calls there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(sockets, "TCPStore", lambda *given, **named: made.append((given, named)))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": str(port)}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    limit = timedelta(seconds=9)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert sockets.open_store(limit)[1:] == (rank, 2)
    (first, named), (second, also) = made
    assert first == second == ("127.0.0.1", port, 2)
    descriptor = named.pop("master_listen_fd")
    with socket.socket(fileno=descriptor) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
    assert named == {"is_master": True, "timeout": limit, "wait_for_workers": False, "multi_tenant": True}
    assert also == {"is_master": False, "timeout": limit}


def _launched(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**here, "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


def test_a_port_that_another_program_uses_is_a_wrong_setting_and_its_silence_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _launched(monkeypatch, 0, port)
        with pytest.raises(ConfigurationError, match=rf"MASTER_PORT is {port}, which another program uses"):
            sockets.open_store(timedelta(seconds=5))
        _launched(monkeypatch, 1, port)
        monkeypatch.setattr(sockets, "_TO_REPORT", 0.0)
        with pytest.raises(PeerLostError, match=rf"no store at 127\.0\.0\.1:{port}, .*who listens there says nothing"):
            sockets.open_store(timedelta(seconds=0.2))


def test_variables_that_a_launcher_has_left_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, 1, 1)
    for name in ("MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError) as raised:
        sockets.open_store(timedelta(seconds=5))
    assert [problem.split()[0] for problem in raised.value.problems] == ["$WORLD_SIZE", "$MASTER_ADDR"]


def test_the_launchers_own_store_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchrun hosts it, its port is taken, also by rank 0."""
    _launched(monkeypatch, 0, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(sockets, "rendezvous", lambda place, timeout: iter([(place, 0, 2)]))
    assert sockets.open_store(timedelta(seconds=5)) == ("env://", 0, 2)


@pytest.mark.parametrize(
    ("environment", "here"),
    [
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "node1"}, False),
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "2"}, False),
        ({"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, False),
    ],
)
def test_which_ranks_are_on_one_machine(environment: dict[str, str], here: bool) -> None:
    assert sockets.is_one_machine(environment) == here
