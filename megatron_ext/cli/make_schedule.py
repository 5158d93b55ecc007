"""Makes a pipeline's schedule for measured times and a limit of memory, as a file for --pipeline-schedule.

    python tools/make_schedule.py --stages 4 --chunks 2 --microbatches 16 --output table.csv       # equal passes
    python tools/make_schedule.py --stages 4 --microbatches 16 --forward-ms 8 --inputs-ms 9 --weights-ms 6 --send-ms 1
    python tools/make_schedule.py --run checkpoints/run --microbatches 16 --memory 3 --output table.csv

The last takes the times of a run with --record-schedule, of its slowest pipeline; whole backward passes count half as
gradients of inputs, half of weights. Two chunks lie on the ranks like a V, unless --loop is given.
"""

import shutil
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.config.derived.pipeline_split import stage_of_chunk
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan.schedule_search import Pipeline, best
from megatron_ext.plan.simulated_timeline import table_timeline
from megatron_ext.plan.timeline import COLOURS, as_text
from megatron_ext.plan.timeline_svg import as_page
from megatron_ext.telemetry import schedule_record
from megatron_ext.terminal import say

_PARTS = ("forward", "inputs", "weights")


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.stages is None) == (options.run is None):
        parser.error("give --stages N or --run DIR")
    stages, chunks, times = options.stages, options.chunks, {}
    if options.run is not None:
        stages, chunks, times = _recorded(options.run, loop=options.loop)
    v_shaped = chunks == 2 and not options.loop
    if stages < 2 or chunks < 1 or options.microbatches < 1 or options.memory < 1.0:
        raise ConfigurationError(
            f"{stages} stages, --chunks {chunks}, --microbatches {options.microbatches}, --memory {options.memory:g}: "
            "there must be two stages, and one of everything else"
        )
    for part in _PARTS:
        given = getattr(options, f"{part}_ms")
        if given is not None or part not in times:
            times[part] = [(1.0 if given is None else given) / chunks] * (stages * chunks)
        if min(times[part]) <= 0.0:
            raise ConfigurationError(f"--{part}-ms {min(times[part]):g} is no time; give more than 0")
    pipeline = Pipeline(
        stages, chunks, options.microbatches, **times, send=options.send_ms, limit=options.memory, v_shaped=v_shaped
    )
    found = best(pipeline)
    timeline = table_timeline(pipeline, found.rows)
    width = options.width or shutil.get_terminal_size((100, 24)).columns
    say("\n".join(as_text(timeline, width, colour=sys.stdout.isatty())), colours=COLOURS)
    held = f"most held: {found.held:g} microbatches"
    say(f"\nThe busiest rank waits {found.bubble:.1%} of the time that it works; {held}.")
    if options.html is not None:
        write_output("--html", options.html, as_page(timeline, []))
    if options.output is not None:
        write_output("--output", options.output, "".join(",".join(map(str, row)) + "\n" for row in found.rows))
    return 0


def _recorded(run: Path, *, loop: bool) -> tuple[int, int, dict[str, list[float]]]:
    """Return the stages and chunks of a recorded run, and the median times of its passes by part and virtual stage, in
    milliseconds."""
    records = schedule_record.read(run)
    place, lanes = records[0].position, schedule_record.timeline(records).lanes
    v_shaped = place.chunks == 2 and not loop
    times = {part: [0.0] * (place.stages * place.chunks) for part in _PARTS}
    for stage, lane in enumerate(lanes):
        seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for each in lane.passes:
            kinds = ["forward"] if each.forward else [each.half] if each.half else ["inputs", "weights"]
            for kind in kinds:
                seconds[kind, each.chunk].append(1000.0 * (each.end - each.begin) / len(kinds))
        for (kind, chunk), each_time in seconds.items():
            virtual = chunk * place.stages + stage_of_chunk(stage, chunk, place.stages, v_shaped=v_shaped)
            times[kind][virtual] = statistics.median(each_time)
    return place.stages, place.chunks, times


def _parser() -> ToolParser:
    parser = ToolParser("Make a pipeline's schedule for measured times and a limit of memory.", __doc__)
    parser.add_argument("--stages", type=int, metavar="N", help="ranks of the pipeline")
    parser.add_argument("--run", type=Path, metavar="DIR", help="take stages and times of a run with --record-schedule")
    parser.add_argument("--chunks", type=int, default=2, metavar="N", help="with --stages: model chunks of each rank")
    parser.add_argument("--loop", action="store_true", help="two chunks in a loop, not in a V, as in a recorded run")
    parser.add_argument("--microbatches", type=int, required=True, metavar="N", help="microbatches of a step")
    for part, what in zip(_PARTS, ("forward pass", "gradients of inputs", "gradients of weights"), strict=True):
        parser.add_argument(
            f"--{part}-ms", type=float, metavar="MS", help=f"time of a microbatch's {what} on a rank; default 1"
        )
    parser.add_argument("--send-ms", type=float, default=0.0, metavar="MS", help="time of a message between ranks")
    parser.add_argument(
        "--memory", type=float, default=float("inf"), metavar="N", help="microbatches of activations a rank may hold"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table, for --pipeline-schedule")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the picture as a page")
    parser.add_argument("--width", type=int, metavar="N", help="columns; default the terminal's")
    return parser
