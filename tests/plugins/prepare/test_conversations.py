"""Records of each format as text, by each named template to the character, and as tokens with their flags."""

import json
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.mask import BEGINS, COUNTS
from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare.chat import END_OF_TEXT, ChatTemplate, Rendered
from megatron_ext.plugins.prepare.conversations import ConversationFormat
from megatron_ext.plugins.prepare.documents import Block, RawDocument, ReadPosition
from megatron_ext.plugins.prepare.encode_conversations import ConversationEncoder, _by_offsets, _bytes
from megatron_ext.tokenizer.library import LibraryTokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer

# What is trained on stands between ⟦ and ⟧.


ROLES = ChatTemplate("{% for m in messages %}{{ m | tojson(sort_keys=True) }}\n{% endfor %}", {})


def _messages(name: str, fields: dict[str, Any], key: str | None = None) -> list[dict[str, Any]]:
    record = RawDocument("in.jsonl", 3, json.dumps(fields).encode(), is_json=True)
    text = ConversationFormat(name, key, ROLES).render(record).text
    return [json.loads(line) for line in text.splitlines()]


def test_records_become_messages() -> None:
    system = {"role": "system", "content": "S"}
    question = {"role": "user", "content": "I\n\nG", "instruction": "I", "input": "G"}
    answer = {"role": "assistant", "content": "A"}
    alpaca = {"instruction": "I", "input": "G", "output": "A"}
    assert _messages("alpaca", alpaca) == [question, answer]
    assert _messages("alpaca", {**alpaca, "system": "S"}) == [system, question, answer]
    for empty in ({"input": ""}, {"input": None}, {}):
        found = _messages("alpaca", {"instruction": "I", "output": "A", "system": "", **empty})
        assert found == [{"role": "user", "content": "I", "instruction": "I", "input": ""}, answer]
    names = {
        "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
        "assistant": "assistant", "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
        "function_call": "assistant",
    }  # fmt: skip
    turns = [{"from": name, "value": name} for name in names]
    expected = [{"role": role, "content": name} for name, role in names.items()]
    assert _messages("sharegpt", {"conversations": turns}) == expected
    assert _messages("sharegpt", {"chat": turns, "system": "S"}, "chat") == [system, *expected]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    assert _messages("messages", {"messages": [call, answer]}) == [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        answer,
    ]
    assert _messages("messages", {"turns": [answer]}, "turns") == [answer]


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_turn_without_content_or_anything_else_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r'^in\.jsonl:3: key "content" (is missing|holds NoneType, not text); the keys'):
        _messages("messages", {"messages": [{"role": "assistant", **content}]})


@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1", "\ufdd2"])
def test_no_record_holds_a_mark_of_ours(mark: str) -> None:
    with pytest.raises(DataError, match='key "value" holds one of the noncharacters'):
        _messages("sharegpt", {"conversations": [{"from": "human", "value": f"a{mark}b"}]})


def test_an_error_begins_with_the_place_also_where_the_record_names_it() -> None:
    record = RawDocument("a", 7, json.dumps({"conversations": [{"from": "a:7", "value": "x"}]}).encode(), is_json=True)
    with pytest.raises(DataError, match=r'^a:7: "conversations" has a turn from "a:7"'):
        ConversationFormat("sharegpt", None, ROLES).render(record)


def _completion(fields: dict[str, Any], key: str | None = None) -> Rendered:
    record = RawDocument("in.jsonl", 3, json.dumps(fields).encode(), is_json=True)
    return ConversationFormat("completion", key, None).render(record)


def test_completions_and_columns() -> None:
    assert _completion({"prompt": "ab", "completion": "cde"}) == Rendered("abcde", [(2, 5)])
    assert _completion({"text": "abc", "body": "x"}) == Rendered("abc", [(0, 3)])
    assert _completion({"text": "abc", "body": "x"}, "body") == Rendered("x", [(0, 1)])
    for fields in ({"prompt": "ab", "text": "x"}, {"completion": "ab", "text": "x"}):
        with pytest.raises(DataError, match="is missing"):
            _completion(fields)
    columns = {
        (name, key): ConversationFormat(name, key, None).columns
        for name in ("alpaca", "sharegpt", "messages", "completion")
        for key in (None, "other")
    }
    assert columns == {
        ("alpaca", None): ("instruction", "input", "output", "system"),
        ("alpaca", "other"): ("other", "input", "output", "system"),
        ("sharegpt", None): ("conversations", "system"),
        ("sharegpt", "other"): ("other", "system"),
        ("messages", None): ("messages",),
        ("messages", "other"): ("other",),
        ("completion", None): ("prompt", "completion", "text"),
        ("completion", "other"): ("prompt", "completion", "other"),
    }


def _encoded(
    records: list[dict[str, Any]], tokenizer: Any = None, template: str | None = None, **settings: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and flags of each document; COUNTS and BEGINS as they are."""
    options: dict[str, Any] = {
        "append_eod": False, "on_error": "fail", "packed_to": 0, "train_on_inputs": False
    } | settings  # fmt: skip
    chosen = None if template is None else ChatTemplate(template, {"eos_token": END_OF_TEXT})
    form = ConversationFormat("completion" if template is None else "messages", None, chosen)
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    found = ConversationEncoder(tokenizer or ByteTokenizer(), form, **options)(
        Block("in.jsonl", 1, lines, len(lines), ReadPosition(), 0)
    )
    [(tokens, lengths)] = found.columns
    assert found.flags is not None
    assert found.documents + len(found.problems) == len(records)
    ends = np.cumsum(lengths)[:-1]
    return [part.tolist() for part in np.split(tokens, ends)], [part.tolist() for part in np.split(found.flags, ends)]


def test_an_end_of_document_counts_as_the_token_before_it() -> None:
    """Behind an assistant's turn it is trained on, behind a user's not, and where there is one, none is added."""
    user, assistant = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    records = [{"messages": one} for one in ([user, assistant], [assistant, user], [user, user])]
    tokens, flags = _encoded(records, template=template, append_eod=True)
    assert tokens == [[117, 97, 256], [97, 117, 256], [117, 117, 256]]
    assert flags == [[BEGINS, COUNTS, COUNTS], [BEGINS, 0, 0], [BEGINS, 0, 0]]
    ended = template.replace("{{ m.content }}{% endg", "{{ m.content }}{{ eos_token }}{% endg")
    tokens, flags = _encoded(records[:2], template=ended, append_eod=True)
    assert tokens == [[117, 97, 256], [97, 256, 117, 256]]
    assert flags == [[BEGINS, COUNTS, COUNTS], [BEGINS, COUNTS, 0, 0]]
    assert _encoded(records[:1], template=template)[0] == [[117, 97]]
    assert _encoded([{"text": ""}, {"text": "a"}], append_eod=True) == ([[], [97, 256]], [[], [BEGINS, COUNTS]])


@pytest.mark.parametrize("train_on_inputs", [False, True])
def test_inputs_are_trained_on_where_it_is_asked_for(train_on_inputs: bool) -> None:
    """But for the first token, which nothing predicts."""
    _, [flags] = _encoded([{"prompt": "abc", "completion": "de"}], train_on_inputs=train_on_inputs)
    assert flags == [BEGINS, *[COUNTS if train_on_inputs else 0] * 2, COUNTS, COUNTS]


def test_documents_are_packed_by_first_fit_the_longest_first() -> None:
    """In their order within a sequence; what is left of it is a document that counts in nothing."""
    texts = ["aa", "bbbb", "c", "ddddd", "", "ee", "ffff"]
    tokens, flags = _encoded([{"text": text} for text in texts], packed_to=5)
    assert [bytes(part).decode() for part in tokens] == ["ddddd", "bbbbc", "ffff\0", "aaee\0"]
    one = [BEGINS, COUNTS, COUNTS, COUNTS, COUNTS]
    assert flags == [
        one,
        [*one[:4], BEGINS],
        [*one[:4], BEGINS],
        [BEGINS, COUNTS, BEGINS, COUNTS, BEGINS],
    ]
    assert [bytes(part) for part in _encoded([{"text": "c"}, {"text": "bbbb"}], packed_to=5)[0]] == [b"cbbbb"]
    tokens, flags = _encoded([{"text": "abc"}], packed_to=8)
    assert tokens == [[97, 98, 99, 0, 0, 0, 0, 0]]
    assert flags == [[BEGINS, COUNTS, COUNTS, BEGINS, 0, 0, 0, 0]]

    class EndIs0(ByteTokenizer):
        eod = 0

    assert _encoded([{"text": "abc"}], EndIs0(), packed_to=5)[0] == [[97, 98, 99, 1, 1]], "filled with no end"


@pytest.mark.parametrize(("length", "fits"), [(4, True), (5, True), (6, False)])
def test_a_document_as_long_as_a_sequence_fits(length: int, fits: bool) -> None:
    record = {"text": "a" * length}
    if fits:
        assert len(_encoded([record], packed_to=5)[0]) == 1
        return
    with pytest.raises(DataError, match=rf"^in\.jsonl:1: the document has {length} tokens, more than --seq-length 5;"):
        _encoded([record], packed_to=5)
    assert _encoded([record, {"text": "b"}], packed_to=5, on_error="skip")[0] == [[98, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("spans", "trained"),
    [
        ([(2, 4)], [0, 1, 0, 0]),
        ([(0, 2)], [1, 0, 0, 0]),
        ([(3, 5)], [0, 1, 1, 0]),
        ([(1, 3)], [1, 1, 0, 0]),
        ([(1, 2), (6, 8)], [1, 0, 0, 1]),
        ([(2, 2)], [0, 0, 0, 0]),
        ([], [0, 0, 0, 0]),
    ],
)
def test_a_token_is_trained_on_where_it_holds_a_beginning(spans: list[tuple[int, int]], trained: list[int]) -> None:
    """Tokens of two characters: one that begins in a part, or that a part begins in, and not one behind it."""
    tokenizer: Any = object.__new__(LibraryTokenizer)
    tokenizer.encode_rendered = lambda text: ([5, 6, 7, 8], [(0, 2), (2, 4), (4, 6), (6, 8)])
    tokenizer.frame = lambda: ([1, 2], [3])
    ids, found = _by_offsets(tokenizer, Rendered("aabbccdd", spans), in_a_frame=False)
    assert (ids.tolist(), found.tolist()) == ([5, 6, 7, 8], [bool(one) for one in trained])
    ids, found = _by_offsets(tokenizer, Rendered("aabbccdd", spans), in_a_frame=True)
    assert ids.tolist() == [1, 2, 5, 6, 7, 8, 3]
    assert found.tolist() == [False, False, *(bool(one) for one in trained), True]


def test_bytes_are_trained_on_in_their_part_alone() -> None:
    text = f"é{END_OF_TEXT}b{END_OF_TEXT}"
    ids, trained = _bytes(Rendered(text, [(1, 3)]), 256)
    assert ids.tolist() == [0xC3, 0xA9, 256, 98, 256]
    assert trained.tolist() == [False, False, True, True, False]
    ids, trained = _bytes(Rendered("abc", [(0, 1), (2, 3)]), 256)
    assert trained.tolist() == [True, False, True]
