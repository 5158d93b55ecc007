"""tasks/generate.py: prompts as ids, and answers on the screen; tests/distributed/test_inference_tools.py runs it."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.commands import generate, generate_sample
from megatron_ext.plugins.tasks.commands.generate import encoder
from megatron_ext.plugins.tasks.generation import Generated
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from tests.support.instructions import write_tokenizer
from tests.support.scripted_model import scripted_model


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--load x --prompt hello", "--prompt; did you mean --prompts?"),
        ("--prompts a --prompt-file prompts.txt", "are two sources of prompts; give one of them"),
        ("--prompt-file nowhere.txt", "--prompt-file nowhere.txt is no file"),
        ("--prompts a --max-batch-size 0", "--max-batch-size 0 is not positive"),
    ],
)
def test_flags_that_cannot_work_are_named(line: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        generate.main(shlex.split(line))


def test_a_prompt_of_blanks_is_a_text_and_an_empty_one_the_end_of_another() -> None:
    encode = encoder(scripted_model(), None)
    assert encode("") == [256]
    assert encode("  ") == [32, 32]


def test_a_prompt_without_a_tokenizer_is_ids() -> None:
    model = dataclasses.replace(scripted_model(), tokenizer=None)
    assert encoder(model, None)("5 17") == [5, 17]
    with pytest.raises(ConfigurationError, match="without a text tokenizer give ids"):
        encoder(model, None)("five")
    with pytest.raises(ConfigurationError, match="--chat-template needs the model's tokenizer"):
        encoder(model, "chatml")


def test_a_prompt_is_a_users_message_in_a_chat_template(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "tokenizer"))
    text = "<|im_start|>user\nwhat is two<|im_end|>\n<|im_start|>assistant\n"
    for template in ("tokenizer", "chatml"):
        ids = encoder(scripted_model(tokenizer), template)("what is two")
        assert ids == tokenizer.encode_rendered(text)[0]
        assert tokenizer.decode(ids) == text
    asked = bytes(encoder(scripted_model(), "alpaca")("Name a colour.")).decode()
    assert asked.endswith("request.\n\n### Instruction:\nName a colour.\n\n### Response:\n")
    with pytest.raises(ConfigurationError, match="--chat-template nowhere is no file"):
        encoder(scripted_model(), "nowhere")


def test_answers_to_several_prompts_stand_under_lines(capsys: pytest.CaptureFixture[str]) -> None:
    generate._show(["a"], [Generated([1, 2], "bc", "eod")])
    generate._show(["a", "5"], [Generated([], "", "stop"), Generated([1, 2], None, "length")])
    assert capsys.readouterr().out.splitlines() == [
        "abc",
        "--- prompt 1 of 2, 0 tokens, ended by stop",
        "a",
        "--- prompt 2 of 2, 2 tokens, ended by length",
        "5 1 2",
    ]


def test_ids_of_a_prompt_of_an_export_are_below_the_vocabulary() -> None:
    assert generate_sample._numbers("0 9 5", 10) == [0, 9, 5]
    for wrong in ("10", "5 x", "-1", "", " "):
        with pytest.raises(ConfigurationError, match="must be token ids below 10"):
            generate_sample._numbers(wrong, 10)


@pytest.mark.parametrize("flags", ["--max-new-tokens 0", "--temperature -0.1", "--model elsewhere"])
def test_a_sample_of_an_export_that_cannot_be_is_refused(flags: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigurationError):
        generate_sample.main(["--model", str(tmp_path), *flags.split()])
