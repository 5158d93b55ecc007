"""tools/convert_checkpoint.py: what it says of an export; tests/distributed/test_huggingface.py converts models."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.forkserver.ranks import RankError
from megatron_ext.plugins.huggingface import exported_model
from megatron_ext.plugins.huggingface.commands import convert_checkpoint
from megatron_ext.plugins.huggingface.exported_model import Agreement, LossAgreement


def test_an_export_without_a_tokenizer_says_why() -> None:
    said = [
        convert_checkpoint._why_no_tokenizer(*given) for given in (("X", True), ("NullTokenizer", False), (None, False))
    ]
    assert said == [
        "no tokenizer was written, as --no-tokenizer asks for",
        "no tokenizer was written: NullTokenizer has no text; give the model token ids",
        "no tokenizer files were at hand; add them to the folder yourself",
    ]


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("5GB", 5 * 10**9), ("20MB", 20 * 10**6), ("3KB", 3000), ("07KB", 7000)]
)
def test_sizes_of_files(text: str, size: int) -> None:
    assert convert_checkpoint._bytes(text) == size


@pytest.mark.parametrize("text", ["0", "0GB", "", "GB", "5TB", "5 GB", "-5", "1.5GB", "5B", "5GBGB"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a size; write for example 5GB"):
        convert_checkpoint._bytes(text)


def test_an_export_that_changes_the_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its logits or its loss, as transformers computes them of the written folder."""
    monkeypatch.setattr(exported_model, "compare_logits", lambda *_: Agreement(1.0, 1.0, 5))
    monkeypatch.setattr(exported_model, "compare_losses", lambda *_: LossAgreement(1.0, 2.0, 5))
    source: Any = None
    with pytest.raises(DataError, match=r"logits .* 1\.00e\+00 .*more than rounding\. Do not use made"):
        convert_checkpoint._verify(source, Path("made"), "F32")
    with pytest.raises(DataError, match=r"loss over 5 tokens .*more than rounding\. Do not use made"):
        convert_checkpoint._check_loss(source, Path("made"), "F32", "corpus", 5)


def test_a_type_that_transformers_does_not_know_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a family of one's own."""

    def fails(*_: object) -> None:
        raise RankError(
            [(0, "ValueError: ... model type `shifty` but Transformers does not recognize this architecture.")]
        )

    monkeypatch.setattr(exported_model, "compare_logits", fails)
    source: Any = None
    with pytest.raises(ConfigurationError, match=r"made is written, and the transformers .*; give --no-verify$"):
        convert_checkpoint._verify(source, Path("made"), "F32")
