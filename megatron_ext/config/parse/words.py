"""Words of messages."""

from collections.abc import Iterable


def listed(values: Iterable[object]) -> str:
    """Return the values as text: `1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
