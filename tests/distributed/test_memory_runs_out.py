"""A run that cannot fit is refused before it begins; one whose memory runs out says what held how much."""

import resource
import shlex
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ext.config.schema import Config
from megatron_ext.device.cpu import host_memory
from megatron_ext.errors import ConfigurationError, MemoryExhaustedError
from megatron_ext.plan.memory import estimate, helpful_flags, host_bytes, kept_at_least
from megatron_ext.train import memory_check
from megatron_ext.train.configure import configure
from megatron_ext.verify.ranks import run_ranks
from tests.support.program import Ended, run_program

_FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --mock-data --vocab-size 61 --train-iters 2 --lr 1e-3
    --eval-interval 0
""")


def _with_little_memory(more: int, argv: list[str]) -> Ended:
    """Run the program in an address space of `more` bytes above what it has when it is loaded."""
    import megatron_ext.train.trainer  # noqa: F401 (what the program loads counts before)

    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    return run_program(argv)


def test_memory_that_runs_out_is_explained() -> None:
    """Activations of 2 GB each, in an address space with as much to spare: torch's own refusal, from the kernel's."""
    argv = [*_FLAGS, *["--seq-length", "1024", "--micro-batch-size", "16384", "--global-batch-size", "16384"]]
    [ended] = run_ranks(1, _with_little_memory, 2 << 30, argv)
    assert ended.code == 71, ended.errors[-3000:]
    last = ended.errors.strip().splitlines()[-1]
    assert "rank 0: memory has run out" in last
    assert "activations" in last
    assert "What helps: --recompute-granularity full --recompute-method uniform" in last
    assert "--micro-batch-size 8192" in last
    assert "Traceback" not in ended.errors


def test_a_model_that_is_larger_than_the_machine_is_refused() -> None:
    argv = [
        *_FLAGS,
        *["--seq-length", "8", "--micro-batch-size", "1", "--hidden-size", "262144", "--num-layers", "2000"],
    ]
    [ended] = run_ranks(1, run_program, argv)
    assert ended.code == 64
    assert "a rank needs 26388" in ended.errors
    assert "GB between steps (optimizer" in ended.errors
    assert "but this machine has" in ended.errors


class _Device:
    kind = "cpu"

    def __init__(self, total: float, free: float):
        self._capacity = int(total), int(free)

    def capacity(self) -> tuple[int, int]:
        return self._capacity


def _config(flags: str) -> Config:
    return configure([*_FLAGS, *shlex.split(flags), "--dry-run", "--device", "cpu"]).config


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_the_state_alone_decides_whether_a_run_is_refused(
    share: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "host_swap", lambda: 0)
    config = _config("--seq-length 8 --micro-batch-size 1")
    needed = estimate(config, fused=False)[1]
    state = needed.weights + needed.gradients + needed.optimizer
    device: Any = _Device(state * share, needed.total)
    if share < 1:
        with pytest.raises(ConfigurationError, match=r"needs .* MB between steps \(optimizer"):
            memory_check.check_it_fits(config, device)
        return
    memory_check.check_it_fits(config, device)
    assert "it may run out. What helps: " in capsys.readouterr().err
    memory_check.check_it_fits(config, _Device(state * share, 2 * needed.total))  # pyright: ignore[reportArgumentType]
    assert not capsys.readouterr().err


def test_stages_with_little_are_not_counted_like_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages with the embedding and the output have most; the machine has room for all four, not for four such."""
    monkeypatch.setattr(memory_check, "host_swap", lambda: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = _config(
        "--seq-length 8 --micro-batch-size 1 --vocab-size 65536 --num-layers 4 --pipeline-model-parallel-size 4 "
        "--world-size 4"
    )
    stages = [sum(kept_at_least(config, fused=False, anywhere=anywhere)[1].values()) for anywhere in (True, False)]
    assert stages[1] > 50 * stages[0]
    device: Any = _Device(3 * stages[1], 1e12)
    memory_check.check_it_fits(config, device)
    device = _Device(3.9 * stages[0], 1e12)
    with pytest.raises(ConfigurationError, match=r"4 x a rank of pipeline stage 1 needs .* between steps"):
        memory_check.check_it_fits(config, device)


def test_what_only_training_makes_is_no_reason_to_refuse_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "host_swap", lambda: 0)
    trains, evaluates = (
        _config(f"--seq-length 8 --micro-batch-size 1 {flag}") for flag in ("", "--skip-train --eval-interval 1")
    )
    device: Any = _Device(estimate(trains, fused=False)[1].weights * 1.01, 1e12)
    with pytest.raises(ConfigurationError):
        memory_check.check_it_fits(trains, device)
    memory_check.check_it_fits(evaluates, device)


def test_what_can_be_swapped_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("--seq-length 8 --micro-batch-size 1")
    device: Any = _Device(1, 1e12)
    monkeypatch.setattr(memory_check, "host_swap", lambda: 10**9)
    memory_check.check_it_fits(config, device)
    monkeypatch.setattr(memory_check, "host_swap", lambda: 0)
    with pytest.raises(ConfigurationError):
        memory_check.check_it_fits(config, device)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--seq-length 512 --micro-batch-size 8", "--recompute-granularity full --recompute-method uniform"),
        ("--seq-length 8 --micro-batch-size 1 --world-size 4 --global-batch-size 4", "--use-distributed-optimizer"),
        ("--seq-length 8 --micro-batch-size 1 --hidden-size 256", "--optimizer-cpu-offload"),
        ("--seq-length 512 --micro-batch-size 8", "--micro-batch-size 4"),
        ("--seq-length 512 --micro-batch-size 8", "--bf16"),
    ],
)
def test_the_flag_that_is_named_helps(flags: str, named: str) -> None:
    before = _config(flags)
    needed = estimate(before, fused=True)[1]
    flag = next(one for one in helpful_flags(before, needed, fused=True) if one.startswith(named))
    assert estimate(_config(f"{flags} {flag}"), fused=True)[1].total < needed.total


def test_offloaded_state_counts_in_host_memory() -> None:
    plain, moved = (_config(f"--seq-length 8 --micro-batch-size 1 {flag}") for flag in ("", "--optimizer-cpu-offload"))
    assert host_bytes(plain) == 0
    assert host_bytes(moved) == estimate(plain, fused=False)[1].optimizer


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    total, _ = host_memory(tmp_path)
    assert total == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert host_memory(tmp_path) == (1_000_000, 600_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path)[0] == total


def test_other_errors_are_left_alone() -> None:
    config = _config("--seq-length 8 --micro-batch-size 1")
    with pytest.raises(RuntimeError, match="shapes"), memory_check.telling_of_memory(config, None):  # pyright: ignore[reportArgumentType]
        raise RuntimeError("shapes differ")
    assert memory_check.is_exhausted(MemoryError())
    assert memory_check.is_exhausted(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert MemoryExhaustedError.exit_code == 71
