"""Says which layout to use for this model on these devices, and why.

    python tools/plan.py --world-size 64 --device h100 --gpus-per-node 8 -- \
        --num-layers 32 --hidden-size 4096 ... --bf16 --seq-length 4096 --global-batch-size 512

Tries every layout that pretrain_gpt.py accepts: TP inside a node with SP, CP, PP and its chunks, EP, DDP, ZeRO-1,
ZeRO-2, ZeRO-3 and FSDP2, micro batches and recomputation. A layout flag that is given stays as it is. Memory is
formula; times are estimates from data sheets, --efficiency and --link-efficiency, to compare layouts by. Exit codes: 0
something fits, 1 nothing does (the last lines say what would), 64 the flags cannot work.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.checkpoint.native.resume import look
from megatron_ext.commandline import ToolParser, run_tool, split_at_dashes
from megatron_ext.config.arguments import parse
from megatron_ext.config.options import flag_of
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan import presentation as report
from megatron_ext.plan.choices import flags
from megatron_ext.plan.economics import add_flags, economics
from megatron_ext.plan.hardware import TABLE, Machine, hardware
from megatron_ext.plan.question import placeholders, question
from megatron_ext.plan.search import fewest_ranks, search, simpler_layouts, with_offloads
from megatron_ext.train.configure import gather_facts

_MOST_RANKS = 16  # times as many, in search of what would fit


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    own, training = split_at_dashes(argv)
    parser = _parser()
    options = parser.parse_args(own)
    if not training:
        parser.error("no training flags: give them after --")
    typed = parse(training)
    world_size = options.world_size or typed.values.get("world_size")
    if world_size is None:
        parser.error("give --world-size, the number of devices")
    _above_zero(options)
    devices = hardware(
        options.device,
        memory_gb=options.device_memory_gb,
        peak_16bit_tflops=options.peak_tflops,
        peak_tf32_tflops=options.peak_tflops,
        peak_fp32_tflops=options.peak_tflops,
        memory_bandwidth_gb_s=options.memory_gb_s,
        intra_node_gb_s=options.intra_node_gb_s,
        inter_node_gb_s=options.inter_node_gb_s,
    )
    machine = Machine(devices, options.gpus_per_node, options.efficiency, options.link_efficiency)
    values = {name: value for name, value in typed.values.items() if name != "world_size"}
    asked = question(values, gather_facts(typed, look(typed.values)), world_size, machine, options.memory_share)
    answer = search(asked, options.number)
    if answer.nearest is None:
        raise ConfigurationError(
            answer.refusals or ["no layout of these flags is legal; see pretrain_gpt.py --dry-run"]
        )
    beyond = economics(asked, answer.best, options) if answer.best else None
    if options.json is not None:
        found = report.as_json(asked, answer) | (beyond.json if beyond else {})
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    lines = report.head(asked, answer.nearest)
    if not answer.best:
        ranks = fewest_ranks(asked, _MOST_RANKS * world_size)
        offloads = with_offloads(asked, answer.nearest)
        print("\n".join([*lines, "", *report.nothing_fits(answer, asked, ranks, offloads)]))
        return 1
    lines += ["", f"{answer.fitting:,} of {answer.legal:,} layouts fit; the best ways to share the model:", ""]
    lines += [*report.table(answer.best), "", report.why(answer.best, asked)]
    lines += report.simpler(simpler_layouts(asked), asked)
    lines += beyond.lines if beyond else []
    added = flags(placeholders(values))
    if added:
        lines.append(f"assumed, since the rules ask for it: {' '.join(added)}")
    print("\n".join([*lines, "", "flags of 1, to add to yours:", f"    {report.command(answer.best[0].choice)}"]))
    return 0


def _parser() -> ToolParser:
    parser = ToolParser("Find the layouts of a model that fit on some devices, and estimate which is fastest.")
    parser.usage = "plan.py [options] -- <training flags>"
    parser.add_argument("--world-size", type=int, metavar="N", help="devices")
    parser.add_argument("--device", choices=sorted(TABLE), default="h100", help="row of the table of data sheets")
    parser.add_argument("--device-memory-gb", type=float, metavar="GB", help="of one device; default the table's")
    parser.add_argument("--memory-share", type=float, default=0.92, help="of a device's memory that may be filled")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="devices with fast links to each other"
    )
    parser.add_argument(
        "--efficiency", type=float, default=0.5, help="share of the peak that matrix products reach: yours"
    )
    parser.add_argument(
        "--link-efficiency", type=float, default=0.8, help="share of a link that collectives reach: yours"
    )
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="of dense matrices; default the table's")
    parser.add_argument("--memory-gb-s", type=float, metavar="X", help="memory bandwidth; default the table's")
    parser.add_argument(
        "--intra-node-gb-s", type=float, metavar="X", help="a device to its node, one way; default the table's"
    )
    parser.add_argument(
        "--inter-node-gb-s", type=float, metavar="X", help="a device to other nodes; default the table's"
    )
    parser.add_argument("--number", type=int, default=8, metavar="N", help="layouts to show")
    add_flags(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    return parser


def _above_zero(options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise ConfigurationError(f"{flag_of(name)} {value} is not above 0")
    for name in ("efficiency", "link_efficiency", "memory_share"):
        if getattr(options, name) > 1:
            raise ConfigurationError(f"{flag_of(name)} {getattr(options, name)} is above 1, a share of the whole")


if __name__ == "__main__":
    run_tool(main)
