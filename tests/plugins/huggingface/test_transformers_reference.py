"""transformers is the reference also where packages of GPU kernels are installed."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import write_model

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = (
    "import json, sys; from megatron_ext.plugins.huggingface import transformers_reference as reference;"
    "print(json.dumps(reference.their_logits(sys.argv[1], [[1, 2, 3, 4]]).tolist()))"
)
AFTER_A_TRAINING = """
import sys
from megatron_ext import device
device.install("cpu")
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)
print(*model.model.rotary_emb.inv_freq.tolist())
"""

# Of the second tier: an interpreter of its own; tests/distributed/test_huggingface.py compares all logits.
pytestmark = pytest.mark.full


@pytest.mark.skipif(
    not [*metadata.Distribution.discover(name="fla-core")], reason="pip install -r requirements-dev.txt"
)
def test_a_hybrid_is_computed_on_a_cpu_with_fla_core_installed(tmp_path: Path) -> None:
    """In a process that has not hidden it, as tests do: transformers 5.23 calls its kernels for host memory, too."""
    model = write_model(tmp_path, "Qwen3-Next")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    import torch

    expected = model(torch.tensor([[1, 2, 3, 4]])).logits
    torch.testing.assert_close(torch.tensor(json.loads(run.stdout)), expected, rtol=1e-4, atol=1e-4)


def test_a_model_is_loaded_whole_in_a_process_of_ours(tmp_path: Path) -> None:
    """As in a script that trains and then asks transformers: with the rotary frequencies, which are in no file."""
    model: Any = write_model(tmp_path, "Llama 2")
    # Memory that is handed out again begins with these bytes, so that it is not right by chance.
    environment = {**os.environ, "MALLOC_PERTURB_": "90"}
    command = [sys.executable, "-c", AFTER_A_TRAINING, tmp_path]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert [*map(float, run.stdout.split())] == model.model.rotary_emb.inv_freq.tolist()
