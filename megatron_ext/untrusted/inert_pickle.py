"""A pickle is read as data: the calls and imports that it asks for are recorded, and never made.

    content = read(b"...", allowed={("torch", "Size")})
    content.kind.name, content.args, content.state     # of a Made

Python's unpickler calls any function that a pickle names, and sets attributes of any object on its stack, classes
included: to give it only harmless classes is not enough. Here the opcodes are followed by a machine that has nothing to
call. A class becomes its name (`Global`), an object a record of how it would have been made (`Made`); the caller makes
real objects of these, and checks every value. Opcodes that torch, megatron-core and Python's pickler (protocols 2 to 5)
do not write for such objects are refused. This needs no torch.
"""

import functools
import pickle
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_DOUBLE = struct.Struct(">d")
_LARGEST_KEY = 1 << 32


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or a function."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Made:
    """Describes how an object would have been made."""

    kind: Global
    args: tuple[Any, ...]
    state: Any = None
    """The argument with which `__setstate__` would be called; None if it would not be called."""
    items: list[Any] = field(default_factory=list)
    """(key, value) pairs that were set, or values that were appended."""


@dataclass(eq=False, slots=True)
class Stored:
    """Stands for data outside of the pickle: a tensor's elements."""

    place: Any


def read(content: bytes, allowed: Collection[tuple[str, str]] | None, *, stored: bool = False) -> Any:
    """Return the content of a pickle: numbers, texts, lists, tuples and dictionaries, `Global`, `Made` and `Stored`.

    Args:
        allowed: (module, name) of everything that it may ask for; None for anything, as nothing is done with it.
        stored: whether it may refer to tensors' elements.
    Raises:
        pickle.UnpicklingError: the pickle is damaged, or asks for something that it may not.
    """
    machine = _Machine(content, allowed, stored)
    try:
        return machine.run()
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise pickle.UnpicklingError(f"is damaged: {type(error).__name__}: {error}") from None


def plain_text(value: object) -> str:
    """Return a value as text for a message: short, in ASCII, and without following its contents."""
    return ascii(value)[:100] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


class _Machine:
    """A stack, a memo, and a method for each kind of opcode."""

    def __init__(self, content: bytes, allowed: Collection[tuple[str, str]] | None, stored: bool):
        self._content, self._position = content, 0
        self._allowed, self._stored = allowed, stored
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        steps = {opcode[0]: functools.partial(getattr(self, step), *given) for opcode, (step, *given) in _STEPS.items()}
        while (opcode := self._content[self._position]) != pickle.STOP[0]:
            self._position += 1
            step = steps.get(opcode)
            if step is None:
                raise pickle.UnpicklingError(f"holds the opcode {opcode:#04x}, which no checkpoint needs")
            step()
        return self._stack[-1]

    def take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._content):
            raise ValueError("it ends too early")
        content = self._content[self._position : end]
        self._position = end
        return content

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def protocol(self) -> None:
        if self.number(1) > 5:
            raise pickle.UnpicklingError("is of a newer protocol than 5")

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def constant(self, value: Any) -> None:
        self._stack.append(value)

    def unsigned(self, width: int) -> None:
        self._stack.append(self.number(width))

    def signed(self, width: int) -> None:
        self._stack.append(int.from_bytes(self.take(width), "little", signed=True))

    def long(self) -> None:
        self.signed(self.number(1))

    def double(self) -> None:
        self._stack.append(*_DOUBLE.unpack(self.take(8)))

    def text(self, width: int) -> None:
        self._stack.append(self.take(self.number(width)).decode())

    def raw(self, width: int) -> None:
        self._stack.append(self.take(self.number(width)))

    def tuple_of(self, count: int) -> None:
        self._stack[-count:] = [(*[self._stack[place] for place in range(-count, 0)],)]

    def tuple_to_mark(self) -> None:
        items = self.to_mark()
        self._stack.append(tuple(items))

    def empty_list(self) -> None:
        self._stack.append([])

    def append(self) -> None:
        self.extend([self._stack.pop()])

    def appends(self) -> None:
        self.extend(self.to_mark())

    def extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is Made:
            target = target.items
        if type(target) is not list:
            raise pickle.UnpicklingError(f"appends to {plain_text(target)}")
        target += items

    def empty_dict(self) -> None:
        self._stack.append({})

    def setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.update([key, value])

    def setitems(self) -> None:
        self.update(self.to_mark())

    def update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if type(target) is Made:
            target.items += pairs
        elif type(target) is dict:
            for key, value in pairs:
                target[_checked_key(key)] = value
        else:
            raise pickle.UnpicklingError(f"sets items of {plain_text(target)}")

    def get(self, width: int) -> None:
        self._stack.append(self._memo[self.number(width)])

    def put(self, width: int) -> None:
        self._memo[self.number(width)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def line(self) -> str:
        end = self._content.index(b"\n", self._position)
        text = self.take(end - self._position).decode()
        self._position += 1
        return text

    def global_by_lines(self) -> None:
        self.name(self.line(), self.line())

    def global_by_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.name(module, name)

    def name(self, module: Any, name: Any) -> None:
        if not (type(module) is type(name) is str):
            raise pickle.UnpicklingError("asks for something whose name is no text")
        if self._allowed is not None and (module, name) not in self._allowed:
            wanted = ascii(f"{module}.{name}")[1:-1][:100]
            raise pickle.UnpicklingError(f"asks for {wanted}, which no checkpoint needs: nothing of it was run")
        self._stack.append(Global(module, name))

    def make(self) -> None:
        """Record a call, or a new object of a class."""
        args, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not Global or type(args) is not tuple:
            raise pickle.UnpicklingError(f"calls {plain_text(kind)}")
        self._stack.append(Made(kind, args))

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is not Made:
            what = f"{target.module}.{target.name}" if type(target) is Global else plain_text(target)
            raise pickle.UnpicklingError(f"would change {what}, which is no object that it made: nothing was changed")
        if target.state is not None:
            raise pickle.UnpicklingError(f"changes an object of {target.kind.name} twice")
        target.state = state

    def persistent(self) -> None:
        if not self._stored:
            raise pickle.UnpicklingError("refers to something outside of it, which no checkpoint needs")
        self._stack.append(Stored(self._stack.pop()))


_STEPS: dict[bytes, tuple[Any, ...]] = {
    pickle.PROTO: ("protocol",),
    pickle.FRAME: ("take", 8),
    pickle.MARK: ("mark",),
    pickle.NONE: ("constant", None),
    pickle.NEWTRUE: ("constant", True),
    pickle.NEWFALSE: ("constant", False),
    pickle.BININT: ("signed", 4),
    pickle.BININT1: ("unsigned", 1),
    pickle.BININT2: ("unsigned", 2),
    pickle.LONG1: ("long",),
    pickle.BINFLOAT: ("double",),
    pickle.SHORT_BINUNICODE: ("text", 1),
    pickle.BINUNICODE: ("text", 4),
    pickle.BINUNICODE8: ("text", 8),
    pickle.SHORT_BINBYTES: ("raw", 1),
    pickle.BINBYTES: ("raw", 4),
    pickle.EMPTY_TUPLE: ("constant", ()),
    pickle.TUPLE1: ("tuple_of", 1),
    pickle.TUPLE2: ("tuple_of", 2),
    pickle.TUPLE3: ("tuple_of", 3),
    pickle.TUPLE: ("tuple_to_mark",),
    pickle.EMPTY_LIST: ("empty_list",),
    pickle.APPEND: ("append",),
    pickle.APPENDS: ("appends",),
    pickle.EMPTY_DICT: ("empty_dict",),
    pickle.SETITEM: ("setitem",),
    pickle.SETITEMS: ("setitems",),
    pickle.BINGET: ("get", 1),
    pickle.LONG_BINGET: ("get", 4),
    pickle.BINPUT: ("put", 1),
    pickle.LONG_BINPUT: ("put", 4),
    pickle.MEMOIZE: ("memoize",),
    pickle.GLOBAL: ("global_by_lines",),
    pickle.STACK_GLOBAL: ("global_by_stack",),
    pickle.REDUCE: ("make",),
    pickle.NEWOBJ: ("make",),
    pickle.BUILD: ("build",),
    pickle.BINPERSID: ("persistent",),
}
"""The method of each opcode, with its arguments."""


def _checked_key(key: Any) -> Any:
    """Return a key after a check that its hash does not depend on its contents (which may be deep) and cannot be chosen
    to collide with other keys'."""
    if type(key) in (str, bool, float, Made, Global) or key is None or (type(key) is int and abs(key) < _LARGEST_KEY):
        return key
    raise pickle.UnpicklingError(f"has {plain_text(key)} for a key")
