"""What examples/pretrain_gpu.sh starts on eight GPUs, with torchrun's place taken by a program that shows its words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.parts.catalogue import count
from tests.support.guide_launches import dry_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("variables", "tensor", "replicas"), [({}, 1, 8), ({"TP": "2", "NODES": "2"}, 2, 8)])
def test_the_model_fits_a_gpu_and_is_not_cut_unless_asked(
    variables: dict[str, str], tensor: int, replicas: int, tmp_path: Path
) -> None:
    """A rank takes 27 GB by --dry-run's estimate: tensor parallelism would only send."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in ("TP", "GPUS", "NODES", "NODE_RANK")}
    given = {"TRAIN": "t", "VALID": "v", "TOKENIZER": "k", "SAVE": str(tmp_path / "save"), "VIRTUAL_ENV": sys.prefix}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{clean['PATH']}"
    said = subprocess.run(
        ["bash", str(ROOT / "examples/pretrain_gpu.sh")],
        env={**clean, **given, **variables, "PATH": path}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    place = said.index("pretrain_gpt.py")
    flags = said[place + 1 :]
    for name in ("--train-data-path", "--valid-data-path", "--load"):  # which are not here
        at = flags.index(name)
        del flags[at : at + 2]
    config = dry_run(said[:place], flags)
    layout = config.layout
    assert (layout.tensor_model_parallel_size, layout.data_parallel_size) == (tensor, replicas)
    assert layout.use_distributed_optimizer
    assert 1.2e9 < count(config) < 1.5e9, "with the 50,257 entries of the stand-in's vocabulary"
