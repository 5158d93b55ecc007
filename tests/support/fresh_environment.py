"""A virtual environment as the set-up leaves one, without its 5 GB: it sees the packages of the tests' own."""

import subprocess
import sys
from pathlib import Path

PROGRAMS = ("torchrun", "tensorboard")


def make_environment(folder: Path) -> None:
    """Make a virtual environment in `folder`, with the packages of this interpreter's and their programs.

    `megatron-ext` is not among them, although this interpreter's environment may have it.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "of_the_tests.pth").write_text("\n".join(seen) + "\n")
    for program in PROGRAMS:
        (folder / "bin" / program).symlink_to(Path(sys.executable).with_name(program))
