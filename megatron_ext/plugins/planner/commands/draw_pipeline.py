"""Draws one simulated step of a pipeline: which stage works on which microbatch when, what waits, each stage's memory.

    python tools/draw_pipeline.py --stages 4 --chunks 2 --microbatches 8             # the order alone
    python tools/draw_pipeline.py --stages 4 --chunks 2 --schedule zbv               # that of --pipeline-schedule zbv
    python tools/draw_pipeline.py --world-size 64 --device h100 -- <training flags>  # with estimated times and memory

--html FILE writes the picture as a page, --svg FILE as a picture. What a step really did is in torch's own trace:
--profile --use-pytorch-profiler.
"""

import itertools
import shutil
from pathlib import Path

from megatron_ext.checkpoint.native.resume import look
from megatron_ext.commandline import ToolParser, split_at_dashes, write_output
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import resolve
from megatron_ext.cost.hardware import TABLE, Machine, constants_of, hardware
from megatron_ext.cost.schedule import named
from megatron_ext.errors import ConfigurationError
from megatron_ext.pipeline_tables import CLASSES
from megatron_ext.plugins.planner.search_input import question
from megatron_ext.plugins.planner.simulated_timeline import equal_stages, preview
from megatron_ext.plugins.planner.timeline import Timeline
from megatron_ext.plugins.planner.timeline_svg import as_page, as_picture
from megatron_ext.plugins.planner.timeline_text import COLOURS, as_text
from megatron_ext.rules.validate import problems
from megatron_ext.terminal import in_colour, say
from megatron_ext.train.configure import gather_facts


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    own, training = split_at_dashes(argv)
    parser = _parser()
    options = parser.parse_args(own)
    if (options.stages is not None) == bool(training):
        parser.error("give one of --stages N and training flags after --")
    if options.stages is None and options.microbatches is not None and options.microbatches < 1:
        parser.error(f"--microbatches {options.microbatches} is not a number from 1")
    if options.stages is not None:
        timeline = _order_alone(options.stages, options.chunks, options.microbatches, options.group, options.schedule)
    else:
        timeline = _simulated(training, options.world_size, options.device, options.gpus_per_node, options.microbatches)
    width = options.width or shutil.get_terminal_size((100, 24)).columns
    say("\n".join(as_text(timeline, width, colour=in_colour())), colours=COLOURS)
    if options.html is not None:
        write_output("--html", options.html, as_page(timeline))
    if options.svg is not None:
        write_output("--svg", options.svg, as_picture(timeline))
    return 0


def _order_alone(stages: int, chunks: int, microbatches: int | None, group: int | None, name: str | None) -> Timeline:
    number = 2 * stages if microbatches is None else microbatches
    each = stages if group is None else group
    if min(stages, chunks, number, each) < 1:
        raise ConfigurationError("--stages, --chunks, --microbatches and --group are numbers from 1")
    if name is not None:
        return _of_table(name, stages, chunks, number)
    if chunks > 1 and (stages == 1 or each < stages or 0 < number % each < stages):
        raise ConfigurationError(
            f"--chunks {chunks} needs --stages above 1, a --group of at least --stages {stages}, and as many "
            f"microbatches in the last group; --microbatches {number} in groups of {each} leave {number % each}"
        )
    return equal_stages(stages, chunks, number, each)


def _of_table(name: str, stages: int, chunks: int, microbatches: int) -> Timeline:
    if name not in CLASSES:
        raise ConfigurationError(f"--schedule {name} is none of {', '.join(CLASSES)}")
    try:
        table = named(name, stages, chunks, microbatches).rows
    except (ValueError, AssertionError) as error:  # of torch, for numbers that its schedule does not have
        raise ConfigurationError(f"--schedule {name}: {error}") from error
    forward = {(action.stage, action.microbatch) for row in table for action in row if action.kind == "F"}
    if forward != set(itertools.product(range(stages * chunks), range(microbatches))):
        raise ConfigurationError(f"--schedule {name} is made for another number of chunks than --chunks {chunks}")
    return equal_stages(stages, chunks, microbatches, name=name)


def _simulated(
    training: list[str], world_size: int | None, device: str, gpus_per_node: int, microbatches: int | None
) -> Timeline:
    typed = parse(training)
    devices = hardware(device)
    machine = Machine(devices, gpus_per_node, constants=constants_of(devices))
    if world_size is None:
        world_size = typed.values.get("world_size")
    ranks = _fewest(typed.values) if world_size is None else world_size
    values = {name: value for name, value in typed.values.items() if name != "world_size"}
    asked = question(values, gather_facts(typed, look(typed.values)), ranks, machine, memory_share=1.0)
    config = resolve({**asked.values, "world_size": ranks}, asked.facts)
    refusals = problems(config, asked.facts)
    if refusals:
        raise ConfigurationError(typed.as_typed(refusals))
    return preview(config, machine, microbatches)


def _fewest(values: dict[str, object]) -> int:
    """Return the ranks of one replica of the model."""
    product = 1
    for axis in ("tensor_model", "context", "pipeline_model"):
        product *= int(str(values.get(f"{axis}_parallel_size") or 1))
    return product


def _parser() -> ToolParser:
    parser = ToolParser("Draw one step of a pipeline.", __doc__)
    parser.usage = "%(prog)s [options] [-- <training flags>]"
    parser.add_argument("--stages", type=int, metavar="N", help="draw the order of so many equal stages")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="with --stages: chunks of each stage")
    parser.add_argument("--group", type=int, metavar="N", help="with --chunks: microbatches that one takes in turn")
    parser.add_argument("--schedule", metavar="NAME", help="with --stages: as of --pipeline-schedule")
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches to draw; default a few")
    parser.add_argument("--world-size", type=int, metavar="N", help="devices; default those of one replica")
    parser.add_argument("--device", choices=sorted(TABLE), default="h100", help="row of the table of data sheets")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="devices with fast links")
    parser.add_argument("--width", type=int, metavar="N", help="columns; default the terminal's")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the picture as a page as well")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the stages against time as a picture")
    return parser
