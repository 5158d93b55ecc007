"""tools/inspect_dataset.py: a document and the samples of a run as text, of a small real pair."""

import os
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare.commands import inspect_dataset
from megatron_ext.plugins.prepare.commands.inspect_dataset import Summary, document_tokens, shown, summarize
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.corpora import write_documents
from tests.support.pages import texts

TEXTS = [f"this is document {number}." for number in range(40)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_documents(tmp_path / "data", [list(text.encode()) for text in TEXTS])


def _shown(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert inspect_dataset.main(shlex.split(line)) == 0
    return capsys.readouterr().out


def test_a_summary_has_the_lengths_of_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_documents(tmp_path / "data", [[1], [2, 3], [], [4, 5, 6], [7] * 8])
    assert summarize(prefix) == Summary("uint16", 5, 1, 4, 14, 1, 8, [1, 2, 0, 1])
    lines = _shown(f"show {prefix}", capsys).splitlines()
    assert lines[:3] == [
        f"{prefix}: 14 tokens of type uint16",
        "documents 5, 1 of them empty; sequences 4",
        "tokens in a sequence: 1 to 8, mean 3.5",
    ]
    assert [line.split()[:4] for line in lines[3:]] == [
        ["1", "to", "1", "1"],
        ["2", "to", "3", "2"],
        ["4", "to", "7", "0"],
        ["8", "to", "15", "1"],
    ]


def test_a_summary_is_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, page = write_documents(tmp_path / "data", [[1], [2, 3], [], [4, 5, 6], [7] * 8]), tmp_path / "page.html"
    said = _shown(f"show {prefix} --html {page}", capsys)
    seen = texts(page.read_text())
    assert "\n".join(said.splitlines()[:3]) in seen
    for length, count in ((1, 1), (2, 2), (4, 0), (8, 1)):
        assert f"tokens (up to twice as many) {length}: {count}" in seen
    with pytest.raises(ConfigurationError, match="--html goes with show, not with verify; leave it out"):
        inspect_dataset.main(["verify", prefix, "--html", str(page)])


def test_a_document_is_shown_as_text_or_as_ids(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _shown(f"document {prefix} 4 --tokenizer-type ByteTokenizer", capsys) == f"{TEXTS[4]}\n"
    assert _shown(f"document {prefix} 0", capsys) == " ".join(str(byte) for byte in TEXTS[0].encode()) + "\n"
    with pytest.raises(ConfigurationError, match="give the number of the document behind the prefix"):
        inspect_dataset.main(["document", prefix])
    assert _shown(f"document {prefix} 39 --tokenizer-type ByteTokenizer", capsys) == f"{TEXTS[39]}\n"
    for wrong in (-1, 40):
        with pytest.raises(ConfigurationError, match=f"^document {wrong} of {prefix}: the documents are 0 to 39$"):
            document_tokens(prefix, wrong)


def test_verifying_names_the_token_outside_of_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_documents(tmp_path / "data", [[1, 2], [], [3, 300, 400]])
    assert _shown(f"verify {prefix} --vocab-size 401", capsys) == f"{prefix}: whole, every token is below 401\n"
    with pytest.raises(DataError, match=r"data\.bin: token 300 at byte 6 \(document 2\) is outside a voc"):
        inspect_dataset.main(["verify", prefix, "--vocab-size", "300"])
    negative = write_documents(tmp_path / "negative", [[1, -1]], np.int32)
    with pytest.raises(DataError, match=r"token -1 at byte 4 \(document 0\)"):
        inspect_dataset.main(["verify", negative, "--vocab-size", "300"])
    os.truncate(f"{prefix}.idx", 60)
    with pytest.raises(DataError):
        inspect_dataset.main(["verify", prefix])


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
    for wrong in ("-1", "9999"):
        with pytest.raises(ConfigurationError, match=f"sample {wrong}: the training has samples 0 to "):
            inspect_dataset.main(shlex.split(f"sample --sample={wrong} {run}"))


def test_a_huge_count_in_the_header_allocates_nothing(tmp_path: Path):
    prefix = write_documents(tmp_path / "data", [[1, 2]])
    idx = bytearray(Path(f"{prefix}.idx").read_bytes())
    idx[18:26] = (2**62).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(idx)
    with pytest.raises(DataError, match="its header speaks of 4611686018427387904 sequences"):
        summarize(prefix)
    Path(f"{prefix}.idx").write_bytes(b"")
    with pytest.raises(DataError, match="has 0 bytes"):
        summarize(prefix)


def test_the_shortest_and_the_longest_sequence_are_found_anywhere(tmp_path: Path):
    for documents, shortest, longest in (([[1] * 3, [1], [1] * 2], 1, 3), ([[1], [1] * 5], 1, 5), ([[1] * 4], 4, 4)):
        found = summarize(write_documents(tmp_path / "data", documents))
        assert (found.shortest, found.longest) == (shortest, longest)
        assert sum(found.histogram) == len(documents)


@pytest.mark.parametrize("begins", ["10010", "00100", "00000", "11111"])
@pytest.mark.parametrize("counts", ["00000", "11111", "01100"])
def test_a_sample_is_shown_with_its_documents(begins: str, counts: str):
    """Tokens are trained on where the loss of the token before them counts; no document's number is none."""
    sample = {
        "tokens": list(b"abcde"),
        "loss_mask": [float(one) for one in counts],
        "document_begins": [one == "1" for one in begins],
    }
    expected, open_ = "", False
    for place, letter in enumerate("abcde"):
        trained = place > 0 and counts[place - 1] == "1"
        new = place > 0 and begins[place] == "1"
        if open_ and (new or not trained):
            expected, open_ = expected + "⟧", False
        expected += "\n--- document\n" if new else ""
        if trained and not open_:
            expected, open_ = expected + "⟦", True
        expected += letter
    assert shown(ByteTokenizer(), sample, in_color=False) == expected + "⟧" * open_
    colored = shown(ByteTokenizer(), sample, in_color=True)
    assert colored.replace("\x1b[32m", "⟦").replace("\x1b[0m", "⟧") == expected + "⟧" * open_


def test_escape_sequences_of_a_text_are_written_out() -> None:
    """The text of a document may hold escape sequences, the same ones too."""
    text = b"a\x1b[32m\x1b[2J"
    sample = {
        "tokens": list(text),
        "loss_mask": [1.0] * len(text),
        "document_begins": [True, *[False] * (len(text) - 1)],
    }
    assert shown(ByteTokenizer(), sample, in_color=True) == "a\x1b[32m\\x1b[32m\\x1b[2J\x1b[0m"
