"""A folder that transformers reads otherwise is said before a corpus is made of it, with a remedy that works."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.probe_texts import probe_texts

# Of the second tier: tests/unit/tokenizer compares ids with those of tokenizers.
pytestmark = pytest.mark.full

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
DIGITS_ALONE = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def _folder(path: Path, named: str | None, split: dict[str, Any] | None = None) -> Path:
    """A byte-level BPE of the repository with another class, and where it is given another split."""
    shutil.copytree(GOLDEN / "hf_bpe", path)
    model = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(model | ({"pre_tokenizer": split} if split else {})))
    _set_class(path, named)
    return path


def _set_class(folder: Path, named: str | None) -> None:
    path = folder / "tokenizer_config.json"
    settings = {name: value for name, value in json.loads(path.read_text()).items() if name != "tokenizer_class"}
    path.write_text(json.dumps(settings | ({"tokenizer_class": named} if named else {})))


def _warnings(folder: Path, out: Path) -> list[str]:
    notes: list[str] = []
    job = EncodeJob((str(GOLDEN / "input.jsonl"),), str(out), "HuggingFaceTokenizer", str(folder))
    encode_files(job, note=notes.append)
    return [words for words in notes if words.startswith("warning:")]


@pytest.mark.parametrize("named", ["GPT2TokenizerFast", "Qwen2Tokenizer"])
def test_a_class_that_transformers_rebuilds_is_said_with_the_remedy(named: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = _folder(tmp_path / "tokenizer", named, DIGITS_ALONE)
    ours = build_tokenizer("HuggingFaceTokenizer", str(folder))
    texts = probe_texts(ours)
    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert any(theirs(text).input_ids != ours.encode(text) for text in texts)
    [words] = _warnings(folder, tmp_path / "before")
    assert f"AutoTokenizer rebuilds the tokenizer as {named} and gives other ids than tokenizer.json" in words
    assert '"tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json' in words

    _set_class(folder, "PreTrainedTokenizerFast")
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert all(theirs(text).input_ids == ours.encode(text) for text in texts)
    assert not _warnings(folder, tmp_path / "after")
    corpora = [(tmp_path / f"{name}_text_document.bin").read_bytes() for name in ("before", "after")]
    assert corpora[0] == corpora[1]


def test_a_class_that_gives_the_same_ids_is_nothing_to_say(tmp_path: Path) -> None:
    for named in ("GPT2Tokenizer", None):
        assert not _warnings(_folder(tmp_path / f"{named}", named), tmp_path / f"{named}_out")


def test_a_folder_that_transformers_cannot_read_is_said(tmp_path: Path) -> None:
    [words] = _warnings(_folder(tmp_path / "tokenizer", "BertJapaneseTokenizer"), tmp_path / "out")
    assert "AutoTokenizer cannot read it (BertJapaneseTokenizer: " in words
