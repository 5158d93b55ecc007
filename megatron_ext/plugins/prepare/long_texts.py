"""Long texts are read without making a Python string of them.

Python takes four bytes a character for a text with an emoji, so that a line of 100 MB would take 0.4 GB. Texts of more
than `LONG` bytes therefore stay UTF-8; `encode` of `megatron_ext.plugins.prepare.encode_many` takes them as they are.

    split_strings(b'{"text": "<10 MB>", "id": 7}')  ->  {"text": b"<10 MB>", "id": 7}
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from megatron_ext.tokenizer.tokenizer_protocol import LONG

_PIECE = 1 << 20  # bytes of a long text that are decoded in one go

# A string of JSON. Possessive, so that nothing is kept to go back to.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_CUT = re.compile(rb"[^\\]{12}(?=[A-Za-z0-9 .,])")  # no escape reaches over the end of this
# Replacement of a long string: a lone surrogate, which a text that can be encoded does not hold.
_MARK = "\udc00"


def check_utf8(text: bytes) -> None:
    """Raise UnicodeDecodeError, with the position in the whole, if this is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for first in range(0, len(text), _PIECE):
        try:
            decoder.decode(text[first : first + _PIECE], final=first + _PIECE >= len(text))
        except UnicodeDecodeError:
            text.decode("utf-8")
            raise


def split_strings(line: bytes | memoryview) -> dict[str, Any] | None:
    """Return the object of a line of JSON, with its long strings as UTF-8; None if the usual way has to judge the
    line."""
    skeleton: list[bytes] = []
    long_strings: list[bytes] = []
    end = 0
    try:
        for match in _STRING.finditer(line):
            first, behind = match.span()
            if behind - first <= LONG:
                continue
            skeleton += [bytes(line[end:first]), json.dumps(f"{_MARK}{len(long_strings)}").encode()]
            long_strings.append(_unescape(line, first + 1, behind - 1))
            end = behind
        skeleton.append(bytes(line[end:]))
        if not long_strings or any(b"\\udc00" in part.lower() for part in skeleton[::2]):
            return None
        fields = json.loads(b"".join(skeleton))
    except (ValueError, RecursionError):  # UnicodeEncodeError, of a lone surrogate, is a ValueError
        return None
    if not isinstance(fields, dict):
        return None
    marked = {f"{_MARK}{number}": text for number, text in enumerate(long_strings)}
    return {key: marked.get(value, value) if isinstance(value, str) else value for key, value in fields.items()}


def _unescape(line: bytes | memoryview, first: int, behind: int) -> bytes:
    """Return the UTF-8 text of the inside of a JSON string. Raises ValueError if it is not valid."""
    return b"".join(json.loads(b'"%s"' % line[begin:end]).encode() for begin, end in _pieces(line, first, behind))


def _pieces(line: bytes | memoryview, first: int, behind: int) -> Iterator[tuple[int, int]]:
    while behind - first > 2 * _PIECE:
        cut = _CUT.search(line, first + _PIECE, behind)
        if cut is None:
            break
        yield first, cut.end()
        first = cut.end()
    yield first, behind
