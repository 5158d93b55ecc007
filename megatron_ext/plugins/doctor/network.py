"""Checks where ranks meet: address, port, network interfaces, and the numbers that a launcher hands out."""

import contextlib
import ctypes
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.plugins.doctor.finding import Finding, Launch, error, ok, warning

_SECONDS_TO_RESOLVE = 3.0
_DEFAULT_PORT = "29500"  # torchrun's


def address_resolves(launch: Launch) -> Iterator[Finding]:
    """Check that the name of MASTER_ADDR resolves."""
    address = launch.environment.get("MASTER_ADDR")
    if address is None:
        if launch.nodes > 1:
            yield error(
                f"MASTER_ADDR is not set, for {launch.nodes} machines",
                "every rank meets at rank 0's machine, and would look for it on its own",
                "export MASTER_ADDR=<name of the first machine>",
            )
        return
    addresses = resolve(address)
    if addresses is None:
        yield error(
            f"MASTER_ADDR {address} does not resolve on this machine",
            "no rank finds rank 0; the launch waits until its timeout",
            "export MASTER_ADDR=<a name or IP address that `getent hosts` finds on every machine>",
        )
    elif launch.nodes > 1 and all(one.startswith("127.") or one == "::1" for one in addresses):
        yield error(
            f"MASTER_ADDR {address} is this machine's loopback ({addresses[0]}), for {launch.nodes} machines",
            "each machine would look for rank 0 on itself",
            "export MASTER_ADDR=<the first machine's name as the others know it>",
        )
    else:
        yield ok(f"MASTER_ADDR {address} is {addresses[0]}")


def port_is_free(launch: Launch) -> Iterator[Finding]:
    """Check that MASTER_PORT is free on this machine."""
    if launch.has_launcher:
        return  # torchrun listens on it
    text = launch.environment.get("MASTER_PORT", _DEFAULT_PORT)
    name = "MASTER_PORT" if "MASTER_PORT" in launch.environment else "torchrun's default port"
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        yield error(
            f"MASTER_PORT {text} is no port", "ports are numbers from 1 to 65535", f"export MASTER_PORT={_DEFAULT_PORT}"
        )
        return
    here = resolve(launch.environment.get("MASTER_ADDR", "127.0.0.1"))
    if here is None or not _is_own(here[0]):
        return  # rank 0 is on another machine
    if _can_listen(int(text)):
        yield ok(f"{name} {text} is free")
        return
    with socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    yield error(
        f"{name} {text} is in use on this machine",
        "rank 0 cannot listen there, and the others would talk to a stranger, often what is left of an earlier run",
        f"export MASTER_PORT={free} (free now) and --master-port {free}; or end what `ss -ltnp` shows there",
    )


def interfaces_exist(launch: Launch) -> Iterator[Finding]:
    """Check that the network interfaces that variables name exist."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = launch.environment.get(variable)
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        exact = value.startswith("=") or variable.startswith("GLOO")
        wanted = [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
        # NCCL takes prefixes, and any one of them; gloo every one, by its whole name.
        present = [
            name
            for name in wanted
            if (name in interfaces if exact else any(one.startswith(name) for one in interfaces))
        ]
        others = [name for name in interfaces if name != "lo"] or interfaces
        if not present or (variable.startswith("GLOO") and present != wanted):
            yield error(
                f"{variable}={value}: this machine has no such interface; it has {', '.join(interfaces)}",
                "the backend finds no network and fails at its first connection",
                f"export {variable}={others[0]}, or unset it",
            )
        elif launch.nodes > 1 and all(name.startswith(("lo", "docker")) for name in present):
            yield error(
                f"{variable}={value} reaches this machine alone, and the run has {launch.nodes}",
                "no other machine is reached through it",
                f"export {variable}={others[0]}, or unset it",
            )
        else:
            yield ok(f"{variable}={value}")


def infiniband_is_there(launch: Launch) -> Iterator[Finding]:
    """Check InfiniBand where a launch has several machines."""
    folder = Path("/sys/class/infiniband")
    devices = sorted(device.name for device in folder.iterdir()) if folder.is_dir() else []
    value = launch.environment.get("NCCL_IB_HCA", "")
    wanted = [name.partition(":")[0] for name in value.lstrip("=^").split(",") if name]
    missing = [name for name in wanted if not any(device.startswith(name) for device in devices)]
    if missing and not value.startswith("^"):
        yield warning(
            f"NCCL_IB_HCA={value}: this machine has {', '.join(devices) or 'no InfiniBand'}",
            "NCCL passes over what is not there, to TCP at a tenth of the speed",
            "unset NCCL_IB_HCA",
        )
    if not devices or launch.nodes == 1:
        return
    for variable, value in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")):
        if launch.environment.get(variable, "").lower() == value.lower():
            yield warning(
                f"{variable}={value}, but there is InfiniBand ({', '.join(devices)})",
                "machines then talk over TCP, at a tenth of the speed",
                f"unset {variable}",
            )
    if not has_verbs():
        yield warning(
            f"there is InfiniBand ({', '.join(devices)}), and no library libibverbs that opens it",
            "NCCL passes over it without a word, to TCP at a tenth of the speed",
            "apt-get install libibverbs1 ibverbs-providers (in the image, where it is a container)",
        )


def has_verbs() -> bool:
    """Return whether libibverbs, which NCCL loads for InfiniBand, can be loaded."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def ranks_come_from_a_launcher(launch: Launch) -> Iterator[Finding]:
    """Check for RANK and WORLD_SIZE left in a shell, which make a single process wait for others that nobody starts."""
    variables = {name: launch.environment[name] for name in ("RANK", "WORLD_SIZE") if name in launch.environment}
    if not variables or launch.has_launcher or "SLURM_PROCID" in launch.environment:
        return
    text = " and ".join(f"{name}={value}" for name, value in variables.items())
    yield error(
        f"{text} set by hand, without a launcher",
        "each process takes itself for that rank, and waits for ranks that nobody starts",
        "unset RANK WORLD_SIZE LOCAL_RANK; torchrun sets them for each rank",
    )


def resolve(name: str) -> list[str] | None:
    """Return the IP addresses of a host, or None; a name server that does not answer is given a few seconds."""
    addresses: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            addresses.extend(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_RESOLVE)
    return list(addresses) or None


def _is_own(address: str) -> bool:
    """Return whether an IP address belongs to this machine: whether a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _can_listen(port: int) -> bool:
    """Return whether a port is free to listen on as torch's store does: on every interface, with the address
    reusable."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True
