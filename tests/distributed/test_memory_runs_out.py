"""A run that cannot fit is refused before it begins; one whose memory runs out says what held how much."""

import resource
import shlex
from typing import Any

import psutil
import pytest

from megatron_ext.config.schema import Config
from megatron_ext.cost.memory import estimate, helpful_flags, kept_at_least
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.train import memory_check
from megatron_ext.train.configure import configure
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
