"""Reads YAML from untrusted files: it is parsed only if its size and depth are reasonable.

    values = load_yaml(read_file(path, most=MOST_YAML).decode())

A few lines of YAML in which every list refers ten times to the one before it (a "billion laughs") stand for more values
than any memory holds. They and too many levels are found before anything is built, by reading the text once as events.
PyYAML is imported only here: `--dry-run` does not need it.
"""

from typing import Any

import yaml

from megatron_ext.untrusted.text import DEPTH, ExcessiveError, TextError, twice

MOST_YAML = 1 << 20
"""Largest size in bytes of a YAML file; one of all our flags has some 10,000."""

_NODES = 20_000  # values of a YAML file, with what aliases stand for
_DIGITS = 400  # of a number: YAML's 1:2:3:... takes time with the square of its length
# libyaml's parser is ten times faster than the Python one, but is not in every build of PyYAML.
_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text: plain data, for no tag builds an object.

    Raises:
        TextError: the text is no YAML, or names a key twice.
        ExcessiveError: the text is nested too deep, or stands for too many values.
    """
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Loader)
    except TextError:
        raise
    except Exception as error:  # PyYAML's constructors fail in many ways on what a tag says and a text is not
        raise TextError(" ".join(str(error).split())) from None


def _check_events(text: str) -> None:
    """Follow the parser's events, which it gives without calling itself; nothing is built."""
    outline = _Outline()
    for event in yaml.parse(text, Loader=_FastLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            outline.enter(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            outline.leave()
        elif isinstance(event, yaml.AliasEvent):
            outline.refer(event.anchor)
        elif isinstance(event, yaml.ScalarEvent):
            outline.scalar(event)


class _Outline:
    """Tracks the depth of a YAML text at the current event, and the number of values that it stands for so far."""

    def __init__(self) -> None:
        self._nodes = 0
        self._sizes: dict[str, int] = {}  # of what has an anchor
        # Of every collection that is open: its anchor, the values before it, and of a mapping its keys.
        self._open: list[tuple[str | None, int, set[str] | None]] = []
        self._children: list[int] = [0]

    def enter(self, event: Any) -> None:
        self._count(1)
        keys: set[str] | None = set() if isinstance(event, yaml.MappingStartEvent) else None
        self._open.append((event.anchor, self._nodes - 1, keys))
        self._children.append(0)
        if len(self._open) > DEPTH:
            raise ExcessiveError(f"it is nested more than {DEPTH} levels deep")

    def leave(self) -> None:
        anchor, before, _ = self._open.pop()
        self._children.pop()
        if anchor is not None:
            self._sizes[anchor] = self._nodes - before

    def refer(self, anchor: str) -> None:
        if any(anchor == name for name, _, _ in self._open):
            raise ExcessiveError(f"*{anchor} stands in what it refers to, which has no end")
        self._count(self._sizes.get(anchor, 1))

    def scalar(self, event: Any) -> None:
        keys = self._open[-1][2] if self._open else None
        is_key = keys is not None and self._children[-1] % 2 == 0
        self._count(1)
        if event.anchor is not None:
            self._sizes[event.anchor] = 1
        if is_key and keys is not None and event.value != "<<":
            if event.value in keys:
                raise twice({event.value})
            keys.add(event.value)

    def _count(self, nodes: int) -> None:
        self._children[-1] += 1
        self._nodes += nodes
        if self._nodes > _NODES:
            raise ExcessiveError(f"it stands for more than {_NODES:,} values")


class _Loader(_FastLoader):
    """A loader that takes no number that is longer than any number."""


def _number(tag: str) -> Any:
    inner = yaml.SafeLoader.yaml_constructors[tag]

    def construct(loader: Any, node: Any) -> Any:
        if len(node.value) > _DIGITS:
            raise ExcessiveError(f"it has a number of {len(node.value):,} digits")
        return inner(loader, node)

    return construct


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _number(_tag))
