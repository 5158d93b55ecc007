"""Conversations as text: a chat template (jinja) renders messages, and the assistant's parts of the text are found.

    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    template.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    -> Rendered("<s>[INST] Hi [/INST] Hello </s>", [(19, 29)])

A template is a program of another author: it runs in jinja's sandbox, which keeps it from the machine, and none of its
operators makes a text of over 64 MB. It is not told the date, which transformers offers as `strftime_now`: the same
input gives the same bytes on every day. jinja2 comes with torch; it is imported where a template is. No torch here.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare.chat_templates import SPECIAL_TOKENS, TEMPLATES
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.untrusted.text import TextError, load_json, read_file

_LARGEST = 1 << 20  # bytes of a template; the longest in use have some 30,000
_MOST_CHARACTERS = 1 << 26  # of what one operator of a template makes
# Noncharacters of Unicode, which no text holds: begin and end of what {% generation %} surrounds.
_BEGIN, _END = "\ufdd0", "\ufdd1"
END_OF_TEXT = "\ufdd2"
"""Stands for the end of a document where the tokenizer has no text for it."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the parts of it, in characters, that are trained on."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template.
        special: texts of the special tokens that the template may name, as `bos_token`.
        what: the template's name in messages.

    Raises:
        ConfigurationError: it is no template, or jinja2 is not installed.
    """

    def __init__(self, source: str, special: Mapping[str, str], what: str = "the chat template"):
        environment = _environment()
        import jinja2

        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"{what} is no jinja template: {error}; give --chat-template another") from error
        self._what = what
        self._special = dict(special)
        self.digest = hashlib.sha256(json.dumps([source, self._special]).encode()).hexdigest()
        """Digest of the template and of the tokens that it may name."""
        self._marks = "generation" in environment.parsed_tags

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        """Return the conversation as text, with the ranges that the assistant wrote.

        A template with `{% generation %}` marks these ranges itself. Otherwise a range is the text after the prompt for
        the assistant, to the end of its turn, without the white space at the end.

        Raises:
            DataError: the template refuses the messages, or changes earlier turns when others follow.
        """
        text = self.text(messages)
        if self._marks:
            return _without_marks(text)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                prompt = self.text(messages[:number], add_generation_prompt=True)
                turn = self.text(messages[: number + 1]).rstrip()
                if not (text.startswith(turn) and turn.startswith(prompt)):
                    raise DataError(
                        f"{self._what} writes the turns before message {number + 1} in another way when that follows, "
                        "so that it does not show what the assistant wrote; give --chat-template one with "
                        "{% generation %} around it, as the named ones have"
                    )
                spans.append((len(prompt), len(turn)))
        return Rendered(text, spans)

    def text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """Render the messages with the template; the text keeps the marks of `{% generation %}`."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as error:  # a template is a program, and fails as one
            raise DataError(f"{self._what} refuses the messages: {error}") from error


def chat_template(choice: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template that --chat-template names: `tokenizer`, a name, or a file.

    Raises:
        ConfigurationError: there is none, or it cannot be read.
    """
    special = _special_texts(tokenizer)
    if choice == "tokenizer":
        return ChatTemplate(_own_source(tokenizer), special, "the tokenizer's chat template")
    if choice in TEMPLATES:
        return ChatTemplate(TEMPLATES[choice], special, f"--chat-template {choice}")
    if not Path(choice).exists():
        raise ConfigurationError(
            f"--chat-template {choice} is no file, and none of tokenizer, {', '.join(TEMPLATES)}; give one of these"
        )
    return ChatTemplate(_read(Path(choice)), special, f"--chat-template {choice}")


def missing_tokens(choice: str, tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens of a named template that the tokenizer would read as ordinary characters."""
    return [text for text in SPECIAL_TOKENS.get(choice, ()) if len(tokenizer.encode(text)) > 1]


def _special_texts(tokenizer: Tokenizer) -> dict[str, str]:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        end = getattr(tokenizer, "end_of_document", END_OF_TEXT)
        return {"bos_token": "", "eos_token": end}
    named = tokenizer.named_tokens
    in_order = {name: named[name] for name in tokenizer.settings if name in named}  # which digests depend on
    return {"bos_token": "", "eos_token": tokenizer.end_of_document} | in_order | named


def _own_source(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        file = Path(tokenizer.folder) / "chat_template.jinja"  # which transformers prefers as well
        if file.exists():
            return _read(file)
        own = tokenizer.settings.get("chat_template")
        if isinstance(own, list):  # several, by name
            own = next((one.get("template") for one in own if one.get("name") == "default"), None)
        if isinstance(own, str):
            return own
    raise ConfigurationError(
        f"the tokenizer has no chat template of its own: give --chat-template {', '.join(TEMPLATES)}, or a file"
    )


def _read(path: Path) -> str:
    try:
        content = read_file(path, _LARGEST).decode()
        return load_json(content.encode())["chat_template"] if path.suffix == ".json" else content
    except (OSError, TextError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"the chat template {path} cannot be read: {error}; give another file") from error


def _without_marks(text: str) -> Rendered:
    parts, spans, length = [], [], 0
    for number, part in enumerate(text.replace(_END, _BEGIN).split(_BEGIN)):
        if number % 2:
            spans.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return Rendered("".join(parts), spans)


def _environment() -> Any:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigurationError("a chat template needs the package jinja2: pip install jinja2") from error

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} leaves marks around the enclosed text."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            self.environment.parsed_tags.add("generation")  # type: ignore[attr-defined]

            def mark(text: str) -> Any:
                return nodes.Output([nodes.TemplateData(text)], lineno=line)

            return [mark(_BEGIN), *body, mark(_END)]

    class Bounded(ImmutableSandboxedEnvironment):
        """A sandbox in which no string or list grows without bound by one operator."""

        intercepted_binops = frozenset({"*", "**", "%", "+"})

        def __init__(self, **settings: Any):
            super().__init__(**settings)
            self.parsed_tags: set[str] = set()

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sized = [len(value) for value in (left, right) if isinstance(value, (str, list, tuple))]
            numbers = [abs(value) for value in (left, right) if isinstance(value, (int, float))]
            size = sum(sized) if operator == "+" else max(sized, default=1) * max(numbers, default=1)
            is_form = operator == "%" and bool(sized)  # '%99999999d' % 1
            if is_form or size > _MOST_CHARACTERS or (operator == "**" and max(numbers, default=0) > 100):
                raise SecurityError(f"{operator} makes too much")
            return super().call_binop(context, operator, left, right)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    # The filter and the function that transformers offers a template.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    known = {name: settings[name] for name in ("separators", "sort_keys") if name in settings}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)


def _refuse(message: str) -> None:
    raise ValueError(message)
