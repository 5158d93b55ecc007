"""What is read from the words of nvidia-smi and of the driver."""

import pytest

from megatron_ext.device import gpu_inventory


def test_links_of_sixteen_gpus_are_by_pairs() -> None:
    """Each pair once, by numbers of two digits too; other devices of the matrix are none."""
    names = [f"GPU{number}" for number in range(16)]
    lines = ["\t" + "\t".join(f"\x1b[4m{name}\x1b[0m" for name in [*names, "NIC0", "CPU Affinity"])]
    for row, name in enumerate(names):
        kinds = ["X" if row == column else f"NV{min(row, column)}-{max(row, column)}" for column in range(16)]
        lines.append("\t".join([name, *kinds, "PIX", "0-63"]))
    lines.append("\t".join(["NIC0", *["PIX"] * 16, "X", ""]))
    found = gpu_inventory.links("\n".join([*lines, "", "Legend:", "  X    = Self"]))
    assert found == {(one, other): f"NV{one}-{other}" for one in range(16) for other in range(one + 1, 16)}
    assert gpu_inventory.links("No devices were found") == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build", "570.86"),
        ("NVRM version: none", "unknown"),
    ],
)
def test_the_drivers_version(text: str, version: str) -> None:
    assert gpu_inventory.driver_version(text) == version
