"""What is found of the links between ranks. tests/distributed/test_doctor_on_ranks.py has the ranks."""

import socket

import pytest

from megatron_ext.doctor.collectives import _report, check_collectives


@pytest.mark.parametrize(
    ("hosts", "links", "level", "text"),
    [
        (
            ["a", "a", "a"],
            [1.0, 2.0, 3.0],
            "ok",
            "2.00 GB/s a link in the middle, slowest 1.00 from rank 2 (a) to rank 0 (a)",
        ),
        (
            ["a", "a", "a"],
            [2.0, 3.0, 0.9],
            "warning",
            "2.00 GB/s a link in the middle, slowest 0.90 from rank 1 (a) to rank 2 (a)",
        ),
        (
            ["a", "b", "b"],
            [2.0, 0.1, 3.0],
            "ok",
            "2.00 GB/s a link in the middle, slowest 0.10 from rank 0 (a) to rank 1 (b)",
        ),
    ],
)
def test_a_link_of_half_the_speed_is_named_within_a_machine(
    hosts: list[str], links: list[float], level: str, text: str
) -> None:
    came, ring = _report(hosts, "gloo", links)
    assert came.what.startswith("3 ranks over gloo (")
    assert ("1 on a, 2 on b" in came.what) == ("b" in hosts)
    assert (ring.level, ring.what) == (level, f"ring: {text}")


def test_one_rank_alone_is_well_and_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert check_collectives("cpu", 20.0, 0.0) == []
