"""The library of a CPU's fp32 products is one for all ranks, is kept in the checkpoint, and by a resumed run."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.device import kernels
from megatron_ext.device.kernels import gemm_by_ability
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parallel import groups
from tests.support.program import run_program, tiny

FLAGS = tiny("--lr-decay-style constant")


def train_each(*runs: list[str]) -> list[tuple[int, str]]:
    """Run the program once for each list of flags; return how it ended, and what multiplied then."""
    found = []
    for flags in runs:
        code = run_program([*FLAGS, *flags]).code
        found.append((code, kernels._gemm))
        groups.destroy()
    return found


def saved(folder: Path, iteration: int) -> Any:
    return yaml.safe_load((folder / f"iter_{iteration:07d}" / "config.yaml").read_text())["cpu_gemm"]


@pytest.mark.parametrize("asked", ["blas", "onednn"])
def test_a_resumed_run_multiplies_as_its_checkpoint_did(asked: str, tmp_path: Path) -> None:
    folder = ["--save", str(tmp_path), "--load", str(tmp_path)]
    begins = ["--train-iters", "2", "--exit-interval", "1", *folder, "--cpu-gemm", asked]
    resumes = ["--train-iters", "2", *folder]
    each = run_ranks(2, train_each, begins, resumes)
    assert each == [[(0, asked), (0, asked)]] * 2
    assert (saved(tmp_path, 1), saved(tmp_path, 2)) == (asked, asked)


def test_a_new_run_records_what_was_chosen(tmp_path: Path) -> None:
    each = run_ranks(2, train_each, ["--train-iters", "1", "--save", str(tmp_path)])
    assert each[0] == each[1]
    assert saved(tmp_path, 1) == each[0][0][1]
    # A processor with AVX-512 is measured; another is not.
    assert each[0][0] in {(0, "blas")} if gemm_by_ability() == "blas" else {(0, "mixed"), (0, "onednn")}
