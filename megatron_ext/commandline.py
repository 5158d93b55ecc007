"""The common part of the programs in tools/: errors of the command line, and how a failure ends the process."""

import argparse
import difflib
import gc
import os
import select
import signal
import sys
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.durable import described, replace_text
from megatron_ext.errors import ConfigurationError, StorageError, TrainingError
from megatron_ext.terminal import note


class ToolParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigurationError (exit code 64) and never guesses an abbreviated flag.

    Args:
        description: what the program does, in a sentence.
        documentation: a docstring whose indented lines, up to the first paragraph after them, are the examples that
            --help ends with.
        command: the command of megatron-ext that messages name where a function of Python asks, and no program.
    """

    def __init__(self, description: str, documentation: str | None = None, *, command: str | None = None):
        self._flags: list[str] = []
        self._words: list[str] = []
        self._removed: dict[str, str] = {}
        program = None if command is None or _is_program(sys.argv[0]) else f"megatron-ext {command}"
        super().__init__(program, description=description, allow_abbrev=False, formatter_class=_Formatter)
        self.epilog = _examples(documentation)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an argument, and remember its flags for suggestions to misspelled ones."""
        self._flags += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse as argparse does, and remember the words for suggestions where a required flag is missing."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def knows(self, flag: str) -> bool:
        """Return whether the tool has this flag, `--name`."""
        return flag in self._flags

    def remove_flag(self, flag: str, instead: str) -> None:
        """Refuse a removed flag, and say what to do instead."""
        self._removed[flag] = instead

    def parse_with_flags(self, argv: list[str], others: Container[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the tool's own arguments, and the words that are left for another parser.

        Args:
            others: flags that the other parser knows; one that neither knows is refused here, where it is near to one
                of the tool's own.
        """
        options, rest = self.parse_known_args(argv)
        for word in rest:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in others:
                message = f"unrecognized arguments: {flag}"
                if self._meant(message):
                    self.error(message)
        return options, rest

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the process, once all is written: a reader that has left must be noticed before."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        """Raise `message` as a ConfigurationError; for an unknown flag it names the nearest known flag."""
        raise ConfigurationError(f"{message}{self._meant(message)} (see {self.prog} --help)")

    def _meant(self, message: str) -> str:
        kind, _, words = message.partition(": ")
        if kind == "the following arguments are required":
            return self._misspelled(words.split(", "))
        if kind != "unrecognized arguments" or not words.startswith("--"):
            return ""
        flag = words.split()[0].partition("=")[0]
        if flag in self._removed:
            return f"; {flag} was removed: {self._removed[flag]}"
        close = difflib.get_close_matches(flag, self._flags, n=1, cutoff=0.8)
        if close:
            return f"; did you mean {close[0]}?"
        return "; training flags come after --" if "-- <training flags>" in (self.usage or "") else ""

    def _misspelled(self, required: list[str]) -> str:
        """Return what to say of a word that was given in the place of a required flag."""
        for word in self._words:
            flag = word.partition("=")[0]
            close = difflib.get_close_matches(flag, required, n=1, cutoff=0.8)
            if close and flag not in self._flags:
                return f"; did you mean {close[0]} by {flag}?"
        return ""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and examples as they are written."""


def _is_program(name: str) -> bool:
    """Return whether this process was started as `megatron-ext`, or by a script of tools/ or tasks/."""
    return name.startswith("megatron-ext") or Path(name).absolute().parent.name in ("tools", "tasks")


def _examples(documentation: str | None) -> str | None:
    """Return the first indented paragraph."""
    shown = [text for text in (documentation or "").split("\n\n") if text.startswith("    ")]
    return "\n".join(["examples:", *(line[2:] for line in shown[0].splitlines())]) if shown else None


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return a tool's own arguments, and the training flags that follow `--`; without it there are none of these."""
    if "--" not in argv:
        return argv, []
    index = argv.index("--")
    return argv[:index], argv[index + 1 :]


def write_output(flag: str, path: str | Path, text: str) -> None:
    """Write the file that a tool's flag names, in UTF-8, in place of an older one in one step.

    Raises:
        StorageError: it cannot be written, or a folder or a pipe is in its place.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise StorageError(f"{flag} {path} cannot be written: {error.strerror}; give another path") from error


def run_tool(main: Callable[[list[str]], int]) -> NoReturn:
    """Call `main` with the command line and exit with the code it returns, or with its error's exit code.

    A TrainingError's text is the last line on the standard error output, without a traceback. Where the reader of the
    standard output has ended (`| head`), the program ends as SIGPIPE would end it, without a message.
    """
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except TrainingError as error:
        note(f"error: {error}")
        code = error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone(sys.stdout.fileno()):
            # Text left in the buffer would fail once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        note(f"error: {described(error)}")
        code = 74
    if "torch" not in sys.modules:
        # The end of the interpreter looks through all objects; torch's libraries report theirs unless it does.
        gc.freeze()
    sys.exit(code)


def _reader_is_gone(descriptor: int) -> bool:
    """Return whether the reading end of this pipe is closed; another pipe may be the broken one."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
