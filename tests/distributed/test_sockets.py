"""Ranks of one machine listen on its loopback interface alone, whoever started them."""

import contextlib
import shlex
import socket
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from megatron_ext.parallel import rendezvous
from tests.support import launched

_FLAGS = shlex.split("""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 61
    --micro-batch-size 1 --train-iters 100000 --lr 1e-3 --eval-interval 0 --log-interval 1
""")


def _listening(process: psutil.Process) -> set[str]:
    return {found.laddr[0] for found in process.net_connections("inet") if found.status == psutil.CONN_LISTEN}


@pytest.mark.slow  # test_restarts.py looks at the sockets of its ranks
def test_ranks_under_torchrun_listen_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    run = launched.start(
        _FLAGS, tmp_path / "log", ["--nproc-per-node", "2", "--master-port", str(launched.free_port())]
    )
    try:
        deadline = time.monotonic() + 200
        while "iteration        2/" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            assert run.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        found = [_listening(rank) for rank in launched.rank_processes(run).values()]
    finally:
        launched.end_all(run)
    assert len(found) == 2
    assert set().union(*found) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "::1"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, False),
    ],
)
def test_one_machine(variables: dict[str, str], expected: bool) -> None:
    assert rendezvous.is_one_machine(variables) == expected
    rendezvous.keep_to_this_machine(variables)
    assert ("GLOO_SOCKET_IFNAME" in variables, "NCCL_SOCKET_IFNAME" in variables) == (expected, expected)
    assert rendezvous.is_one_machine(variables) == expected


def test_an_interface_that_was_named_stays() -> None:
    variables = {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "eth7"}
    rendezvous.keep_to_this_machine(variables)
    assert variables["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_store_of_rank_0_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without torchrun, or where torchrun does not lend its store."""
    port = launched.free_port()
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
