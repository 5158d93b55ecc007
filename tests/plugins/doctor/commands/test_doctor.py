"""tools/doctor.py against planted mistakes: real ports, interfaces, folders and packages."""

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.device.gpu_inventory import Gpu, Survey, driver_version, links
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.doctor import machine, network, software, variables
from megatron_ext.plugins.doctor.commands import doctor
from megatron_ext.plugins.doctor.commands.doctor import examine, exit_code, main
from megatron_ext.plugins.doctor.finding import Finding, Launch
from megatron_ext.train.configure import configure
from tests.support.wrong_flags import BASE

ROOT = Path(__file__).resolve().parents[4]


def wrong(findings: Iterator[Finding] | list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def only(findings: Iterator[Finding]) -> Finding:
    [finding] = wrong(findings)
    assert finding.what
    assert finding.why
    assert finding.fix
    return finding


def test_a_plain_launch_on_this_machine_has_no_error():
    assert [finding.text() for finding in examine(Launch({}, ranks=1)) if finding.level == "error"] == []


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use(listening: int):
    found = only(network.port_is_free(Launch({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening)})))
    assert found.what == f"MASTER_PORT {listening} is in use on this machine"
    free = found.fix.partition("MASTER_PORT=")[2].partition(" ")[0]
    assert not wrong(network.port_is_free(Launch({"MASTER_PORT": free}))), "the fix works"
    under_torchrun = {"MASTER_PORT": str(listening), "TORCHELASTIC_RUN_ID": "none"}
    assert not wrong(network.port_is_free(Launch(under_torchrun))), "torchrun itself listens there"
    assert "is no port" in only(network.port_is_free(Launch({"MASTER_PORT": "http"}))).what


def test_an_address_that_does_not_resolve_or_is_this_machine_alone():
    assert "does not resolve" in only(network.address_resolves(Launch({"MASTER_ADDR": "no-such-host.invalid"}))).what
    local = {"MASTER_ADDR": "localhost"}
    assert not wrong(network.address_resolves(Launch(local)))
    assert "loopback" in only(network.address_resolves(Launch(local, nodes=2))).what
    assert "MASTER_ADDR is not set" in only(network.address_resolves(Launch({}, nodes=2))).what


def test_ranks_set_by_hand():
    by_hand = {"RANK": "0", "WORLD_SIZE": "8"}
    assert "RANK=0 and WORLD_SIZE=8" in only(network.ranks_come_from_a_launcher(Launch(by_hand))).what
    for launcher in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        assert not wrong(network.ranks_come_from_a_launcher(Launch({**by_hand, launcher: "1"})))


@pytest.mark.parametrize("mistake", variables.MISTAKES, ids=lambda mistake: mistake.name)
def test_variables_that_do_not_do_what_is_hoped(mistake: variables.Mistake):
    value = mistake.values[0] if mistake.values else "600"
    found = only(variables.known_mistakes(Launch({mistake.name: value})))
    assert found.what == f"{mistake.name}={value}"
    assert not mistake.values or not wrong(variables.known_mistakes(Launch({mistake.name: "none of them"})))


@pytest.mark.parametrize("value", ["TRACE", "trace", "Trace"])
def test_nccl_reads_its_levels_in_any_case(value: str):
    assert only(variables.known_mistakes(Launch({"NCCL_DEBUG": value}))).what == f"NCCL_DEBUG={value}"


@pytest.mark.parametrize(
    ("amount", "text"),
    [(512, "0.5 kB"), (32e6, "32.0 MB"), (1e6, "1.0 MB"), (64e9, "64.0 GB"), (1e9, "1.0 GB"), (2.5e12, "2.5 TB")],
)
def test_sizes_are_shown_in_the_largest_unit_that_they_reach(amount: float, text: str):
    assert machine._size(amount) == text


def launch_with(flags: str) -> Launch:
    return Launch({}, config=configure(f"{BASE} {flags}".split()).config)


def test_no_room_and_no_permission_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not wrong(machine.checkpoints_have_room(launch_with(f"--save {tmp_path}/new/run")))
    one = machine.checkpoint_bytes(launch_with("").config)  # pyright: ignore[reportArgumentType]
    for kept, free in ((1, 2.0), (3, 4.0)):  # and the new one, which is whole before an old one goes
        for space, wanted in ((free * one, []), (free * one - 1, [f"{kept + 1} must fit"])):
            monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder, space=space: SimpleNamespace(free=space))
            often = "--save-interval 1 --train-iters 9"
            launch = launch_with(f"--save {tmp_path} {often} --keep-last-checkpoints {kept}")
            assert [found.why[:10] for found in wrong(machine.checkpoints_have_room(launch))] == [
                w[:10] for w in wanted
            ]
    monkeypatch.undo()
    a_file = tmp_path / "file"
    a_file.touch()
    found = only(machine.checkpoints_have_room(launch_with(f"--save {a_file}/run")))
    assert "cannot be written" in found.what
    assert exit_code([found]) == 74
    huge = "--num-layers 4000 --hidden-size 131072 --num-attention-heads 1024"
    found = only(machine.checkpoints_have_room(launch_with(f"--save {tmp_path} {huge}")))
    assert (found.why, exit_code([found])) == ("not one fits", 74)


def test_one_checkpoint_that_just_fits_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = machine.checkpoint_bytes(launch_with("").config)  # pyright: ignore[reportArgumentType]
    for free, level, code in ((one, "warning", 0), (one - 1, "error", 74)):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        twice = "--train-iters 2 --save-interval 1 --keep-last-checkpoints 1"
        found = only(machine.checkpoints_have_room(launch_with(f"--save {tmp_path} {twice}")))
        assert (found.level, exit_code([found])) == (level, code)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--save-interval 3", 4),
        ("--save-interval 3 --keep-last-checkpoints 1", 2),
        ("--save-interval 3 --keep-last-checkpoints 1 --save-retain-interval 6", 3),
        ("--save-interval 10 --keep-last-checkpoints 1", 1),
        ("", 1),
    ],
)
def test_as_many_checkpoints_must_fit_as_are_kept(
    flags: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of ten steps: all of them where no flag says how many are kept."""
    launch = launch_with(f"--save {tmp_path} --train-iters 10 {flags}")
    assert launch.config is not None
    free = count * machine.checkpoint_bytes(launch.config)
    for space, is_enough in ((free, True), (free - 1, False)):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder, space=space: SimpleNamespace(free=space))
        (found,) = machine.checkpoints_have_room(launch)
        assert (found.level == "ok") == is_enough
        assert is_enough or count == 1 or f"{count} must fit: " in found.why


@pytest.mark.parametrize(("allowed", "is_told"), [("rwx", False), ("rx", True), ("rw", True), ("wx", False)])
def test_a_folder_must_be_one_to_write_in(allowed: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rights = sum({"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}[letter] for letter in allowed)
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path and mode & rights == mode)
    found = wrong(machine.checkpoints_have_room(launch_with(f"--save {tmp_path}/new/run")))
    assert [each.what for each in found] == [f"--save {tmp_path}/new/run: {tmp_path} cannot be written"] * is_told


def test_the_size_of_a_checkpoint():
    """8 layers of width 128: weights alone, with both moments, and with fp32 weights beside 16-bit ones."""
    count = machine.checkpoint_bytes(launch_with("--no-save-optim").config) // 4  # pyright: ignore[reportArgumentType]
    sizes = [machine.checkpoint_bytes(launch_with(flags).config) for flags in ("", "--bf16")]  # pyright: ignore[reportArgumentType]
    assert sizes == [12 * count, 14 * count]


def test_strangers_named_as_known_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not wrong(software.one_megatron(Launch({})))
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("# of PyPI")
    assert "is not NVIDIA's" in only(software.apex_is_nvidias(Launch({}))).what
    (tmp_path / "apex" / "optimizers").mkdir()
    assert not wrong(software.apex_is_nvidias(Launch({})))
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    found = only(software.one_megatron(Launch({})))
    assert found.fix == f"take {tmp_path} out of PYTHONPATH"


def test_versions_that_are_missing_or_wrong(tmp_path: Path):
    """In a process whose path holds another torch, and no package else."""
    for name, version in (("torch", "1.13.0"), ("packaging", "1")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    packaging = Path(__import__("packaging").__file__).parent
    (tmp_path / "packaging").symlink_to(packaging)
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + sys.argv[1:]\n"
        "from megatron_ext.plugins.doctor.software import packages_are_the_tested_ones as check\n"
        "from megatron_ext.plugins.doctor.finding import Launch\n"
        "print(*(finding.what for finding in check(Launch({}))), sep='\\n')"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "torch 1.13.0, but torch<2.16,>=2.11 is needed" in said
    assert "megatron-core is not installed" in said


H100 = Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), int(80e9), int(80e9))
TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1
NIC0\tPXB\tNODE\tSYS\t X
Legend:
"""


def survey(*cards: Gpu, **other: object) -> Survey:
    values: dict = {"driver": "570.86", "torch": "2.15.0", "cuda": "13.0", "nccl": "2.28.9", "gpus": cards, **other}
    return Survey(**values)


def test_the_driver_and_the_connections_are_read():
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.3.0"
    assert driver_version(text) == "570.86.15"
    assert links(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    assert links("") == {}


@pytest.mark.parametrize(
    ("launch", "found", "words"),
    [
        (Launch({}), survey(cuda=None), "built without CUDA"),
        (Launch({"CUDA_VISIBLE_DEVICES": ""}), survey(), "sees no GPU"),
        (Launch({}, ranks=2), survey(H100), "2 ranks on this machine, but 1 GPUs"),
        (Launch({}, ranks=2), survey(H100, H100, nccl=None), "without NCCL"),
        (Launch({}), survey(H100, Gpu(1, "NVIDIA L4", (8, 9), 24, 24)), "different kinds"),
        (Launch({}), survey(Gpu(0, "H100", (9, 0), 10, 80)), "GPU 0: only"),
        (Launch({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}), survey(H100), "CUDA_DEVICE_MAX_CONNECTIONS=8"),
        (Launch({"NCCL_P2P_LEVEL": "NVL"}), survey(H100, links=links(TOPOLOGY)), "2 of 3 pairs of GPUs have no NVLink"),
        (
            launch_with("--world-size 4 --tensor-model-parallel-size 4"),
            survey(H100, links=links(TOPOLOGY)),
            "tensor-parallel ranks on GPUs 0 and 2",
        ),
    ],
)
def test_gpus(launch: Launch, found: Survey, words: str):
    assert words in only(machine.judge(launch, found)).what


def told(launch: Launch, found: Survey) -> list[str]:
    return [each.what for each in wrong(machine.judge(launch, found))]


def test_gpus_are_those_of_a_machine_and_ranks_talk_across_machines():
    """One rank a GPU on each of two machines; NCCL is needed as soon as there are two ranks anywhere."""
    cards = (H100, dataclasses.replace(H100, index=1))
    assert told(Launch({}, ranks=2, nodes=2), survey(*cards)) == []
    assert told(Launch({}, ranks=3, nodes=2), survey(*cards)) == ["3 ranks on this machine, but 2 GPUs"]
    without = "torch 2.15.0 is built without NCCL"
    for ranks, nodes, said in ((1, 1, []), (1, 2, [without]), (2, 1, [without])):
        assert told(Launch({}, ranks=ranks, nodes=nodes), survey(*cards, nccl=None)) == said


@pytest.mark.parametrize(("free", "is_told"), [(90, False), (89, True), (0, True)])
def test_a_gpu_of_which_a_tenth_is_taken_is_named(free: int, is_told: bool):
    taken = Gpu(1, H100.name, (9, 0), free * 10**9, 100 * 10**9)
    said = [f"GPU 1: only {free:.1f} of 100.0 GB are free"]
    assert told(Launch({}), survey(H100, taken)) == (said if is_told else [])


def test_the_oldest_gpu_decides_on_hardware_queues():
    newer = Gpu(1, H100.name, (10, 0), 180, 180)
    queues = Launch({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    assert told(queues, survey(newer)) == []
    for cards in ((H100, newer), (newer, H100)):
        assert told(queues, survey(*cards)) == ["CUDA_DEVICE_MAX_CONNECTIONS=8"]


def test_tensor_parallel_ranks_are_neighbours():
    """Of four GPUs, 0 and 1 share a processor, and 2 and 3 do."""
    pairs = {(0, 1): "NV18", (2, 3): "PHB", **{(a, b): "SYS" for a in (0, 1) for b in (2, 3)}}
    for size, said in (
        (1, []),
        (2, []),
        (4, ["tensor-parallel ranks on GPUs 0 and 2 talk across the processors (SYS)"]),
    ):
        launch = launch_with(f"--world-size 4 --tensor-model-parallel-size {size}")
        assert told(launch, survey(H100, links=pairs)) == said
    well = [each.what for each in machine.judge(Launch({}), survey(H100, links=pairs)) if each.level == "ok"]
    assert well == [
        "1 x NVIDIA H100 80GB HBM3; driver 570.86, CUDA 13.0, NCCL 2.28.9",
        "pairs of GPUs: 1 by NVLink, 1 by PHB, 4 by SYS",
    ]
    for level, said in (("NVL", 1), ("nvl", 1), ("SYS", 0), ("", 0)):
        found = told(Launch({"NCCL_P2P_LEVEL": level}), survey(H100, links=pairs))
        assert found == ["NCCL_P2P_LEVEL=NVL, but 5 of 6 pairs of GPUs have no NVLink"] * said


def test_settings_of_gpus_that_are_right():
    blackwell = Gpu(0, "NVIDIA B200", (10, 0), 180, 180)
    assert not wrong(machine.judge(Launch({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}), survey(blackwell)))
    assert not wrong(machine.judge(Launch({"NCCL_P2P_LEVEL": "NVL"}), survey(H100, links={(0, 1): "NV18"})))


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nnodes"])
@pytest.mark.parametrize("number", ["0", "-2"])
def test_no_ranks_are_not_those_of_the_machine(flag: str, number: str):
    with pytest.raises(ConfigurationError, match=f"^{flag} {number} is not a number from 1"):
        main([flag, number])


def test_the_program(tmp_path: Path, listening: int):
    command = [sys.executable, "tools/doctor.py", "--nproc-per-node", "2", "--", *BASE.split()]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    def doctor(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = clean | {"MASTER_PORT": "0"} | variables
        return subprocess.run(
            [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    with socket.socket() as probe:
        probe.bind(("", 0))
        free = str(probe.getsockname()[1])
    well = doctor(MASTER_PORT=free, OMP_NUM_THREADS="1")
    assert well.returncode == 0, well.stdout + well.stderr
    assert well.stdout.splitlines()[-1].startswith("0 errors, ")
    ill = doctor("--save", f"{tmp_path}/x", "--tensor-model-parallel-size", "3", MASTER_PORT=str(listening))
    assert ill.returncode == 64
    assert "error    world size 2 is not a multiple of --tensor-model-parallel-size 3" in ill.stdout
    assert f"error    MASTER_PORT {listening} is in use" in ill.stdout


@pytest.mark.parametrize(
    ("flags", "on_machine", "machines", "ranks"),
    [
        ("", "5", "3", 15),
        ("--nproc-per-node 3", "4", "3", 9),
        ("--nproc-per-node 3 --nnodes 5", "4", "3", 15),
        ("--nproc-per-node 3", "", "2(x4)", 3),
        ("--nproc-per-node 3", "", "", 3),
    ],
)
def test_the_flags_say_how_many_ranks_or_else_the_launcher(
    flags: str,
    on_machine: str,
    machines: str,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a layout that does not fit them shows."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_machine)
    monkeypatch.setenv("SLURM_NNODES", machines)
    training = [*BASE.split(), "--tensor-model-parallel-size", "4", "--num-attention-heads", "4"]
    assert doctor.main([*flags.split(), "--", *training]) == 64
    assert f"world size {ranks} is not a multiple of --tensor-model-parallel-size 4" in capsys.readouterr().out
