"""Each check of the doctor looks at the number that it is about: ranks of a machine, machines, or ranks of the launch;
and every check is asked."""

import importlib
import inspect
import os
import pkgutil
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.plugins import doctor
from megatron_ext.plugins.doctor import machine, network, variables
from megatron_ext.plugins.doctor.commands.doctor import CHECKS, exit_code
from megatron_ext.plugins.doctor.finding import Finding, Launch

ONE, HERE, THERE, BOTH = Launch({}), Launch({}, ranks=3), Launch({}, nodes=3), Launch({}, ranks=3, nodes=5)
LAUNCHES = (ONE, HERE, THERE, BOTH)


class Machine:
    """What this machine has, as the checks of the doctor see it."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path):
        self._patch, self._folder = patch, folder

    def cores(self, number: int) -> None:
        self._patch.setattr(os, "sched_getaffinity", lambda process: set(range(number)))

    def shared_memory(self, size: int) -> None:
        self._patch.setattr(machine.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(size, 0, size))

    def limit(self, soft: int, hard: int) -> None:
        """Of open files, or of locked pages."""
        self._patch.setattr(machine.resource, "getrlimit", lambda kind: (soft, hard))

    def infiniband(self, *devices: str, verbs: bool = True) -> None:
        self._patch.setattr(network, "has_verbs", lambda: verbs)
        for module in (network, machine):
            self._patch.setattr(module, "Path", lambda path: self._folder / "infiniband")
        for device in devices:
            (self._folder / "infiniband" / device).mkdir(parents=True, exist_ok=True)

    def interfaces(self, *names: str) -> None:
        self._patch.setattr(network.socket, "if_nameindex", lambda: list(enumerate(names)))

    def addresses(self, of: dict[str, list[str]], own: str = "", taken: int = 0) -> None:
        """What names resolve to, which of the addresses is its own, and a port where somebody listens."""
        self._patch.setattr(network, "resolve", of.get)
        self._patch.setattr(network, "_is_own", lambda address: address == own)
        self._patch.setattr(network, "_can_listen", lambda port: port != taken)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_every_check_is_asked_once() -> None:
    """A check is a public function of the room that takes a launch alone (more only by default), and yields."""
    found = set()
    for module in pkgutil.iter_modules(doctor.__path__):
        for name, function in vars(importlib.import_module(f"{doctor.__name__}.{module.name}")).items():
            if inspect.isgeneratorfunction(function) and not name.startswith("_"):
                first, *others = inspect.signature(function).parameters.values()
                if first.name == "launch" and all(each.default is not each.empty for each in others):
                    found.add(function)
    assert len(CHECKS) == len(set(CHECKS))
    assert set(CHECKS) == found


def test_what_a_finding_looks_like() -> None:
    """Without a reason or a fix, the lines of these are left out, each for itself."""
    assert Finding("ok", "2 ranks").text() == "ok       2 ranks"
    assert Finding("error", "what", "why").text() == "error    what\n         why: why"
    assert Finding("error", "what", fix="fix").text() == "error    what\n         fix: fix"
    assert Finding("warning", "what", "why", "fix").text() == "warning  what\n         why: why\n         fix: fix"


def test_the_first_error_gives_the_exit_code() -> None:
    warning, well = Finding("warning", "w", "w", "w", 70), Finding("ok", "o")
    first, second = Finding("error", "a", "a", "a", 74), Finding("error", "b", "b", "b")
    assert exit_code([]) == exit_code([well, warning]) == 0
    assert exit_code([well, warning, first, second]) == 74
    assert exit_code([warning, second, first]) == 64


def _levels(check: Any, launches: tuple[Launch, ...] = LAUNCHES) -> list[list[str]]:
    return [[found.level for found in check(launch)] for launch in launches]


def test_what_a_machine_has_for_its_own_ranks(here: Machine, tmp_path: Path) -> None:
    here.cores(2)
    assert _levels(machine.ranks_have_cores) == [["ok"], ["warning"], ["ok"], ["warning"]]
    here.cores(3)
    assert _levels(machine.ranks_have_cores) == [["ok"]] * 4
    tasks = [Launch({"SLURM_CPUS_PER_TASK": given}, 3) for given in ("3", "4")]
    assert _levels(machine.ranks_have_cores, tuple(tasks)) == [["ok"], ["warning", "ok"]]
    for size, level in ((2**30, "ok"), (2**30 - 1, "warning")):
        here.shared_memory(size)
        shared = _levels(lambda launch: machine.shared_memory_is_large_enough(launch, str(tmp_path)))
        assert shared == [["ok"], [level], ["ok"], [level]]
    assert _levels(lambda launch: machine.shared_memory_is_large_enough(launch, str(tmp_path / "no"))) == [[]] * 4


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [
        (580, 580, None),  # 400 and 12 for each of 15
        (579, 580, "ulimit -n 580"),
        (579, 579, "let the administrator raise the limit of 579 (nofile)"),
    ],
)
def test_files_for_connections_to_all_ranks(soft: int, hard: int, fix: str | None, here: Machine) -> None:
    here.limit(soft, hard)
    [found] = machine.enough_files_may_be_open(BOTH)
    assert found.level == ("ok" if fix is None else "warning")
    if fix is not None:
        assert (found.what, found.fix) == ("579 files may be open (ulimit -n), for 15 ranks", fix)
    assert _levels(machine.enough_files_may_be_open)[:3] == [["ok"]] * 3


def test_threads_of_the_ranks_of_a_machine(here: Machine) -> None:
    here.cores(12)
    assert _levels(variables.threads_fit_the_cores) == [[], ["warning"], [], ["warning"]]
    [found] = variables.threads_fit_the_cores(BOTH)
    assert found.what == "OMP_NUM_THREADS is not set, for 3 ranks on 12 cores"
    assert found.fix == "export OMP_NUM_THREADS=4"
    torchrun = {"TORCHELASTIC_RUN_ID": "x"}
    for given, ranks, level in (
        ("4", 3, []),
        ("5", 3, ["warning"]),
        ("13", 1, []),
        ("1", 13, []),
        ("2", 13, ["warning"]),
    ):
        launch = Launch({"OMP_NUM_THREADS": given} | torchrun, ranks=ranks, nodes=5)
        assert [found.level for found in variables.threads_fit_the_cores(launch)] == level
    assert not [*variables.threads_fit_the_cores(Launch(torchrun, ranks=3))], "torchrun sets it"
    assert not [*variables.threads_fit_the_cores(Launch({"OMP_NUM_THREADS": "x"}, ranks=13))]


@pytest.mark.parametrize(
    ("value", "devices", "warns"),
    [
        ("", ("mlx5_0",), False),
        ("mlx5_0", ("mlx5_0", "mlx5_1"), False),
        ("mlx5", ("mlx5_0",), False),
        ("mlx5_0:1", ("mlx5_0",), False),
        ("=mlx5_0:1,mlx5_1:1", ("mlx5_0", "mlx5_1"), False),
        ("mlx5_0,mlx5_1", ("mlx5_0",), True),
        ("mlx5_1", ("mlx5_0",), True),
        ("mlx5_0", (), True),
        ("^mlx5_1", ("mlx5_0",), False),
    ],
)
def test_infiniband_devices(value: str, devices: tuple[str, ...], warns: bool, here: Machine) -> None:
    here.infiniband(*devices)
    found = [each.what for each in network.infiniband_is_there(Launch({"NCCL_IB_HCA": value}))]
    there = ", ".join(devices) or "no InfiniBand"
    assert found == ([f"NCCL_IB_HCA={value}: this machine has {there}"] if warns else [])


@pytest.mark.parametrize(("devices", "warned"), [((), []), (("mlx5_0",), ["warning"])])
def test_infiniband_between_machines(devices: tuple[str, ...], warned: list[str], here: Machine) -> None:
    """It is told where it is there, and where there is another machine to reach."""
    here.infiniband(*devices)
    disabled = [Launch({"NCCL_IB_DISABLE": value}, 3, nodes) for value, nodes in (("1", 1), ("1", 2), ("0", 2))]
    assert _levels(network.infiniband_is_there, tuple(disabled)) == [[], warned, []]
    sockets = [Launch({"NCCL_NET": value}, 3, 2) for value in ("Socket", "IB")]
    assert _levels(network.infiniband_is_there, tuple(sockets)) == [warned, []]
    here.infiniband(*devices, verbs=False)
    found = list(network.infiniband_is_there(Launch({}, 3, 2)))
    assert [one.level for one in found] == warned
    assert ["libibverbs1" in one.fix for one in found] == [True] * len(warned)
    here.limit(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert _levels(machine.pages_may_be_locked) == [[]] * 4
    here.limit(65536, 65536)
    assert _levels(machine.pages_may_be_locked) == [[], [], warned, warned]


@pytest.mark.parametrize(
    ("found", "one", "several"),
    [
        (["127.0.0.1"], "ok", "error"),
        (["127.0.1.1", "::1"], "ok", "error"),
        (["::1"], "ok", "error"),
        (["127.0.1.1", "10.0.0.7"], "ok", "ok"),  # as Debian's /etc/hosts has it, with a name server beside
        (["10.0.0.7"], "ok", "ok"),
        (["::12"], "ok", "ok"),
        (None, "error", "error"),
    ],
)
def test_an_address_that_others_reach(found: list[str] | None, one: str, several: str, here: Machine) -> None:
    here.addresses({} if found is None else {"node0": found})
    launches = tuple(Launch({"MASTER_ADDR": "node0"}, 3, nodes) for nodes in (1, 2))
    assert _levels(network.address_resolves, launches) == [[one], [several]]


@pytest.mark.parametrize(
    ("names", "advised"), [(("lo", "eth0", "eth1"), "eth0"), (("eth5", "lo"), "eth5"), (("lo",), "lo")]
)
def test_the_interface_that_is_advised_is_there(names: tuple[str, ...], advised: str, here: Machine) -> None:
    """Another one than the loopback, unless that is all there is."""
    here.interfaces(*names)
    [found] = network.interfaces_exist(Launch({"GLOO_SOCKET_IFNAME": "ib0"}))
    assert found.fix == f"export GLOO_SOCKET_IFNAME={advised}, or unset it"
    assert found.what.endswith(f"it has {', '.join(names)}")


def test_interfaces_of_one_machine_and_of_several(here: Machine) -> None:
    here.interfaces("lo", "eth0", "eth10", "docker0")
    rows = {
        ("NCCL", "eth"): "ok ok",
        ("NCCL", "eth0,ib0"): "ok ok",
        ("NCCL", "eth1"): "ok ok",
        ("NCCL", "=eth1"): "error error",
        ("NCCL", "ib0"): "error error",
        ("NCCL", "lo"): "ok error",
        ("NCCL", "docker,lo"): "ok error",
        ("NCCL", "lo,eth0"): "ok ok",
        ("GLOO", "eth0"): "ok ok",
        ("GLOO", "eth"): "error error",
        ("GLOO", "eth0,ib0"): "error error",
        ("GLOO", "lo"): "ok error",
        ("NCCL", "^eth0"): " ",
        ("NCCL", ""): " ",
    }
    found = {}
    for backend, value in rows:
        launches = [Launch({f"{backend}_SOCKET_IFNAME": value}, 3, nodes) for nodes in (1, 2)]
        levels = _levels(network.interfaces_exist, tuple(launches))
        found[backend, value] = " ".join("".join(each) for each in levels)
    assert found == rows


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "torchrun's default port 29500 is free"),
        ({"MASTER_PORT": "4000"}, "MASTER_PORT 4000 is free"),
        ({"MASTER_PORT": "4001", "MASTER_ADDR": "here"}, "MASTER_PORT 4001 is in use on this machine"),
        ({"MASTER_PORT": "4001", "MASTER_ADDR": "there"}, ""),  # rank 0's machine is the one to ask
        ({"MASTER_PORT": "4001", "MASTER_ADDR": "nowhere"}, ""),
        ({"MASTER_PORT": "4001", "TORCHELASTIC_RUN_ID": "x"}, ""),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT 65536 is no port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT 0 is no port"),
        ({"MASTER_PORT": "65535"}, "MASTER_PORT 65535 is free"),
    ],
)
def test_a_port_is_asked_for_on_rank_0s_machine_alone(given: dict[str, str], said: str, here: Machine) -> None:
    own = ["10.0.0.1"]
    here.addresses({"here": own, "127.0.0.1": own, "there": ["10.0.0.7"]}, own="10.0.0.1", taken=4001)
    assert " ".join(each.what for each in network.port_is_free(Launch(given))) == said
