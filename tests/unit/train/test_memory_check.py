"""Whether a run fits into the memory of a machine, and what is said where it does not.

The machines are made up, each with as much memory as the test says, in shares of what the formulas give.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import Config
from megatron_ext.cost.memory import estimate, host_bytes, kept_at_least
from megatron_ext.device.device_protocol import DeviceMemory
from megatron_ext.errors import ConfigurationError, DataError, MemoryExhaustedError, TrainingError
from megatron_ext.train import memory_check
from megatron_ext.train.memory_check import as_exhausted, check_it_fits, is_exhausted, telling_of_memory
from tests.support.small_models import small_config

LARGE = 1e15
"""Bytes that no run needs."""


class Machine:
    """In the place of a device with so many bytes of memory."""

    torch_device = SimpleNamespace(index=3)

    def __init__(self, kind: str, total: float, free: float):
        self.kind, self.total, self.free = kind, total, free

    def capacity(self) -> tuple[float, float]:
        return self.total, self.free

    def memory(self) -> DeviceMemory:
        return DeviceMemory(int(11e9), int(12e9), int(13e9))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a machine: bytes of the device, of the host and its swap, and the ranks there, of which this is one."""

    def make(
        kind: str,
        total: float,
        free: float = LARGE,
        *,
        host: float = LARGE,
        swap: float = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> Any:
        monkeypatch.setattr(memory_check, "host_memory", lambda: (host, 0))
        monkeypatch.setattr(memory_check, "host_swap", lambda: swap)
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return Machine(kind, total, free)

    return make


def _kept(kind: str, config: Config | None = None) -> float:
    """Return the bytes that a rank keeps between steps."""
    on_cpu = kind == "cpu"
    return sum(kept_at_least(config or small_config(), fused=not on_cpu, anywhere=on_cpu)[1].values())


def _needed(kind: str) -> float:
    return estimate(small_config(), fused=kind != "cpu")[1].total


def _offloading() -> Config:
    config = small_config(layout={"use_distributed_optimizer": True})
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, optimizer_cpu_offload=True))


@pytest.mark.parametrize(
    ("kind", "total", "swap", "ranks", "fits"),
    [
        ("cpu", 2.0, 0.0, 2, True),
        ("cpu", 1.99, 0.0, 2, False),
        ("cpu", 1.5, 0.5, 2, True),
        ("cpu", 1.5, 0.49, 2, False),
        ("cuda", 1.0, 0.0, 2, True),
        ("cuda", 0.99, 0.0, 2, False),
        ("cuda", 0.99, 0.5, 1, False),
    ],
)
def test_what_is_kept_between_steps_must_fit(
    kind: str, total: float, swap: float, ranks: int, fits: bool, machine: Callable[..., Any]
) -> None:
    """All ranks of a machine share its memory, and swap; each has a GPU of its own."""
    kept = _kept(kind)
    here = machine(kind, total * kept, swap=swap * kept, ranks=ranks)
    if fits:
        check_it_fits(small_config(), here)
        return
    who = "2 x a rank" if kind == "cpu" else "a rank"
    what = "this machine" if kind == "cpu" else "GPU 3"
    said = rf"^{who} needs .* between steps \(.*weights .*\), but {what} has .* of memory; use "
    with pytest.raises(ConfigurationError, match=said):
        check_it_fits(small_config(), here)


@pytest.mark.parametrize(
    ("host", "swap", "fits"), [(2.0, 0.0, True), (1.99, 0.0, False), (1.5, 0.5, True), (1.5, 0.49, False)]
)
def test_ranks_share_the_memory_of_the_host(host: float, swap: float, fits: bool, machine: Callable[..., Any]) -> None:
    config = _offloading()
    kept = host_bytes(config)
    assert kept > 0
    here = machine("cuda", LARGE, host=host * kept, swap=swap * kept, ranks=2)
    if fits:
        check_it_fits(config, here)
        return
    said = (
        r"^2 ranks keep .* in host memory, but this machine has .*; use a smaller --optimizer-offload-fraction, or "
        "more machines$"
    )
    with pytest.raises(ConfigurationError, match=said):
        check_it_fits(config, here)


@pytest.mark.parametrize(
    ("kind", "free", "rank", "ranks", "who"),
    [
        ("cpu", 2.23, 0, 2, None),
        ("cpu", 2.22, 0, 2, "2 x a rank"),
        ("cpu", 2.22, 1, 2, None),
        ("cuda", 1.12, 0, 2, None),
        ("cuda", 1.11, 0, 2, "a rank"),
        ("cuda", 1.11, 1, 2, None),
    ],
)
def test_one_rank_of_each_machine_warns_where_it_comes_near(
    kind: str,
    free: float,
    rank: int,
    ranks: int,
    who: str | None,
    machine: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To nine tenths of what is free, which is less than there is."""
    check_it_fits(small_config(), machine(kind, LARGE, free * _needed(kind), rank=rank, ranks=ranks))
    said = capsys.readouterr().err
    if who is None:
        assert said == ""
        return
    what = "this machine" if kind == "cpu" else "GPU 3"
    assert said.startswith(f"warning: {who} needs about ")
    assert f", and {what} has " in said
    assert " of memory free: it may run out. What helps: " in said


@pytest.mark.parametrize(("stages", "who"), [(1, "a rank needs"), (2, r"a rank of pipeline stage \d needs")])
def test_the_stage_is_named_where_there_are_several(stages: int, who: str, machine: Callable[..., Any]) -> None:
    config = small_config(layout={"pipeline_model_parallel_size": stages, "world_size": stages})
    with pytest.raises(ConfigurationError, match=f"^{who} "):
        check_it_fits(config, machine("cuda", 0.5 * _kept("cuda", config)))


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA"), True),
        (RuntimeError("CUDA out of memory. Tried"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Cannot allocate memory"), True),
        (RuntimeError("NCCL Error 1: Out Of Memory"), True),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors_say_that_memory_has_run_out(error: BaseException, exhausted: bool) -> None:
    assert is_exhausted(error) is exhausted


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_held_how_much_is_told(kind: str, machine: Callable[..., Any]) -> None:
    here = machine(kind, LARGE)
    found = str(as_exhausted(RuntimeError("CUDA out of memory.  Tried\nto. GPU 0 has. x"), small_config(), here))
    assert found.startswith(
        "memory has run out (CUDA out of memory). This rank held 11.0 GB, at most 12.0 GB; by formula a rank of stage "
        "0, which needs most, has "
    )
    assert ". What helps: " in found
    assert as_exhausted(ValueError("else"), small_config(), here) is None


class OwnError(Exception):
    """Another error."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("all of it"), MemoryExhaustedError),
        (OwnError("else"), OwnError),
        (DataError("out of memory"), DataError),
        (TrainingError("out of memory"), TrainingError),
    ],
)
def test_only_an_error_of_memory_is_told_in_other_words(
    error: Exception, told: type[Exception], machine: Callable[..., Any]
) -> None:
    """Ours have said what they say."""
    with pytest.raises(told) as raised, telling_of_memory(small_config(), machine("cuda", LARGE)):
        raise error
    if told is MemoryExhaustedError:
        assert raised.value.__cause__ is error
    else:
        assert raised.value is error
