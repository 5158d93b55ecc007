"""Runs all checks of a launch, one after another."""

from megatron_ext.doctor import gpus, machine, network, software, variables
from megatron_ext.doctor.finding import Finding, Launch

CHECKS = (*software.CHECKS, *gpus.CHECKS, *network.CHECKS, *variables.CHECKS, *machine.CHECKS)


def examine(launch: Launch) -> list[Finding]:
    """Return what every check found, in their order."""
    return [finding for check in CHECKS for finding in check(launch)]


def exit_code(findings: list[Finding]) -> int:
    """Return 0 without an error, else the exit code of the first."""
    return next((finding.exit_code for finding in findings if finding.level == "error"), 0)
