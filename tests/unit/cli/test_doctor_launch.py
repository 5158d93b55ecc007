"""tools/doctor.py examines the launch that its flags, the launcher or the machine name."""

import pytest

from megatron_ext.cli import doctor
from tests.support.wrong_flags import BASE


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
