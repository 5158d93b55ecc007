"""Instruction data: records of the common formats become text, and the parts of it that are trained on.

    alpaca      {"instruction": ..., "input": ..., "output": ...}; input may be missing or empty, "system" is optional
    sharegpt    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]} messages
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]} completion  {"prompt": ...,
    "completion": ...}, or {"text": ...}, all of which is trained on

The first three go through a chat template. --json-keys names another column for `conversations`, `messages`, `text`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare.chat import ChatTemplate, Rendered
from megatron_ext.plugins.prepare.documents import RawDocument

DATA_FORMATS = ("text", "alpaca", "sharegpt", "messages", "completion")
"""Values of --data-format."""

Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
_MARKS = ("\ufdd0", "\ufdd1", "\ufdd2")  # of megatron_ext.plugins.prepare.chat
_COLUMNS = {
    "alpaca": ("instruction", "input", "output", "system"),
    "sharegpt": ("conversations", "system"),
    "messages": ("messages",),
    "completion": ("prompt", "completion", "text"),
}


@dataclass(frozen=True)
class ConversationFormat:
    """How a record becomes text.

    Args:
        name: one of DATA_FORMATS but `text`.
        key: the column, in place of the format's own; None for that.
        template: renders messages; None for `completion`.
    """

    name: str
    key: str | None
    template: ChatTemplate | None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a file may have for this format."""
        own = _COLUMNS[self.name]
        return own if self.key is None else (*own[:-1], self.key) if self.name == "completion" else (self.key, *own[1:])

    def render(self, record: RawDocument) -> Rendered:
        """Return the record as text, and the parts of it that are trained on.

        Raises:
            DataError: the record is not of this format, or the template refuses it; the text names file and line.
        """
        try:
            fields = record.fields()
            if self.name == "completion":
                return _completion(fields, self.key or "text")
            assert self.template is not None
            return self.template.render(_MESSAGES[self.name](fields, self.key or _COLUMNS[self.name][0]))
        except DataError as error:
            text = str(error)
            raise DataError(text if text.startswith(record.where) else f"{record.where}: {text}") from error


def _alpaca(fields: Mapping[str, Any], _key: str) -> list[Message]:
    instruction, context, answer = (_text(fields, name, name == "input") for name in ("instruction", "input", "output"))
    content = f"{instruction}\n\n{context}" if context else instruction
    question = {"role": "user", "content": content, "instruction": instruction, "input": context}
    return [*_system(fields), question, {"role": "assistant", "content": answer}]


def _sharegpt(fields: Mapping[str, Any], key: str) -> list[Message]:
    return _system(fields) + [
        {"role": _role(_text(turn, "from"), key), "content": _text(turn, "value")} for turn in _turns(fields, key)
    ]


def _messages(fields: Mapping[str, Any], key: str) -> list[Message]:
    messages = []
    for turn in _turns(fields, key):
        role = _text(turn, "role")
        # A turn that calls a tool may have no content; the template has the word for everything else in it.
        content = "" if turn.get("content") is None and len(turn) > 2 else _text(turn, "content")
        messages.append({name: value for name, value in turn.items() if value is not None} | {"role": role})
        messages[-1]["content"] = content
    return messages


_MESSAGES: dict[str, Callable[[Mapping[str, Any], str], list[Message]]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _messages,
}


def _completion(fields: Mapping[str, Any], key: str) -> Rendered:
    if "prompt" in fields or "completion" in fields:
        prompt, completion = _text(fields, "prompt"), _text(fields, "completion")
        return Rendered(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
    text = _text(fields, key)
    return Rendered(text, [(0, len(text))])


def _system(fields: Mapping[str, Any]) -> list[Message]:
    system = _text(fields, "system", optional=True)
    return [{"role": "system", "content": system}] if system else []


def _role(name: str, key: str) -> str:
    if name not in _ROLES:
        raise DataError(f'"{key}" has a turn from "{name}"; the names are {", ".join(_ROLES)}')
    return _ROLES[name]


def _turns(fields: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    turns = fields.get(key)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(
            f'key "{key}" holds no list of turns; the keys are {sorted(fields)} (--data-format, --json-keys)'
        )
    return turns


def _text(fields: Mapping[str, Any], name: str, optional: bool = False) -> str:
    value = fields.get(name)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        what = f"holds {type(value).__name__}, not text" if name in fields else "is missing"
        raise DataError(f'key "{name}" {what}; the keys are {sorted(fields)} (--data-format)')
    if any(mark in value for mark in _MARKS):
        raise DataError(f'key "{name}" holds one of the noncharacters U+FDD0 to U+FDD2, which mark places here')
    return value
