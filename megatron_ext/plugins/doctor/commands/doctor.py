"""Looks for what breaks a launch, before it starts, in a few seconds.

    megatron-ext doctor --nproc-per-node 8 -- <the flags of your launch>
    torchrun --nproc-per-node 8 -m megatron_ext doctor --collectives

The first looks at this machine, alone: Python and packages, GPUs, where ranks meet, environment variables, limits, room
for checkpoints and, where they are given, the flags. The second makes all ranks talk, says which of them do not
answer, and how fast the others are. Each finding says what is wrong, why it matters, and what puts it right.

Exit codes: 0 nothing that stops the launch (there may be warnings), 64 the launch cannot work as it is set up, 74
checkpoints cannot be written, 76 ranks do not answer. torchrun itself returns 1 in place of all but the first.
"""

import os

from megatron_ext.commandline import ToolParser, split_at_dashes
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.plugins.doctor import machine, network, software, variables
from megatron_ext.plugins.doctor.finding import Finding, Launch, error
from megatron_ext.resilience.process_end import end_process
from megatron_ext.terminal import note, say

CHECKS = (
    software.python_is_new_enough,
    software.packages_are_the_tested_ones,
    software.apex_is_nvidias,
    software.one_megatron,
    machine.gpus_work,
    network.address_resolves,
    network.port_is_free,
    network.interfaces_exist,
    network.infiniband_is_there,
    network.ranks_come_from_a_launcher,
    variables.known_mistakes,
    variables.threads_fit_the_cores,
    machine.ranks_have_cores,
    machine.shared_memory_is_large_enough,
    machine.enough_files_may_be_open,
    machine.pages_may_be_locked,
    machine.checkpoints_have_room,
)
"""Checks of a launch, in the order of the report."""


def examine(launch: Launch) -> list[Finding]:
    """Return the findings of all checks, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(launch)]


def exit_code(findings: list[Finding]) -> int:
    """Return 0 without an error, else the exit code of the first."""
    return next((finding.exit_code for finding in findings if finding.level == "error"), 0)


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    own, training = split_at_dashes(argv)
    parser = ToolParser("Look for what breaks a launch.", __doc__)
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks on this machine; default one per GPU")
    parser.add_argument("--nnodes", type=int, metavar="N", default=_number("SLURM_NNODES", 1), help="machines")
    parser.add_argument("--collectives", action="store_true", help="make the ranks that torchrun started talk")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", default=20.0, help="of each stage of that")
    parser.add_argument("--megabytes", type=float, metavar="MB", default=64.0, help="of the messages that are timed")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="whose memory is sent")
    parser.remove_flag("--flight-recorder", "torch's torchfrtrace FOLDER says what it did")
    parser.usage = "%(prog)s [options] [-- <training flags>]"
    options = parser.parse_args(own)
    for flag, number in (("--nproc-per-node", options.nproc_per_node), ("--nnodes", options.nnodes)):
        if number is not None and number < 1:
            parser.error(f"{flag} {number} is not a number from 1")
    if options.collectives:
        return _collectives(options.device, options.timeout, options.megabytes)
    findings: list[Finding] = []
    ranks = options.nproc_per_node or _number("LOCAL_WORLD_SIZE", 0) or _gpus() or 1
    config = _configured(training, ranks * options.nnodes, findings) if training else None
    findings += examine(Launch(os.environ, ranks, options.nnodes, config))
    say("\n".join(finding.text() for finding in findings))
    code = exit_code(findings)
    levels = [finding.level for finding in findings]
    say(f"{levels.count('error')} errors, {levels.count('warning')} warnings")
    return code


def _collectives(kind: str, seconds: float, megabytes: float) -> int:
    from megatron_ext.plugins.doctor.collectives import NotTheReporter, check_collectives

    try:
        for finding in check_collectives(kind, seconds, megabytes):
            say(finding.text())
    except PeerLostError as lost:
        if not isinstance(lost, NotTheReporter):
            note(f"error: {lost}")
        end_process(lost.exit_code)  # a collective may hang on
    return 0


def _configured(flags: list[str], world_size: int, findings: list[Finding]) -> Config | None:
    """Return the configuration that the flags make; what is wrong with them goes to the findings."""
    from megatron_ext.train.configure import configure

    ranks = [] if "--world-size" in flags else ["--world-size", str(world_size)]
    try:
        return configure([*flags, *ranks, "--dry-run"]).config
    except ConfigurationError as wrong:
        # The text of a problem has its fix.
        findings += [error(problem, "the training would end with exit code 64", "") for problem in wrong.problems]
        return None


def _gpus() -> int:
    from megatron_ext.device.gpu_inventory import survey

    surveyed = survey()
    return len(surveyed.gpus) if surveyed else 0


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
