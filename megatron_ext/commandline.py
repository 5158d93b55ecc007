"""Holds what the programs share: errors of the command line, how a failure ends them, and readers that leave."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_ext.errors import ConfigurationError, TrainingError


class ToolParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigurationError (exit code 64) and never guesses an abbreviated flag.

    Args:
        description: what the program does, in a sentence.
        documentation: a docstring whose indented lines, up to the first paragraph after them, are the examples that
            --help ends with.
    """

    def __init__(self, description: str, documentation: str | None = None):
        super().__init__(description=description, allow_abbrev=False, formatter_class=_Formatter)
        self.epilog = _examples(documentation, self.prog)

    def error(self, message: str) -> NoReturn:
        """Raise `message` as a ConfigurationError."""
        raise ConfigurationError(f"{message} (see {self.prog} --help)")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and examples as they are written."""


def _examples(documentation: str | None, program: str) -> str | None:
    """Return the first indented paragraph, with the script's name as the program was started."""
    shown = [text for text in (documentation or "").split("\n\n") if text.startswith("    ")]
    if not shown:
        return None
    text = shown[0].replace("%", "%%")
    if program.startswith("megatron-ext"):
        text = re.sub(r"(python )?tools/\w+\.py", program, text)
    return "\n".join(["examples:", *(line[2:] for line in text.splitlines())])


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return a tool's own arguments, and the training flags that follow `--`; without it there are none of these."""
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def run_tool(main: Callable[[list[str]], int]) -> NoReturn:
    """Call `main` with the command line and exit with what it returns, or with its error's exit code.

    A TrainingError's text is the last line on the standard error output, without a traceback.
    """
    survive_closed_pipes()
    try:
        code = main(sys.argv[1:])
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 74
    sys.exit(code)


def survive_closed_pipes() -> None:
    """Let the process go on in silence when whoever reads its output leaves, as `head` does.

    What is printed after that goes nowhere, and the exit code stays the program's own.
    """
    sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)


class _Lasting:
    """A text stream that turns to /dev/null once its pipe is closed at the other end."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write out what is buffered, or drop it."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        # What the stream still holds goes there too, when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
