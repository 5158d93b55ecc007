"""The ranks of an attempt agree on a token of their own, whatever an earlier attempt left in the launcher's store."""

import contextlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.parallel import rendezvous
from megatron_ext.parallel.rendezvous import agree
from tests.support.patched_in_one_module import replace_in

LONG = timedelta(seconds=60)


def arrive(pool: ThreadPoolExecutor, store: Store, ranks: Sequence[int], world_size: int) -> list[Future[str]]:
    return [pool.submit(agree, store, rank, world_size, LONG) for rank in ranks]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_of_an_attempt_agree_and_attempts_differ(world_size: int):
    store = HashStore()
    tokens = []
    with ThreadPoolExecutor(world_size) as pool:
        for _ in range(3):
            (token,) = {answer.result() for answer in arrive(pool, store, range(world_size), world_size)}
            tokens.append(token)
    assert len(set(tokens)) == 3


def test_ranks_that_come_before_rank_0_do_not_take_the_token_of_an_earlier_attempt():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        (old,) = {answer.result() for answer in arrive(pool, store, range(3), 3)}
        early = arrive(pool, store, [1, 2], 3)
        time.sleep(0.5)
        assert not any(answer.done() for answer in early), "rank 0 of this attempt is not there"
        new = agree(store, 0, 3, LONG)
        assert [answer.result() for answer in early] == [new, new]
    assert new != old


def test_an_attempt_that_broke_off_in_its_meeting_does_not_mislead_the_next():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(PeerLostError, match="ranks 1, 2 did not come to the start of the run"):
            agree(store, 0, 3, timedelta(seconds=0.1))
        with pytest.raises(PeerLostError, match="not all ranks came to the start"):
            agree(store, 1, 3, timedelta(seconds=0.1))
        assert len({answer.result() for answer in arrive(pool, store, range(3), 3)}) == 1


def test_who_waits_for_rank_0_in_vain_says_so():
    with pytest.raises(PeerLostError, match="rank 0 did not come to the start of the run"):
        agree(HashStore(), 1, 2, timedelta(seconds=0.1))


def test_one_rank_that_does_not_come_is_one():
    with pytest.raises(PeerLostError, match=r"^rank 1 did not come to the start of the run"):
        agree(HashStore(), 0, 2, timedelta(seconds=0.05))


def test_ranks_that_were_told_different_numbers_of_ranks_all_say_so():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(agree, store, rank, size, LONG) for rank, size in ((0, 2), (1, 4))]
        for answer in told:
            with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is 2 for rank 0, but 4 for rank 1"):
                answer.result()


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


def _launched(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**here, "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


def test_ranks_of_one_machine_meet_on_its_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one listens, at the port that the launcher names; the other calls there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *given, **named: made.append((given, named)))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": str(port)}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    limit = timedelta(seconds=9)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert rendezvous.open_store(limit)[1:] == (rank, 2)
    (first, named), (second, also) = made
    assert first == second == ("127.0.0.1", port, 2)
    descriptor = named.pop("master_listen_fd")
    with socket.socket(fileno=descriptor) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
    assert named == {"is_master": True, "timeout": limit, "wait_for_workers": False, "multi_tenant": True}
    assert also == {"is_master": False, "timeout": limit}


def test_a_port_that_another_program_uses_is_a_wrong_setting_and_its_silence_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _launched(monkeypatch, 0, port)
        with pytest.raises(ConfigurationError, match=rf"MASTER_PORT is {port}, which another program uses"):
            rendezvous.open_store(timedelta(seconds=5))
        _launched(monkeypatch, 1, port)
        monkeypatch.setattr(rendezvous, "_TO_REPORT", 0.0)
        with pytest.raises(PeerLostError, match=rf"no store at 127\.0\.0\.1:{port}, .*who listens there says nothing"):
            rendezvous.open_store(timedelta(seconds=0.2))


def test_variables_that_a_launcher_has_left_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, 1, 1)
    for name in ("MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError) as raised:
        rendezvous.open_store(timedelta(seconds=5))
    assert [problem.split()[0] for problem in raised.value.problems] == ["$WORLD_SIZE", "$MASTER_ADDR"]


def test_the_store_of_rank_0_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without torchrun, or where torchrun does not lend its store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname()}
    for name, value in {**here, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store, rank, size = rendezvous.open_store(timedelta(seconds=10))
    assert (rank, size) == (0, 2)
    ours = [found for found in psutil.Process().net_connections("inet") if found.laddr[1] == port]
    assert {found.laddr[0] for found in ours if found.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    monkeypatch.setenv("RANK", "1")
    other, rank, _ = rendezvous.open_store(timedelta(seconds=10))
    store.set("a", "b")
    assert (other.get("a"), rank) == (b"b", 1)
    with contextlib.suppress(OSError), socket.create_connection((socket.gethostname(), port), 1) as refused:
        assert refused.getpeername()[0].startswith("127."), "the store answers on another interface"
