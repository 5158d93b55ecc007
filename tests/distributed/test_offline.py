"""A training on two ranks, with checkpoints, an evaluation and an export, asks no machine but its own for anything."""

import sys
from pathlib import Path
from typing import Any

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.program import run_program, tiny

LLAMA = ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"]
_ASKED = {"socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"}
_HERE = ("127.", "::1", "localhost")


def _asked_for(flags: list[str], probe: bool) -> tuple[int, list[str]]:
    """Run the program, and return its code and the addresses, of other machines, that this rank has asked for."""
    elsewhere: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _ASKED:
            return
        address = arguments[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else arguments[-1]
        address = arguments[0] if event == "urllib.Request" else address
        if isinstance(address, tuple):
            address = address[0]
        if isinstance(address, str) and not address.startswith(("/", "\0", *_HERE)):
            elsewhere.append(f"{event} {address}")

    sys.addaudithook(hook)
    if probe:
        import socket

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.connect(("192.0.2.1", 9))  # an address of no machine; a datagram socket sends nothing
    return run_program(flags).code, elsewhere


def test_no_other_machine_is_asked(tmp_path: Path) -> None:
    flags = [*tiny("--train-iters 2 --eval-interval 1 --eval-iters 1 --log-interval 1"), *LLAMA]
    flags += ["--save", str(tmp_path / "save"), "--tensorboard-dir", str(tmp_path / "board")]
    flags += ["--export-hf-at-end", str(tmp_path / "hf")]
    assert run_ranks(2, _asked_for, flags, False) == [(0, []), (0, [])]
    assert (tmp_path / "hf/model.safetensors").is_file()


def test_a_connection_would_be_seen(tmp_path: Path) -> None:
    flags = [*tiny("--train-iters 1"), *LLAMA]
    assert run_ranks(1, _asked_for, flags, True) == [(0, ["socket.connect 192.0.2.1"])]
