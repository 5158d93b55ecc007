"""What inference is made of, each alone: lists of tasks, windows, streams, choices of tokens."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from megatron_ext.cli import generate, tasks
from megatron_ext.cli.generate import encoder
from megatron_ext.config.eval_tasks import EvalTask, read_eval_tasks
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.inference.files import read_documents, read_items, read_prompts
from megatron_ext.inference.generation import text_after
from megatron_ext.inference.streaming import Stream
from megatron_ext.tokenizer.byte import ByteTokenizer
from megatron_ext.tokenizer.library import LibraryTokenizer
from tests.support.instructions import write_tokenizer


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


@pytest.mark.parametrize(
    ("main", "line", "said"),
    [
        (generate.main, "--load x --prompt hello", "--prompt; did you mean --prompts?"),
        (tasks.main, "--load x --taks LAMBADA", "--taks; did you mean --task?"),
        (tasks.main, "--task WIKITEXT103 --load x", "WIKITEXT103 is --task PERPLEXITY here"),
    ],
)
def test_a_slip_of_the_pen_in_a_flag_of_the_tool_is_named(main: Callable[[list[str]], int], line: str, said: str):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        main(line.split())


def test_files_of_items(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"text": "a\\nb"}\n\n{"text": "c"}\n')
    assert read_documents(path) == ["a\nb", "c"]
    (tmp_path / "all.txt").write_text("a\nb\n")
    assert read_documents(tmp_path / "all.txt") == ["a\nb\n"]
    assert read_prompts(tmp_path / "all.txt") == ["a", "b"]
    (tmp_path / "all.txt").write_bytes("a\u2028b\x0cc\r\n\né\n".encode())
    assert read_prompts(tmp_path / "all.txt") == ["a\u2028b\x0cc", "é"], "a line of a prompt file ends where JSON's do"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"items\.jsonl:2: no text"):
        list(read_items(path, ["text"]))
    path.write_text('{"text": 4}\n')
    with pytest.raises(DataError, match=r"items\.jsonl:1: text is int"):
        read_documents(path)


def _streamed(text: str, stop: tuple[str, ...], final: str) -> list[str]:
    """Return what is written after each byte of the text, and at the end."""
    pieces: list[str] = []
    stream = Stream(ByteTokenizer(), b"a", stop, pieces.append)
    tokens = list(text.encode())
    for count in range(1, len(tokens) + 1):
        stream(0, tokens[:count])
    stream.finish(final)
    return pieces


def test_a_stream_writes_what_is_certain() -> None:
    assert _streamed("aé!", (), "aé!") == ["a", "é", "!"]
    assert _streamed("ab\n\nc", ("\n\n",), "ab") == ["a", "b"]
    assert _streamed("ab\nc", ("\n\n",), "ab\nc") == ["a", "b", "\nc"]


def test_a_blank_before_the_first_word_is_part_of_the_text() -> None:
    model = Tokenizer(models.WordLevel({"\u2581once": 0, "\u2581upon": 1, "\u2581a": 2, "end": 3}, unk_token="end"))
    model.decoder = decoders.Metaspace()
    tokenizer: Any = LibraryTokenizer(model, "end")
    assert tokenizer.decode([1, 2]) == "upon a", "such tokenizers leave it out"
    assert text_after(tokenizer, [0], [1, 2]) == " upon a"
    pieces: list[str] = []
    stream = Stream(tokenizer, [0], (), pieces.append)
    stream(0, [1])
    stream(0, [1, 2])
    assert pieces == [" upon", " a"]
    assert text_after(ByteTokenizer(), "é".encode(), "ü".encode()) == "ü"


def test_a_prompt_is_a_users_message_in_a_chat_template(tmp_path: Path) -> None:
    from megatron_ext.tokenizer.huggingface import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "tokenizer"))
    text = "<|im_start|>user\nwhat is two<|im_end|>\n<|im_start|>assistant\n"
    for template in ("tokenizer", "chatml"):
        ids = encoder(SimpleNamespace(tokenizer=tokenizer), template)("what is two")
        assert ids == tokenizer.encode_rendered(text)[0]
        assert tokenizer.decode(ids) == text
    bytes_alone = SimpleNamespace(tokenizer=ByteTokenizer())
    asked = bytes(encoder(bytes_alone, "alpaca")("Name a colour.")).decode()
    assert asked.endswith("request.\n\n### Instruction:\nName a colour.\n\n### Response:\n")
    assert encoder(bytes_alone, None)("") == [256]
    assert encoder(SimpleNamespace(tokenizer=None), None)("5 17") == [5, 17]
    for model, template, message in (
        (bytes_alone, "nowhere", "--chat-template nowhere is no file"),
        (SimpleNamespace(tokenizer=None), "chatml", "--chat-template needs the model's tokenizer"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            encoder(model, template)
