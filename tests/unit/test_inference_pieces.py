"""What inference is made of, each alone: lists of tasks, windows, streams, choices of tokens."""

from pathlib import Path

import pytest

from megatron_ext.config.eval_tasks import EvalTask, read_eval_tasks
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.inference.files import read_documents, read_items, read_prompts
from megatron_ext.inference.streaming import Stream
from megatron_ext.tokenizer.byte import ByteTokenizer


def test_a_list_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    text = f"""
    last:
      task: LAMBADA
      valid_data: {tmp_path}/a.jsonl
      strict_lambada: true
    wiki: {{task: PERPLEXITY, valid_data: ["{tmp_path}/a.jsonl"], overlapping_eval: 32}}
    """
    (tmp_path / "tasks.yaml").write_text(text)
    files = (f"{tmp_path}/a.jsonl",)
    assert read_eval_tasks(str(tmp_path / "tasks.yaml")) == [
        EvalTask("last", "LAMBADA", files, strict_lambada=True),
        EvalTask("wiki", "PERPLEXITY", files, overlapping_eval=32),
    ]


def test_all_that_is_wrong_with_a_list_is_named(tmp_path: Path) -> None:
    text = """
    first: {task: GLUE, valid_data: nowhere.jsonl}
    second: {task: LAMBADA, valid_data: [], strict: true}
    third: 4
    fourth: {task: PERPLEXITY, valid_data: [], overlapping_eval: 0}
    """
    (tmp_path / "tasks.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_eval_tasks(str(tmp_path / "tasks.yaml"))
    said = "\n".join(caught.value.problems)
    for part in (
        "first: task is GLUE; choose PERPLEXITY, LAMBADA, MULTIPLE_CHOICE",
        "first: nowhere.jsonl is no file",
        "second: unknown strict; known are task, valid_data, overlapping_eval, strict_lambada",
        "third: give its task and valid_data",
        "fourth: no valid_data",
        "fourth: overlapping_eval is 0; give at least 1",
    ):
        assert part in said


def test_files_of_items(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"text": "a\\nb"}\n\n{"text": "c"}\n')
    assert read_documents(path) == ["a\nb", "c"]
    (tmp_path / "all.txt").write_text("a\nb\n")
    assert read_documents(tmp_path / "all.txt") == ["a\nb\n"]
    assert read_prompts(tmp_path / "all.txt") == ["a", "b"]
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"items\.jsonl:2: no text"):
        list(read_items(path, ["text"]))
    path.write_text('{"text": 4}\n')
    with pytest.raises(DataError, match=r"items\.jsonl:1: text is int"):
        read_documents(path)


def _streamed(text: str, stop: tuple[str, ...], final: str) -> list[str]:
    """Return what is written after each byte of the text, and at the end."""
    pieces: list[str] = []
    stream = Stream(ByteTokenizer(), stop, pieces.append)
    tokens = list(text.encode())
    for count in range(1, len(tokens) + 1):
        stream(0, tokens[:count])
    stream.finish(final)
    return pieces


def test_a_stream_writes_what_is_certain() -> None:
    assert _streamed("aé!", (), "aé!") == ["a", "é", "!"]
    assert _streamed("ab\n\nc", ("\n\n",), "ab") == ["a", "b"]
    assert _streamed("ab\nc", ("\n\n",), "ab\nc") == ["a", "b", "\nc"]
