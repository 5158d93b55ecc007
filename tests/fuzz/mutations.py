"""Changes bytes and texts as an enemy, or a bad disk, would: the same changes for the same generator."""

import random
from collections.abc import Callable, Sequence

Read = Callable[[random.Random], None]
"""Makes, writes and reads one input, as the generator decides."""

_INTEGERS = (0, 1, -1, 255, 2**31 - 1, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1, 2**64 - 1, 10**20)
_WORDS = (
    b"[" * 200,
    b'{"a":' * 200,
    b"&a [*a]",
    b"<<: *a",
    b"9" * 5000,
    b"1e999",
    b"-1",
    b"NaN",
    b"null",
    b"true",
    b'""',
    b"\x00",
    b"\xff\xfe",
    b"\\ud800",
    b"\x1b[2J",
    b"../../x",
    b"/dev/zero",
    b"!!python/object/apply:os.system [x]",
    b"!!timestamp 9999-99-99",
    b"0x" + b"f" * 600,
    b"1:2:3:4",
    b"\r\n",
    b"'",
    b'"',
    b": ",
    b"- ",
    b"---\n",
    b"%YAML 9.9\n",
)


def changed(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one to four changes, of which one may undo another."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        content = chance.choice(_CHANGES)(content, chance)
    return content


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one bit of it changed."""
    if not content:
        return b"\x00"
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _longer(content: bytes, chance: random.Random) -> bytes:
    return content + chance.randbytes(chance.choice((1, 8, 300)))


def _without(content: bytes, chance: random.Random) -> bytes:
    first, behind = _range(content, chance)
    return content[:first] + content[behind:]


def _doubled(content: bytes, chance: random.Random) -> bytes:
    first, behind = _range(content, chance)
    return content[:behind] + content[first:behind] * chance.choice((1, 2, 50)) + content[behind:]


def _noise(content: bytes, chance: random.Random) -> bytes:
    first, behind = _range(content, chance)
    return content[:first] + chance.randbytes(behind - first) + content[behind:]


def _zeros(content: bytes, chance: random.Random) -> bytes:
    first, behind = _range(content, chance)
    return content[:first] + bytes(behind - first) + content[behind:]


def _word(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    return content[:place] + chance.choice(_WORDS) + content[place:]


def _integer(content: bytes, chance: random.Random) -> bytes:
    width = chance.choice((1, 2, 4, 8))
    value = chance.choice(_INTEGERS) % (1 << (8 * width))
    place = chance.randrange(max(1, len(content) - width))
    return content[:place] + value.to_bytes(width, "little") + content[place + width :]


def _digits(content: bytes, chance: random.Random) -> bytes:
    """Replace a number that is written in digits."""
    places = [place for place, byte in enumerate(content[:20_000]) if 48 <= byte <= 57]
    if not places:
        return content
    first = behind = chance.choice(places)
    while behind < len(content) and 48 <= content[behind] <= 57:
        behind += 1
    return content[:first] + str(chance.choice(_INTEGERS)).encode() + content[behind:]


def _swapped(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _range(content: bytes, chance: random.Random) -> tuple[int, int]:
    first = chance.randrange(len(content) + 1)
    return first, min(len(content), first + chance.choice((1, 4, 40)))


_CHANGES: Sequence[Callable[[bytes, random.Random], bytes]] = (
    flipped,
    flipped,
    _cut,
    _longer,
    _without,
    _doubled,
    _noise,
    _zeros,
    _word,
    _word,
    _integer,
    _digits,
    _digits,
    _swapped,
)
