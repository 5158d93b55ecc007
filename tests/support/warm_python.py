"""A `python` that has torch and the program loaded already, for scripts and launchers that start many interpreters.

    subprocess.run(["bash", "examples/pretrain_cpu.sh"], env={**os.environ, **warm_python(tmp_path)})

It is a small client. What it is asked to run, runs in a process that is forked from the server which the ranks come
from, with the client's arguments, folder, environment and standard streams; the client passes signals on and ends as
that process ends. So nothing is imported anew: where that is what is tested, the test starts `sys.executable`.
"""

import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

from megatron_ext.forkserver.ranks import forkserver

_CLIENT = Path(__file__).with_name("warm_python_client.py")
_LARGEST_REQUEST = 1 << 22


def warm_python(folder: Path) -> dict[str, str]:
    """Write the executables `python` and `megatron-ext` into a folder; they work as long as the process that asked for
    them.

    Returns:
        Variables with which shells find it as `python`, and torchrun takes it for its workers.
    """
    file = folder / "python"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/bash\nexec {sys.executable} -S -E -s {_CLIENT} {_address()} {sys.executable} "$@"\n')
    file.chmod(0o755)
    command = folder / "megatron-ext"
    command.write_text(f'#!/bin/bash\nexec {file} -m megatron_ext "$@"\n')
    command.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON_EXEC": str(file)}


def run_words(words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
    """Do in this process as `python *words` does in a folder: a script, `-m module` or `-c program`, with arguments."""
    import torch

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    words = [word for word in words if word != "-u"] if words[0] == "-u" else list(words)
    for name, number in (("stdout", 1), ("stderr", 2)):  # the server's were made for other files
        setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


@functools.cache
def _address() -> str:
    """Start to serve clients, once a process, and return the name of the socket, which no file has."""
    server = socket.socket(socket.AF_UNIX)
    name = f"warm-python-{os.getpid()}-{os.urandom(4).hex()}"
    server.bind(f"\0{name}")
    server.listen(64)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return name


def _serve(server: socket.socket) -> None:
    while True:
        client, _ = server.accept()
        threading.Thread(target=_attend, args=(client,), daemon=True).start()


def _attend(client: socket.socket) -> None:
    """Run what a client asks for; the process does not outlive it."""
    request, streams, _, _ = socket.recv_fds(client, _LARGEST_REQUEST, 3)
    while not request.endswith(b"\n"):
        request += client.recv(_LARGEST_REQUEST)
    process: Any = forkserver().Process(target=_run, args=(_Streams(streams), json.loads(request)))
    process.start()
    for stream in streams:
        os.close(stream)
    while process.sentinel not in connection.wait([process.sentinel, client]):
        number = client.recv(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number[0] if number else signal.SIGKILL)
        if not number:  # the client is gone
            break
    process.join()
    with contextlib.suppress(OSError):
        client.sendall(str(process.exitcode).encode())
    client.close()


class _Streams:
    """Standard input, output and error of the client, handed to the process that is started."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def __reduce__(self) -> Any:
        return _opened, tuple(reduction.DupFd(number) for number in self.numbers)


def _opened(*handed: Any) -> _Streams:
    return _Streams([each.detach() for each in handed])


def _run(streams: _Streams, request: Mapping[str, Any]) -> None:
    os.setsid()
    for number, stream in enumerate(streams.numbers):
        os.dup2(stream, number)
        os.close(stream)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.stdin = os.fdopen(0, closefd=False)
    run_words(request["words"], request["folder"], request["environment"])
