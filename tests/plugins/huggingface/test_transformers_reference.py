"""transformers is the reference also where packages of GPU kernels are installed."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.hf_models import write_model

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = (
    "import json, sys; from megatron_ext.plugins.huggingface import transformers_reference as reference;"
    "print(json.dumps(reference.their_logits(sys.argv[1], [[1, 2, 3, 4]]).tolist()))"
)

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
