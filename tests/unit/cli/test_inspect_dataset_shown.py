"""What is in a pair, and a sample as text: what is trained on in green or in brackets."""

from pathlib import Path

import pytest

from megatron_ext.cli.inspect_dataset import document_tokens, shown, summarize
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.corpora import write_documents


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


@pytest.mark.parametrize(("number", "taken"), [(-1, False), (0, True), (2, True), (3, False)])
def test_a_document_outside_of_the_pair_is_refused(tmp_path: Path, number: int, taken: bool):
    prefix = write_documents(tmp_path / "data", [[5, 6], [], [7]])
    if taken:
        assert document_tokens(prefix, number) == [[5, 6], [], [7]][number]
        return
    with pytest.raises(ConfigurationError, match=f"document {number} of .*: the documents are 0 to 2$"):
        document_tokens(prefix, number)


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
