"""Defines what a check finds, and what it looks at."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError


@dataclass(frozen=True)
class Launch:
    """The launch that is examined.

    Attributes:
        environment: variables of the processes.
        ranks: processes on this machine.
        nodes: machines.
        config: the run's configuration, where its flags were given and are right.
    """

    environment: Mapping[str, str]
    ranks: int = 1
    nodes: int = 1
    config: Config | None = None

    @property
    def has_launcher(self) -> bool:
        """Whether torchrun started this process, which then owns the address and the port."""
        return "TORCHELASTIC_RUN_ID" in self.environment

    @property
    def world_size(self) -> int:
        """Number of ranks of the launch."""
        return self.ranks * self.nodes


@dataclass(frozen=True)
class Finding:
    """One line of the report; a warning or an error also says why it matters and how to put it right."""

    level: str
    """One of ok, warning and error."""
    what: str
    why: str = ""
    fix: str = ""
    exit_code: int = ConfigurationError.exit_code
    """Exit code of the doctor, where the level is error."""

    def text(self) -> str:
        """Return the finding as lines of the report."""
        lines = [f"{self.level:<8} {self.what}"]
        lines += [f"{'':<8} why: {self.why}"] if self.why else []
        lines += [f"{'':<8} fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)


def ok(what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding("ok", what)


def warning(what: str, why: str, fix: str) -> Finding:
    """Return a finding that costs speed, or breaks some launches."""
    return Finding("warning", what, why, fix)


def error(what: str, why: str, fix: str, exit_code: int = ConfigurationError.exit_code) -> Finding:
    """Return a finding with which this launch cannot work."""
    return Finding("error", what, why, fix, exit_code)
