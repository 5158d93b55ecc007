"""Every flag of tools/preprocess_data.py, changed alone, changes what the program writes or prints."""

import base64
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prepare.commands import preprocess_data
from megatron_ext.plugins.prepare.journal import Progress
from tests.support.instructions import write_tokenizer

GOLDEN = Path(__file__).parents[3] / "golden" / "preprocess"
TEXTS = "--input texts.jsonl --output-prefix out --tokenizer-type ByteTokenizer"
TURNS = "--input turns.jsonl --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model chat"
MESSAGES = f"{TURNS} --data-format messages --json-keys turns --chat-template chatml"
IDS = "--input ids.txt --output-prefix out --tokenizer-type NullTokenizer --vocab-size 100"
GPT2 = (
    "--input texts.jsonl --output-prefix out --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt"
)
TIKTOKEN = (
    "--input texts.jsonl --output-prefix out --tokenizer-type TikTokenizer --tokenizer-model tik.json --vocab-size 300 "
    "--tiktoken-num-special-tokens 20 --append-eod"
)
CHANGES = {
    "--input": (TEXTS, "--input texts.jsonl more.txt"),
    "--extensions": (f"{TEXTS} --input mixed", "--extensions .md"),
    "--output-prefix": (TEXTS, "--output-prefix other"),
    "--tokenizer-type": (TEXTS, "--tokenizer-type NullTokenizer --vocab-size 100 --input ids.txt"),
    "--tokenizer-model": (TURNS, f"--tokenizer-model {GOLDEN / 'hf_bpe'}"),
    "--vocab-size": (IDS, "--vocab-size 70000"),
    "--vocab-file": (GPT2, "--vocab-file v2.json"),
    "--merge-file": (GPT2, "--merge-file m2.txt"),
    "--tokenizer-special-tokens": (TIKTOKEN, "--tokenizer-special-tokens <unk> <s> <mask> <pad> <cls> <sep> <a> </s>"),
    "--tiktoken-pattern": (TIKTOKEN, "--tiktoken-pattern v1"),
    "--tiktoken-num-special-tokens": (TIKTOKEN, "--tiktoken-num-special-tokens 21"),
    "--json-keys": (TEXTS, "--json-keys text title"),
    "--data-format": (TEXTS, "--data-format completion"),
    "--chat-template": (MESSAGES, "--chat-template tokenizer"),
    "--seq-length": (MESSAGES, "--seq-length 64"),
    "--train-on-inputs": (MESSAGES, "--train-on-inputs"),
    "--append-eod": (TEXTS, "--append-eod"),
    "--split-on": (f"{TEXTS} --input more.txt", "--split-on <>"),
    "--on-error": (f"{TEXTS} --input bad.jsonl --on-error skip", "--on-error log"),
    "--plain-tokenizer": (TURNS, "--plain-tokenizer"),
    "--log-interval": (TEXTS, "--log-interval 1"),
}
"""By flag: a command line, and what is added to it."""
SAME = {"--workers": "--workers 2", "--commit-interval": "--commit-interval 0"}
"""Flags on which the output does not depend; tests/unit/data/prepare shows what they do."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with inputs of each kind."""
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = [{"text": f"TEXt {number} of it 1234", "title": f"t{number}"} for number in range(5)]
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("bad.jsonl").write_text('{"text": "good"}\n{\n')
    Path("more.txt").write_text("one<>two")
    Path("mixed").mkdir()
    for name in ("a.txt", "b.md"):
        Path("mixed", name).write_text(name)
    Path("ids.txt").write_text("5 17 99")
    turns = [{"role": role, "content": f"of the {role}"} for role in ("user", "assistant")]
    Path("turns.jsonl").write_text(json.dumps({"text": "user", "turns": turns}) + "\n")
    write_tokenizer(tmp_path / "chat")
    return tmp_path


def _outcome(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, bytes], str]:
    """Run the program; return the files that it wrote, which are then removed, and its messages without times."""
    before = set(folder.iterdir())
    assert preprocess_data.main(shlex.split(line)) == 0
    said = capsys.readouterr().err
    made = {path.name: path.read_bytes() for path in set(folder.iterdir()) - before}
    for name in made:
        (folder / name).unlink()
    return made, "".join(f"{part.split(' (')[0]}\n" for part in said.splitlines())


def _write_tokenizers_of_megatron() -> None:
    letters = sorted(ByteLevel.alphabet())
    merges = ["t e", "te x", "o f"]
    for name, order in (("v.json", letters), ("v2.json", letters[::-1])):
        entries = [*order, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
        Path(name).write_text(json.dumps({entry: number for number, entry in enumerate(entries)}))
    for name, count in (("m.txt", 3), ("m2.txt", 2)):
        Path(name).write_text("#version: 0.2\n" + "".join(f"{merge}\n" for merge in merges[:count]))
    pairs = [b"12", b"34", b"EX", b"te", *(bytes([200, number]) for number in range(40))]
    pieces = [*(bytes([number]) for number in range(256)), *pairs]
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": ""}
        for rank, piece in enumerate(pieces)
    ]
    Path("tik.json").write_text(json.dumps(ranks))


@pytest.mark.parametrize("flag", CHANGES)
def test_each_flag_changes_what_is_written_or_said(flag: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if CHANGES[flag][0] in (GPT2, TIKTOKEN):
        _write_tokenizers_of_megatron()
    line, change = CHANGES[flag]
    assert _outcome(f"{line} {change}", folder, capsys) != _outcome(line, folder, capsys)


@pytest.mark.parametrize("flag", SAME)
def test_workers_and_commits_do_not_change_the_output(
    flag: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _outcome(f"{TEXTS} {SAME[flag]}", folder, capsys) == _outcome(TEXTS, folder, capsys)


def test_no_flag_is_left_out() -> None:
    shown = {
        next(name for name in action.option_strings if name.startswith("--"))
        for action in preprocess_data.make_parser()._actions
        if action.option_strings and action.dest != "help" and action.help != "==SUPPRESS=="
    }
    assert shown == CHANGES.keys() | SAME.keys()


def test_progress_is_printed_at_whole_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run had done is no merit of this one; the time left is that of the bytes that are left."""
    seconds = iter((0.0, 20.0, 40.0, 50.0))
    monkeypatch.setattr(preprocess_data.time, "perf_counter", lambda: next(seconds))
    line = preprocess_data._ProgressLine(100)
    for documents in (150, 199, 200, 250, 299, 350, 400):
        line(
            Progress(
                documents=documents, text_bytes=documents * 10**4, tokens=7, skipped=documents // 400,
                bytes_read=documents * 10, bytes_total=10**5,
            )
        )  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [
        "processed 200 documents, 2.0 MB, 7 tokens (2 documents/s, 0.03 MB/s, 1:05:20 left)",
        "processed 350 documents, 3.5 MB, 7 tokens (5 documents/s, 0.05 MB/s, 0:32:10 left)",
        "processed 400 documents, 4.0 MB, 7 tokens, 1 left out (5 documents/s, 0.05 MB/s, 0:32:00 left)",
    ]


OLD = (
    "--partitions 4 --keep-sequential-samples --keep-newlines --lang english --dataset-impl mmap --chunk-size 25 "
    "--workers 2"
)


def test_old_flags_without_effect_are_taken_with_a_warning_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40)))
    written = []
    for name, more in (("plain", ""), ("old", OLD)):
        line = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/{name} --tokenizer-type ByteTokenizer {more}"
        assert preprocess_data.main(line.split()) == 0
        written.append([(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert written[0] == written[1]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split()[1] for line in warnings] == [word for word in OLD.split() if word.startswith("--")][:-1]


@pytest.mark.parametrize(
    "flag", ["--split-sentences", "--find-optimal-num-workers", "--max-documents 5", "--workers-to-check 1 2 4"]
)
def test_old_flags_that_would_write_other_documents_are_refused(flag: str, tmp_path: Path):
    line = f"--input in --output-prefix {tmp_path}/out --tokenizer-type ByteTokenizer --partitions 2 {flag}"
    with pytest.raises(ConfigurationError, match=f"^{flag.split()[0]} is not supported"):
        preprocess_data.main(line.split())
