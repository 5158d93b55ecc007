"""Holds what the programs in tools/ share: errors of the command line, and how a failure ends the process."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron_ext.errors import ConfigurationError, TrainingError
from megatron_ext.terminal import printable


class ToolParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigurationError (exit code 64) and never guesses an abbreviated flag."""

    def __init__(self, description: str):
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Raise `message` as a ConfigurationError."""
        raise ConfigurationError(f"{message} (see {self.prog} --help)")


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
    try:
        code = main(sys.argv[1:])
    except TrainingError as error:
        print(printable(f"error: {error}"), file=sys.stderr, flush=True)
        code = error.exit_code
    except OSError as error:
        print(printable(f"error: {error}"), file=sys.stderr, flush=True)
        code = 74
    sys.exit(code)
