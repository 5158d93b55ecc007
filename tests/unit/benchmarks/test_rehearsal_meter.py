"""What a phase of a rehearsal costs: its time, groups, calls and files."""

import builtins
from pathlib import Path

import torch

from benchmarks import rehearsal_meter as meter
from benchmarks.rehearsed_world import played


def test_a_phase_counts_groups_files_and_calls_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"x" * 5000)
    (tmp_path / "code.py").write_text("")
    measured = meter.Meter()
    with played(0, 4), measured.phase("one"):
        sum(range(2_000_000))
        torch.distributed.new_group([0, 1])
        torch.distributed.new_group([2, 3])
        with builtins.open(tmp_path / "data.bin", "rb", buffering=0) as file:
            file.read(4096)
        with builtins.open(tmp_path / "code.py"):
            pass
    with measured.phase("two"):
        pass
    one, two = measured.phases
    assert (one.name, one.groups, one.new_group_calls, one.files) == ("one", 1, 2, 1)
    assert one.seconds > two.seconds >= 0.0
    assert one.bytes_read >= 4096
    assert (two.name, two.groups, two.new_group_calls, two.files) == ("two", 0, 0, 0)
    assert torch.distributed.new_group.__name__ == "new_group"


def test_a_meter_that_does_not_measure_has_no_phases() -> None:
    silent = meter.Meter(measures=False)
    with silent.phase("one"):
        pass
    assert silent.phases == []


def test_files_of_code_and_of_the_system_are_no_files_of_the_program() -> None:
    for path in ("a/b.py", "b.pyc", "c.so", "/proc/self/stat", "/dev/null", "/sys/x"):
        assert meter._is_code(path), path
    for path in ("a/b.bin", "config.yaml", "data/proc", "py"):
        assert not meter._is_code(path), path
