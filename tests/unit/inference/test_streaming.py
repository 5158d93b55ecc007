"""What inference is made of, each alone: lists of tasks, windows, streams, choices of tokens."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from megatron_ext.checkpoint.native import resume
from megatron_ext.cli import generate, tasks
from megatron_ext.cli.generate import encoder
from megatron_ext.config.parse.eval_tasks import EvalTask, read_eval_tasks
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.inference import leader
from megatron_ext.inference.files import read_documents, read_items, read_prompts
from megatron_ext.inference.generation import _stop_in, text_after
from megatron_ext.inference.sampling import Sampling
from megatron_ext.inference.scoring import Score
from megatron_ext.inference.streaming import Stream
from megatron_ext.inference.tasks import _choice_results, _multiple_choice
from megatron_ext.tokenizer.byte import ByteTokenizer
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.train import trained_model
from megatron_ext.train.configure import Configured
from tests.support.instructions import write_tokenizer
from tests.support.small_models import small_config


def test_flags_reach_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "configure_trained", lambda flags: ("configured", *flags))
    monkeypatch.setattr(trained_model, "load_trained", lambda configured: configured)
    words = "--num-tokens-to-generate 3 --temperature 0.5 --top-k 4 --top-p 0.6 --min-p 0.1 --repetition-penalty 1.5 "
    line = f"{words} --stop a b --ignore-eod --seed 7 --load ckpt"
    options, flags = generate._parser().parse_known_args(line.split())
    model, sampling = generate._load(options, flags)
    assert model == ("configured", "--load", "ckpt")
    assert sampling == Sampling(0.5, 4, 0.6, 0.1, 1.5, 7, 3, ("a", "b"), True)


def test_a_list_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    text = f"""
    last:
      task: LAMBADA
      valid_data: {tmp_path}/a.jsonl
      strict_lambada: true
    wiki: {{task: PERPLEXITY, valid_data: ["{tmp_path}/a.jsonl"], overlapping_eval: 32}}
    token: {{task: LAMBADA, valid_data: "{tmp_path}/a.jsonl", strict_lambada: false}}
    """
    (tmp_path / "tasks.yaml").write_text(text)
    files = (f"{tmp_path}/a.jsonl",)
    assert read_eval_tasks(str(tmp_path / "tasks.yaml")) == [
        EvalTask("last", "LAMBADA", files, strict_lambada=True),
        EvalTask("wiki", "PERPLEXITY", files, overlapping_eval=32),
        EvalTask("token", "LAMBADA", files, strict_lambada=False),
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


def test_a_stop_string_is_looked_for_as_far_back_as_its_bytes_go() -> None:
    """A token may be a byte, and a character three of them."""
    stop = "。" * 10
    model: Any = SimpleNamespace(tokenizer=ByteTokenizer())
    row: Any = SimpleNamespace(prompt=[97], tokens=list(f"ab{stop}".encode()))
    assert _stop_in(model, row, (stop, "x"))
    row.tokens.pop()
    assert not _stop_in(model, row, (stop, "x"))


def test_those_who_follow_draw_for_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter((("generate", [[5]], "sampling", 2), ("score", ["sequence"], 4), ("close",)))
    heard: list[Any] = []

    def generate(model: Any, prompts: Any, sampling: Any, **how: Any) -> None:
        heard.append((prompts, sampling, how))

    def score(model: Any, *given: Any) -> None:
        heard.append(given)

    monkeypatch.setattr(leader, "_tell", lambda what: next(said))
    monkeypatch.setattr(leader, "generate", generate)
    monkeypatch.setattr(leader, "score", score)
    leader.follow(SimpleNamespace())  # pyright: ignore[reportArgumentType]
    assert heard == [([[5]], "sampling", {"rows": 2}), (["sequence"], 4)]


def test_choices_are_compared_by_the_character() -> None:
    """The first has three characters in five bytes: by its bytes it would be the likeliest."""
    scores = [Score(-3.3, greedy=False), Score(-4.0, greedy=False)]
    found = _choice_results([(["éaé", "abcd"], 0)], scores)
    assert (found["correct"], found["correct_normalized"]) == (1, 0)


def test_a_precision_that_is_given_takes_the_place_of_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"fp16": True, "bf16": False, "seq_length": 64, "max_position_embeddings": 64}
    search = SimpleNamespace(resume=SimpleNamespace(saved=saved))
    monkeypatch.setattr(resume, "look", lambda values: search)
    lengths = ["--seq-length", "64", "--max-position-embeddings", "64"]
    assert trained_model._saved_flags({"load": "ckpt"}) == [*lengths, "--fp16"]
    assert trained_model._saved_flags({"load": "ckpt", "bf16": True}) == lengths
    assert trained_model._saved_flags({"load": "ckpt", "fp16": False, "seq_length": 8}) == lengths[2:]


def test_a_trained_model_has_neither_dropout_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    from megatron_ext.checkpoint.native import load
    from megatron_ext.inference import model
    from megatron_ext.model import config as engine_config
    from megatron_ext.model import gpt
    from megatron_ext.parallel import groups
    from megatron_ext.train import build

    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    collection = SimpleNamespace(pp="stages")
    for home, name, value in (
        (trained_model.device, "install", SimpleNamespace(kind="cpu")),
        (groups, "start", None),
        (groups, "initialize", collection),
        (build, "set_kernels", None),
        (engine_config, "transformer_config", "settings"),
        (gpt, "build_model", [chunk]),
        (load, "load_found", None),
        (p2p_communication, "P2PCommunicator", "messages"),
    ):
        monkeypatch.setattr(home, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(model, "Model", lambda *given, iteration: (given[4], iteration))
    typed: Any = None
    configured = Configured(small_config(), typed, typed, None, resume=SimpleNamespace(iteration=3))  # pyright: ignore
    assert trained_model.load_trained(configured) == ([chunk], 3)
    assert not any(module.training for module in chunk.modules())
    assert not any(weight.requires_grad for weight in chunk.parameters())


def _questions(folder: Path, **item: Any) -> EvalTask:
    line = {"prompt": "Is it so?", "choices": [" yes", " no"], "answer": 0, **item}
    (folder / "questions.jsonl").write_text(json.dumps(line))
    return EvalTask("asked", "MULTIPLE_CHOICE", (str(folder / "questions.jsonl"),))


@pytest.mark.parametrize("answer", [True, False, -1, 2, 1.0, "yes", None])
def test_what_is_no_answer_to_a_question(answer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"answer is {answer!r}; give the number of a choice, from 0")):
        _multiple_choice(ByteTokenizer(), _questions(tmp_path, answer=answer), 64)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_choice_that_is_too_long_is_named_by_its_number(wrong: int, tmp_path: Path) -> None:
    """Choices are numbered as answers are: from 0."""
    choices = [" yes", " no"]
    choices[wrong] = " maybe" * 20
    with pytest.raises(DataError, match=f"choice {wrong} has 120 tokens to score, and the model is given 64"):
        _multiple_choice(ByteTokenizer(), _questions(tmp_path, choices=choices), 64)
