"""Chat templates: what they write, which text of it is whose, and what they may not do."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare import chat
from megatron_ext.plugins.prepare.chat import END_OF_TEXT, ChatTemplate, Rendered, chat_template, missing_tokens
from megatron_ext.plugins.prepare.chat_templates import TEMPLATES
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer

TURNS = [
    {"role": "system", "content": "Be <kind>."},
    {"role": "user", "content": " Hi \n"},
    {"role": "assistant", "content": " Hello. \n"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No."},
]


WRITTEN = {
    "alpaca": (
        "<s>Be <kind>.\n\n### Instruction:\n Hi \n\n\n### Response:\n⟦ Hello. \n</s>⟧\n\n"
        "### Instruction:\nAnd?\n\n### Response:\n⟦No.</s>⟧",
        "### Response:\n",
    ),
    "chatml": (
        "<|im_start|>system\nBe <kind>.<|im_end|>\n<|im_start|>user\n Hi \n<|im_end|>\n"
        "<|im_start|>assistant\n⟦ Hello. \n<|im_end|>⟧\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n⟦No.<|im_end|>⟧\n",
        "<|im_start|>assistant\n",
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nBe <kind>.\n<</SYS>>\n\n Hi \n [/INST] ⟦ Hello. \n </s>⟧<s>[INST] And? [/INST] ⟦No. </s>⟧",
        "",
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe <kind>.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦No.<|eot_id|>⟧",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "zephyr": (
        "<|system|>\nBe <kind>.</s>\n<|user|>\n Hi \n</s>\n<|assistant|>\n⟦ Hello. \n</s>⟧\n<|user|>\nAnd?</s>\n"
        "<|assistant|>\n⟦No.</s>⟧\n",
        "<|assistant|>\n",
    ),
}


def _marked(rendered: Rendered) -> str:
    text, end, found = rendered.text, 0, ""
    for first, behind in rendered.spans:
        found += f"{text[end:first]}⟦{text[first:behind]}⟧"
        end = behind
    return found + text[end:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_writes(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    text, prompt = WRITTEN[name]
    assert _marked(template.render(TURNS)) == text
    plain = template.text(TURNS[:2])
    assert template.text(TURNS[:2], add_generation_prompt=True) == plain + prompt
    assert plain == text.split("⟦")[0].removesuffix(prompt)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_marks_is_read_to_the_same_turns(name: str) -> None:
    """By the prompts for the assistant; but llama2 has none, and white space at the end is not what was written."""
    source = TEMPLATES[name].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    found = ChatTemplate(source, special).render(TURNS)
    assert found == ChatTemplate(TEMPLATES[name], special).render(TURNS)


def test_turns_are_read_from_a_template_without_marks() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    rendered = ChatTemplate(source, {}).render([*TURNS, {"role": "tool", "content": "x"}])
    assert _marked(rendered) == (
        "system: Be <kind>.\nuser:  Hi \n\nassistant: ⟦ Hello.⟧ \n\nuser: And?\nassistant: ⟦No.⟧\ntool: x\n"
    )


def test_json_in_a_template_is_as_transformers_writes_it() -> None:
    value = {"b": "é<", "a": [1, None]}

    def written(call: str) -> str:
        return ChatTemplate("{{ messages[0].value | " + call + " }}", {}).text([{"value": value}])

    assert written("tojson") == '{"b": "é<", "a": [1, null]}'
    assert written("tojson(ensure_ascii=True)") == '{"b": "\\u00e9<", "a": [1, null]}'
    assert written("tojson(separators=(',', ':'))") == '{"b":"é<","a":[1,null]}'
    assert written("tojson(sort_keys=True)") == '{"a": [1, null], "b": "é<"}'
    assert written("tojson(indent=1)") == '{\n "b": "é<",\n "a": [\n  1,\n  null\n ]\n}'


def test_lines_of_a_template_are_trimmed_as_transformers_trims_them() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert ChatTemplate(source, {}).text([{"content": "a"}, {"content": "b"}]) == "a\nb\nend"


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("{{ (2 ** 100) % 7 }}", False),
        ("{{ 2 ** 101 }}", True),
        ("{{ 2 ** 1000000000 }}", True),
        ("{{ 'ab' * 33554432 }}", False),
        ("{{ 'ab' * 33554433 }}", True),
        ("{{ [1, 2] * 33554433 }}", True),
        ("{{ messages[0].content + messages[0].content }}", False),
        ("{{ messages[0].content + messages[0].content + 'x' }}", True),
        ("{{ '%d' % 1 }}", True),
        ("{{ 70000001 % 9 }}", True),
        ("{{ 7 % 4 }}", False),
    ],
)
def test_a_template_that_would_make_too_much_text_is_refused(
    source: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(source.replace("33554432", "512").replace("33554433", "513"), {})
    monkeypatch.setattr(chat, "_MOST_CHARACTERS", 1024)
    messages = [{"role": "user", "content": "x" * 512}]
    if source.startswith("{{ (2"):
        monkeypatch.setattr(chat, "_MOST_CHARACTERS", 1 << 120)
    if source.startswith("{{ 2 **"):
        monkeypatch.setattr(chat, "_MOST_CHARACTERS", 1 << 40)
    if not refused:
        template.text(messages)
        return
    with pytest.raises(DataError, match="makes too much"):
        template.text(messages)


def test_a_digest_is_of_the_template_and_of_its_tokens() -> None:
    digests = [
        ChatTemplate(source, special).digest
        for source in ("a", "b")
        for special in ({}, {"eos_token": "</s>"}, {"eos_token": "<s>"}, {"bos_token": "</s>"})
    ]
    assert len(set(digests)) == len(digests)


def _folder(tmp_path: Path, **settings: Any) -> HuggingFaceTokenizer:
    model = {"type": "BPE", "vocab": {character: n for n, character in enumerate("abc<>/s")}, "merges": []}
    special = {"id": 7, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    special |= {"normalized": False, "special": True}
    content = {"version": "1.0", "model": model, "added_tokens": [special]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    return HuggingFaceTokenizer(str(tmp_path))


def test_which_template_a_tokenizer_has(tmp_path: Path) -> None:
    """A file of its own before tokenizer_config.json; there the one named default of several."""

    def written() -> str:
        return chat_template("tokenizer", _folder(tmp_path, **settings)).text([])

    settings: dict[str, Any] = {}
    with pytest.raises(ConfigurationError, match="the tokenizer has no chat template of its own"):
        written()
    settings["chat_template"] = "one"
    assert written() == "one"
    others = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    settings["chat_template"] = others
    assert written() == "usual"
    settings["chat_template"] = others[::-1]
    assert written() == "usual"
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert written() == "of the file"
    (tmp_path / "chat_template.jinja").unlink()
    settings["chat_template"] = others[:1]
    with pytest.raises(ConfigurationError, match="the tokenizer has no chat template of its own"):
        written()


def test_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text('{"chat_template": 1}é')
    (tmp_path / "a.json").write_text('{"chat_template": "of json"}')
    (tmp_path / "b.json").write_text('{"template": "of json"}')
    (tmp_path / "c.jinja").write_bytes(b"\xff")
    tokenizer = ByteTokenizer()
    assert chat_template(str(tmp_path / "a.jinja"), tokenizer).text([]) == '{"chat_template": 1}é'
    assert chat_template(str(tmp_path / "a.json"), tokenizer).text([]) == "of json"
    for name in ("b.json", "c.jinja"):
        with pytest.raises(ConfigurationError, match=f"the chat template {tmp_path}/{name} cannot be read"):
            chat_template(str(tmp_path / name), tokenizer)
    (tmp_path / "d.jinja").write_text("{% if %}")
    with pytest.raises(
        ConfigurationError, match=r"--chat-template .*d\.jinja is no jinja template: .*; give --chat-temp"
    ):
        chat_template(str(tmp_path / "d.jinja"), tokenizer)


def test_the_special_tokens_that_a_template_may_name(tmp_path: Path) -> None:
    """Those of tokenizer_config.json that are called so, as texts; the end of a document is always there."""
    tokenizer = _folder(
        tmp_path,
        bos_token={"content": "<s>"},
        pad_token=None,
        add_bos_token=True,
        tokenizer_class="X",
        added_tokens_decoder={},
        image_token="<image>",
        chat_template="{{ bos_token }},{{ eos_token }},{{ pad_token }},{{ image_token }},{{ tokenizer_class }}",
    )
    assert chat_template("tokenizer", tokenizer).text([]) == "<s>,</s>,,<image>,"
    bare = tmp_path / "bare.jinja"
    bare.write_text("[{{ bos_token }}][{{ eos_token }}]")
    assert chat_template(str(bare), ByteTokenizer()).text([]) == f"[][{END_OF_TEXT}]"
    (tmp_path / "more").mkdir()
    assert chat_template(str(bare), _folder(tmp_path / "more")).text([]) == "[][</s>]"


@pytest.mark.parametrize(("name", "count"), [("chatml", 2), ("llama3", 4), ("zephyr", 0), ("tokenizer", 0), ("", 0)])
def test_special_tokens_that_a_tokenizer_lacks(name: str, count: int) -> None:
    assert len(missing_tokens(name, ByteTokenizer())) == count

    class Known(ByteTokenizer):
        """Has one id for one of the two special tokens."""

        def encode(self, text: str) -> list[int]:
            return [1] if text == "<|im_end|>" else [1, 2]

    known = Known()
    assert missing_tokens("chatml", known) == ["<|im_start|>"]
