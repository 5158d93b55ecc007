"""Holds the command line of another program's script while its words become ours, flag by flag.

    script = Script(["--train-tokens", "4096", "--seq-length", "64"])
    script.take("--train-tokens")              # ["4096"], and gone
    script.give(("--train-samples", "64"))
    script.words()                             # ["--seq-length", "64", "--train-samples", "64"]

A flag is named with hyphens, and its last mention counts, as in argparse.
"""

from collections.abc import Sequence

from megatron_ext.config.parse.arguments import flag_groups


class Script:
    """The flags of a script, and what is to be said of those that were taken out."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.unread: set[str] = set()
        """Fields of which nothing more is to be said, since what was to give them is a problem."""
        groups = flag_groups(argv, self.problems)
        self._groups = [(flag.replace("_", "-"), flag, inline, words) for flag, inline, words in groups]

    def __contains__(self, flag: str) -> bool:
        return self.values(flag) is not None

    def values(self, flag: str) -> list[str] | None:
        """Return the words that belong to a flag; None without it."""
        found = [
            [*([] if inline is None else [inline]), *words] for name, _, inline, words in self._groups if name == flag
        ]
        return found[-1] if found else None

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
        """Add flags in the place of those that are there, each with its values behind it."""
        for flag, *values in flags:
            self.take(flag)
            self._groups.append((flag, flag, None, values))

    def words(self) -> list[str]:
        """Return the command line that is left."""
        words = []
        for _, flag, inline, values in self._groups:
            words += [flag if inline is None else f"{flag}={inline}", *values]
        return words
