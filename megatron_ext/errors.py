"""Defines the errors that a user can meet, and the exit code of each (one table, one meaning per code).

An error's text is the last line that our processes print: it names what is wrong, where, and what to do next.
`assert` is for our own mistakes; everything a user can cause is raised as one of these.
"""

from collections.abc import Iterable


class TrainingError(Exception):
    """Base of all errors that end a run on purpose; `exit_code` is what the process returns."""

    exit_code = 1


class ConfigurationError(TrainingError):
    """Raised where the flags, or a path that they name, cannot work. It is found before any process group is made."""

    exit_code = 64

    def __init__(self, problems: str | list[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PluginError(ConfigurationError):
    """Raised where an installed plugin cannot be used: by any program, while it is imported."""


class DataError(TrainingError):
    """Raised for data that is present but wrong: truncated, altered, out of range."""

    exit_code = 65


class NumericError(TrainingError):
    """Raised for a NaN or an infinity where there must be a number."""

    exit_code = 70


class MemoryExhaustedError(TrainingError):
    """Raised where the memory of the host or of the device has run out."""

    exit_code = 71


class StorageError(TrainingError):
    """Raised where reading or writing failed: disk full, permission, a vanished mount."""

    exit_code = 74


class SaveFailedError(StorageError):
    """Raised on every rank where a checkpoint could not be written; earlier checkpoints are as they were."""


class FolderRemovedError(SaveFailedError):
    """Raised where somebody has removed the folder of --save while a checkpoint was being written into it."""


class StoppedBySignal(TrainingError):
    """Raised when a signal or a stop request ended the run after its state was saved."""

    exit_code = 75


class StoppedBefore(StoppedBySignal):
    """Raised where an earlier attempt of this launch was stopped; this one ends as it did, at once."""


class PeerLostError(TrainingError):
    """Raised when another rank died or stopped answering."""

    exit_code = 76


def listed(values: Iterable[object]) -> str:
    """Return the values as text: `1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
