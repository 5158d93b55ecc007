"""Holds the command line of another program's script while its words become ours, flag by flag."""

from collections.abc import Sequence

from megatron_ext.config.parse.arguments import flag_groups


class Script:
    """The flags of a script, named with hyphens, and the problems and warnings of flags that were removed; of a
    repeated flag the last mention counts."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.unread: set[str] = set()  # fields that a problem was to give
        self.spellings: dict[str, str] = {}  # what a message says -> what the script says
        self._groups: list[tuple[str, list[str], list[str]]] = []  # flag, its values, and the words as typed
        for flag, inline, words in flag_groups(argv, self.problems):
            typed = [*([flag] if inline is None else [f"{flag}={inline}"]), *words]
            self._groups.append((flag.replace("_", "-"), words if inline is None else [inline, *words], typed))

    def __contains__(self, flag: str) -> bool:
        return self.values(flag) is not None

    def values(self, flag: str) -> list[str] | None:
        """Return the words that belong to a flag; None without it."""
        return next((values for name, values, _ in reversed(self._groups) if name == flag), None)

    def number(self, flag: str) -> int | None:
        """Return the integer that belongs to a flag; None without one, of which the parser speaks."""
        try:
            return int((self.values(flag) or [""])[0])
        except ValueError:
            return None

    def take(self, flag: str) -> list[str] | None:
        """Remove a flag, and return the words that belonged to it; None without it."""
        found = self.values(flag)
        self._groups = [group for group in self._groups if group[0] != flag]
        return found

    def take_number(self, flag: str) -> int | None:
        """Remove a flag, and return its integer; None without it, and with a problem where it has none."""
        number, values = self.number(flag), self.take(flag)
        if values is not None and number is None:
            self.problems.append(f"{flag}: {' '.join(values)!r} is not an integer")
        return number

    def give(self, *flags: Sequence[str]) -> None:
        """Add flags, each with its values after it, and remove earlier occurrences of the same flags."""
        for flag, *values in flags:
            self.take(flag)
            self._groups.append((flag, values, [flag, *values]))

    def translate(self, flag: str, *given: str) -> None:
        """Put a flag and its values in the place of another; a problem where the script gives it other values."""
        typed, present = [flag, *(self.take(flag) or ())], self.values(given[0])
        if present not in (None, [*given[1:]]):
            said, other = " ".join(typed), " ".join([given[0], *present])
            self.problems.append(f"{said} is {' '.join(given)} here, but the script has {other}; leave one of them out")
        self.give(given)

    def words(self) -> list[str]:
        """Return the command line that is left."""
        return [word for _, _, typed in self._groups for word in typed]
