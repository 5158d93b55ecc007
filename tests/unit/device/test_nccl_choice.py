"""--nccl-backend: which implementation of NCCL the environment asks torch for."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.device import nccl_choice
from megatron_ext.device.nccl_choice import VARIABLE, choose

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("backend", "before", "after", "is_told"),
    [
        ("nccl-legacy", None, "0", False),
        ("nccl-legacy", "0", "0", False),
        ("nccl-legacy", "1", "0", True),
        ("nccl2", None, "1", False),
        ("nccl2", "1", "1", False),
        ("nccl2", "yes", "1", False),  # torch takes nccl2 for anything but 0
        ("nccl2", "0", "1", True),
    ],
)
def test_the_flag_decides(backend: str, before: str | None, after: str, is_told: bool) -> None:
    environment = {} if before is None else {VARIABLE: before}
    warning = choose(backend, environment)
    assert environment == {VARIABLE: after}
    assert (warning is not None) == is_told
    if warning is not None:
        [other] = {"nccl-legacy", "nccl2"} - {backend}
        assert f"use --nccl-backend {other}" in warning
        assert choose(other, {VARIABLE: before or ""}) is None, "the fix works"


@pytest.mark.full
@pytest.mark.parametrize("backend", ["nccl-legacy", "nccl2"])
def test_it_is_set_before_torch_is_there_and_the_banner_says_it(backend: str) -> None:
    program = (
        "import sys, os\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch' and not seen: seen.append(os.environ.get('TORCH_DIST_USE_NCCL2'))\n"
        "seen = []\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from megatron_ext import device\n"
        f"device.install('auto', engine=False, nccl_backend={backend!r})\n"
        "from megatron_ext.device.cuda import CudaDevice\n"
        "print(*seen, object.__new__(CudaDevice).backend_text())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split(maxsplit=1) == ["0" if backend == nccl_choice.LEGACY else "1", f"nccl ({backend})\n"]


def test_whoever_knows_a_runs_layout_passes_its_backend_on() -> None:
    """The flag would be accepted there, and do nothing."""
    left_out = []
    for path in (path for folder in ("megatron_ext", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "layout.device" in text else ():
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("install") and node.args):
                continue
            knows = ast.unparse(node.args[0]).endswith("layout.device")
            if knows and "nccl_backend" not in {given.arg for given in node.keywords}:
                left_out.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert left_out == []
