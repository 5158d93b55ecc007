"""Which manifest speaks of a pair, and what is said of the tokenizer that it names."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.data.data_manifest import Judged, MadeWith, judge, made_with, manifests_of, read_manifest
from megatron_ext.tokenizer.simple import ByteTokenizer, NullTokenizer
from megatron_ext.tokenizer.tokenizer_record import describe_tokenizer, same_tokenizer, short_record, tokenizer_record


def _manifest(path: Path, size: int, name: str = "one") -> None:
    content = {"tokenizer": {"type": name}, "outputs": {"other": {"token_bytes": 1}, name: {"token_bytes": size}}}
    path.write_text(json.dumps(content))


def test_the_manifest_of_the_longest_name_of_this_size_speaks(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a_text_document")
    Path(f"{prefix}.bin").write_bytes(bytes(6))
    assert made_with(prefix) is None
    for size, name, expected in (
        (6, "a", "a"),
        (7, "a_text", "a"),  # of a file of another size
        (6, "a_text", "a_text"),
        (6, "a_text_document", "a_text_document"),
        (6, "a_text_document_more", "a_text_document"),
        (6, "other", "a_text_document"),
    ):
        _manifest(tmp_path / f"{name}_manifest.json", size, name)
        assert made_with(prefix) == MadeWith({"type": expected}, f"{tmp_path}/{expected}_manifest.json")
    assert [found["tokenizer"]["type"] for found in manifests_of(prefix)] == ["a_text_document", "a_text", "a"]


def test_a_pair_that_is_not_there_has_no_known_tokenizer(tmp_path: Path) -> None:
    for prefix in ("memory://nowhere/a", str(tmp_path / "none")):
        assert made_with(prefix) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"tokenizer": {}}',
        '{"tokenizer": {}, "outputs": []}',
        '{"tokenizer": {}, "outputs": {"a": 1}}',
        '{"tokenizer": {}, "outputs": {"a": {}, "b": 1}}',
        '{"tokenizer": "x", "outputs": {"a": {}}}',
    ],
)
def test_content_that_is_no_manifest_is_passed_over(content: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_text(content)
    assert read_manifest(tmp_path / "m") is None
    assert read_manifest(tmp_path / "none") is None
    (tmp_path / "m").write_text('{"tokenizer": {}, "outputs": {"a": {}}}')
    assert read_manifest(tmp_path / "m") == {"tokenizer": {}, "outputs": {"a": {}}}


class Spaced(ByteTokenizer):
    """Bytes by another name, and with another digest."""

    def identity(self) -> dict[str, str | int]:
        return {"type": "Spaced", "sha256": "0123456789abcdef"}


class Shifted(Spaced):
    def encode(self, text: str) -> list[int]:
        return [token ^ 1 for token in super().encode(text)]


def _judged(made: dict[str, Any], tokenizer: Any) -> Judged | None:
    return judge("--data-path x", MadeWith(made, "x_manifest.json"), tokenizer)


@pytest.mark.parametrize(
    ("ids", "run", "is_wrong"),
    [(257, 257, False), (256, 257, False), (258, 257, True), (None, 257, True), ("256", 257, True)],
)
def test_ids_of_no_known_text_go_with_every_tokenizer_that_has_them(ids: Any, run: int, is_wrong: bool) -> None:
    """NullTokenizer on either side: a warning, unless there are more ids than the run has."""
    assert ByteTokenizer.vocab_size == run
    made = {"type": "NullTokenizer", "vocab_size": ids, "eod": 0}
    assert _judged(made, ByteTokenizer()) == Judged(
        f"--data-path x was made with NullTokenizer ({ids} ids, end of document 0), as x_manifest.json says; the run "
        "takes its ids as those of ByteTokenizer (257 ids, end of document 256)",
        is_wrong,
    )
    found = _judged({"type": "ByteTokenizer", "vocab_size": ids, "eod": 0}, NullTokenizer(run))
    assert found is not None
    assert found.is_wrong == is_wrong
    assert _judged(short_record(NullTokenizer(9)), NullTokenizer(9)) is None


def test_a_tokenizer_of_another_type_with_the_same_ids_is_the_same() -> None:
    assert _judged(short_record(ByteTokenizer()), ByteTokenizer()) is None
    assert _judged(tokenizer_record(Spaced()), ByteTokenizer()) is None
    assert _judged(tokenizer_record(Shifted()), ByteTokenizer()) == Judged(
        "--data-path x was made with Spaced 0123456789ab (257 ids, end of document 256), as x_manifest.json says, but "
        "the run's tokenizer is ByteTokenizer (257 ids, end of document 256): the same ids are other text",
        True,
    )
    short = _judged(short_record(Spaced()), ByteTokenizer())
    assert short is not None
    assert short.is_wrong, "of a short record nobody knows the ids"


FULL = {
    "type": "A", "sha256": "1", "vocab_size": 5, "eod": 4, "ids_sha256": "i", "vocabulary_sha256": "v"
}  # fmt: skip


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, True),
        ({"sha256": "2"}, True),
        ({"type": "B"}, True),
        ({"type": "B", "vocabulary_sha256": "w"}, True),  # shows the same special token differently
        ({"sha256": "2", "vocabulary_sha256": "w"}, False),
        ({"type": "B", "ids_sha256": "j"}, False),
        ({"ids_sha256": "j"}, True),  # the same files; another version has other texts
        ({"eod": 3}, False),
        ({"vocab_size": 6}, False),
        ({"type": "B", "eod": 3}, False),
        ({"type": "B", "vocab_size": 6}, False),
    ],
)
def test_records_of_one_tokenizer(other: dict[str, Any], same: bool) -> None:
    assert same_tokenizer(FULL, {**FULL, **other}) == same
    assert same_tokenizer({**FULL, **other}, FULL) == same


def test_short_records_of_two_tokenizers_are_not_known_as_equal() -> None:
    """As older manifests have them: no digest of ids on either side is no equal digest."""
    short = {name: FULL[name] for name in ("type", "sha256", "vocab_size", "eod")}
    assert same_tokenizer(short, short)
    for other in ({"sha256": "2"}, {"type": "B"}, {"type": "B", "sha256": "2"}):
        assert not same_tokenizer(short, {**short, **other})
        assert not same_tokenizer(short, {**FULL, **other})
        assert not same_tokenizer({**FULL, **other}, short)


def test_what_a_record_holds() -> None:
    """Digests of the texts of all ids and of the ids of texts; none of a tokenizer without text."""
    record = tokenizer_record(ByteTokenizer())
    assert set(record) == {"type", "vocab_size", "eod", "ids_sha256", "vocabulary_sha256"}

    class OtherEnd(ByteTokenizer):
        def decode(self, ids: Any) -> str:
            return "</s>" if list(ids) == [256] else super().decode(ids)

    assert tokenizer_record(OtherEnd())["vocabulary_sha256"] != record["vocabulary_sha256"], "the last id"
    assert tokenizer_record(OtherEnd())["ids_sha256"] == record["ids_sha256"]
    assert tokenizer_record(Shifted())["ids_sha256"] != record["ids_sha256"]
    null = {"type": "NullTokenizer", "vocab_size": 9, "eod": 8}
    assert tokenizer_record(NullTokenizer(9)) == short_record(NullTokenizer(9)) == null


def test_a_tokenizer_is_described_in_words() -> None:
    assert describe_tokenizer(FULL) == "A 1 (5 ids, end of document 4)"
    assert describe_tokenizer({**FULL, "sha256": "0123456789abcdef"}) == "A 0123456789ab (5 ids, end of document 4)"
    assert describe_tokenizer(short_record(NullTokenizer(3))) == "NullTokenizer (3 ids, end of document 2)"
