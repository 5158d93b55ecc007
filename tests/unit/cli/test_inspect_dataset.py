"""tools/inspect_dataset.py: a document and the samples of a run as text, of a small real pair."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.cli import inspect_dataset
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.errors import ConfigurationError

TEXTS = [f"this is document {number}." for number in range(40)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for text in TEXTS:
            writer.add_tokens(np.frombuffer(text.encode(), np.uint8).astype(np.uint16).tobytes(), [len(text)])
    return str(tmp_path / "data")


def _shown(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert inspect_dataset.main(shlex.split(line)) == 0
    return capsys.readouterr().out


def test_a_document_is_shown_as_text_or_as_ids(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _shown(f"document {prefix} 4 --tokenizer-type ByteTokenizer", capsys) == f"{TEXTS[4]}\n"
    assert _shown(f"document {prefix} 0", capsys) == " ".join(str(byte) for byte in TEXTS[0].encode()) + "\n"
    with pytest.raises(ConfigurationError, match="give the number of the document behind the prefix"):
        inspect_dataset.main(["document", prefix])


def test_the_samples_of_a_step_are_shown_by_their_position(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"""
        --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --lr 1e-3 --micro-batch-size 1
        --global-batch-size 2 --train-iters 5 --eval-interval 0 --tokenizer-type ByteTokenizer --data-path {prefix}
        --split 1 --data-cache-path {Path(prefix).parent}/cache --world-size 1
    """
    step = _shown(f"sample --step 2 {run}", capsys)
    samples = [_shown(f"sample --sample {number} {run}", capsys) for number in range(4)]
    assert step == samples[2] + samples[3]
    assert len(set(samples)) == 4
    head, text = samples[0].splitlines()
    assert head.startswith("--- sample 0: window ")
    assert head.endswith(f" of {prefix}")
    assert text in "".join(TEXTS)
    assert len(text) == 16
    for wrong in ("-1", "10"):
        with pytest.raises(ConfigurationError, match=f"sample {wrong}: the training has samples 0 to 9"):
            inspect_dataset.main(shlex.split(f"sample --sample={wrong} {run}"))
