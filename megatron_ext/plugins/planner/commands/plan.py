"""Says which layout to use for this model on these devices, and why; or how fast one layout is, and whether it fits.

    megatron-ext plan --world-size 64 --device h100 --gpus-per-node 8 -- \\
        --num-layers 32 --hidden-size 4096 ... --bf16 --seq-length 4096 --global-batch-size 512
    megatron-ext plan --evaluate --world-size 64 --device h100 --json - -- <all flags of a run>

Tries every layout that `megatron-ext pretrain` accepts: TP inside a node with SP, CP, PP with its chunks and uneven
stages, EP, DDP, ZeRO-1, ZeRO-2, ZeRO-3, FSDP2 and HSDP, micro batches, recomputation, and host memory where nothing
else fits. A layout flag that is given stays as it is; with --evaluate nothing is chosen at all. Memory is formula;
times are estimates, whose error docs/planner.md shows; --calibrate corrects them by a run of yours. Exit codes: 0
something fits, 1 nothing does (the last lines say what would; --evaluate does not end so), 64 the flags cannot work.
"""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.native.resume import look
from megatron_ext.commandline import ToolParser, split_at_dashes, write_output
from megatron_ext.config.parse.arguments import Typed, parse
from megatron_ext.config.parse.command_line import read
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.parse.settings import words_of
from megatron_ext.config.parse.stages import largest, read_stages
from megatron_ext.cost.dry_run import USABLE
from megatron_ext.cost.hardware import TABLE, Machine, constants_of, hardware
from megatron_ext.errors import ConfigurationError
from megatron_ext.gc_freeze import nothing_collected
from megatron_ext.plugins.families.hf_config import read_hf_config
from megatron_ext.plugins.pages.loss_curve import saved_values
from megatron_ext.plugins.planner import layout_evaluation
from megatron_ext.plugins.planner import plan_report as report
from megatron_ext.plugins.planner.calibrate import corrected, read_metrics
from megatron_ext.plugins.planner.layout_choices import flags
from megatron_ext.plugins.planner.search import (
    Candidate,
    Question,
    fewest_ranks,
    search,
    simpler_layouts,
    with_offloads,
)
from megatron_ext.plugins.planner.search_input import placeholders, question
from megatron_ext.plugins.planner.sensitivity import alternatives, hinges, limits, table, with_short_gradients
from megatron_ext.terminal import say, warn
from megatron_ext.train.configure import gather_facts

_MOST_RANKS = 16  # times as many, in search of what would fit


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    with nothing_collected():  # a search makes some million small objects, and no circles of them
        return _answer(argv)


def plan(settings: Mapping[str, Any] | None = None, /, **flags: Any) -> dict[str, Any]:
    """Find the layouts of a model that fit on some devices, and return them with the estimated time and memory of each,
    fastest first.

        plan(world_size=64, device="h100", bf16=True, num_layers=32, ..., global_batch_size=512)["best"][0]

    Settings are the flags of `megatron-ext plan` without their hyphens: its own, and those of the training, as
    `megatron_ext.pretrain` takes them. `evaluate=True` judges the layout that is given. `device` is a row of the table
    of data sheets, such as "h100". Nothing is printed.

    Args:
        settings: a dict of settings by the flags' names.
        flags: settings as keywords, which win over `settings`.
    Returns:
        The object that `megatron-ext plan --json` writes, which docs/planner.md describes.
    Raises:
        ConfigurationError: the settings cannot work, or no layout of them is legal; the text names every problem.
    """
    parser = _parser()
    named = {flag_of(name.lstrip("-")): value for name, value in {**(settings or {}), **flags}.items()}
    own = {flag: value for flag, value in named.items() if parser.knows(flag)}
    training = {flag: value for flag, value in named.items() if flag not in own}
    if not training and own.get("--hf-config") is None:
        raise ConfigurationError("no model: give settings of the training, such as num_layers=32, or hf_config=FOLDER")
    found: dict[str, Any] = {}
    with nothing_collected():
        _answer([*words_of(own, {}, parser.knows), "--", *words_of(training, {})], found)
    return found


def _answer(argv: list[str], found: dict[str, Any] | None = None) -> int:
    """Answer a command line: in text, or, where `found` is given, in that alone."""
    own, training = split_at_dashes(argv)
    parser = _parser()
    options = parser.parse_args(own)
    options.found = found
    if not training and options.hf_config is None:
        parser.error("no training flags: give them after --")
    if options.grad_reduce_in_bf16 and _BF16_GRADIENTS not in training:
        training = [*training, _BF16_GRADIENTS]
    typed = _parsed(training)
    world_size = options.world_size or typed.values.get("world_size")
    if world_size is None:
        parser.error("\n".join([*typed.problems, "give --world-size, the number of devices"]))
    _above_zero(options)
    if options.evaluate and options.svg is not None:
        parser.error("--svg draws the ways among which a search chooses; leave out --evaluate, or use --html")
    try:
        asked = _question(options, typed, world_size)
        if typed.problems:
            raise ConfigurationError(_refusals(options, asked))
        if options.calibrate is not None:
            asked = replace(asked, machine=_calibrated(options, asked))
        return _evaluate(options, asked) if options.evaluate else _search(options, asked, typed.values)
    except ConfigurationError as error:
        raise ConfigurationError([*typed.problems, *typed.as_typed(error.problems)]) from None


def _parsed(training: list[str]) -> Typed:
    """Return the training flags. Here --recompute-granularity may be none as well: then a search chooses none, which
    --evaluate takes the flag's absence for."""
    words = [word for each in training for word in (each.split("=", 1) if each == f"{_GRANULARITY}=none" else [each])]
    kept = [at for at, word in enumerate(words) if word != _GRANULARITY or words[at + 1 : at + 2] != ["none"]]
    if len(kept) == len(words):
        return read(training)
    left = [words[at] for at in kept if at - 1 in kept or at == 0]
    typed = read(left)
    return replace(typed, values={**typed.values, "recompute_granularity": None})


def _refusals(options: argparse.Namespace, asked: Question) -> list[str]:
    """Return the problems that the rules add to the problems of reading the flags."""
    if options.evaluate:
        evaluated = layout_evaluation.evaluate(asked)
        return evaluated if isinstance(evaluated, list) else []
    answer = search(asked, 1)
    return [] if answer.nearest is not None else list(answer.refusals)


def _question(options: argparse.Namespace, typed: Typed, world_size: int) -> Question:
    devices = hardware(
        options.device,
        memory_gb=options.device_memory_gb,
        peak_16bit_tflops=options.peak_tflops,
        peak_tf32_tflops=options.peak_tflops,
        peak_fp32_tflops=options.peak_tflops,
        memory_bandwidth_gb_s=options.memory_bandwidth_gb_s,
        intra_node_gb_s=options.intra_node_gb_s,
        inter_node_gb_s=options.inter_node_gb_s,
    )
    constants = replace(constants_of(devices), cores=options.processor_cores)
    machine = Machine(devices, options.gpus_per_node, options.efficiency, options.link_efficiency, constants)
    values = largest(read_stages(typed.values), typed.values).of(typed.values)
    values = {name: value for name, value in values.items() if name not in ("world_size", "stages")}
    facts = gather_facts(typed, look(typed.values))
    return question({**_model(options), **values}, facts, world_size, machine, options.memory_share)


def _model(options: argparse.Namespace) -> dict[str, Any]:
    """Return the model of --hf-config; nothing without it."""
    if options.hf_config is None:
        return {}
    # As --help says: with dropout, which pretraining has not, attention would be a slower kernel's.
    return {**read_hf_config(options.hf_config)[1], "hidden_dropout": 0.0, "attention_dropout": 0.0}


def _calibrated(options: argparse.Namespace, asked: Question) -> Machine:
    """Return the machine as a measured run corrects it."""
    if options.calibrate_flags is not None:
        words = parse(shlex.split(options.calibrate_flags)).values
        values = {**asked.facts.huggingface, **_model(options), **words, **placeholders(words)}
    else:
        values = saved_values(options.calibrate) or asked.values
    return corrected(asked.machine, values, asked.facts, read_metrics(options.calibrate))


def _evaluate(options: argparse.Namespace, asked: Question) -> int:
    """Print what the layout given takes and needs."""
    evaluated = layout_evaluation.evaluate(asked)
    if isinstance(evaluated, list):
        _write_json(options, layout_evaluation.refusal_as_json(asked.world_size, asked.machine, evaluated))
        raise ConfigurationError(evaluated)
    limits_json, limits_lines = _limits(options, asked, [layout_evaluation.as_candidate(evaluated)])
    _write_json(options, layout_evaluation.as_json(evaluated) | limits_json)
    lines = [*layout_evaluation.as_text(evaluated), *limits_lines]
    _write_page(options, asked, [layout_evaluation.as_candidate(evaluated)], lines)
    if not _is_stdout(options):
        say("\n".join(lines))
    return 0


def _search(options: argparse.Namespace, asked: Question, typed: dict[str, Any]) -> int:
    """Print the best layouts."""
    answer = search(asked, options.number)
    if answer.nearest is None:
        raise ConfigurationError(
            [
                *(answer.refusals or ["no layout of these flags is legal; see megatron-ext pretrain --dry-run"]),
                *alternatives(asked),
            ]
        )
    limits_json, limits_lines = _limits(options, asked, answer.best)
    short = with_short_gradients(asked, answer)
    _write_json(options, report.as_json(asked, answer, short) | limits_json)
    plain = list(simpler_layouts(asked))
    if options.svg is not None and not plain:
        warn("--svg: the flags allow none of the plain ways that it draws; nothing was written")
    elif options.svg is not None:
        write_output("--svg", options.svg, report.memory_picture(plain, asked))
    if _is_stdout(options) and options.html is None:
        return 0 if answer.best else 1
    lines = report.head(asked, answer.nearest)
    _write_page(options, asked, answer.best or [answer.nearest], lines)
    if _is_stdout(options):
        return 0 if answer.best else 1
    if not answer.best:
        ranks = fewest_ranks(asked, _MOST_RANKS * asked.world_size)
        offloads = with_offloads(asked, answer.nearest)
        say("\n".join([*lines, "", *report.nothing_fits(answer, asked, ranks, offloads)]))
        return 1
    lines += ["", f"{answer.fitting:,} of {answer.legal:,} layouts fit; the best ways to share the model:", ""]
    lines += [*report.table(answer.best, asked.machine), ""]
    lines += report.with_short_gradients(short, asked.machine)
    lines += [report.speed(answer.best[0], asked.machine), report.why(answer.best, asked)]
    lines += hinges(asked, answer)
    lines += report.simpler(plain, asked)
    lines += limits_lines
    lines += alternatives(asked)
    added = flags(placeholders(typed))
    if added:
        lines.append(f"assumed, since the rules ask for it: {' '.join(added)}")
    say("\n".join([*lines, "", "flags of 1, to add to yours:", f"    {report.command(answer.best[0].choice)}"]))
    return 0


def _limits(
    options: argparse.Namespace, asked: Question, best: Sequence[Candidate]
) -> tuple[dict[str, Any], list[str]]:
    """Return the limits of the first layout for --limits, as JSON values and as lines of text; both empty without the
    flag or a layout."""
    if not options.limits or not best:
        return {}, []
    parts = limits(asked, best, searched=not options.evaluate)
    return {"limits": [asdict(part) for part in parts]}, ["", *table(parts, best)]


def _write_page(options: argparse.Namespace, asked: Question, shown: Sequence[Candidate], lines: Sequence[str]) -> None:
    if options.html is not None:
        write_output("--html", options.html, report.as_page(asked, shown, lines))


def _write_json(options: argparse.Namespace, content: dict[str, Any]) -> None:
    if options.found is not None:
        options.found.update(content)
    if options.json is None:
        return
    text = json.dumps(content, indent=1) + "\n"
    if options.json == "-":
        say(text, end="")
    else:
        write_output("--json", options.json, text)


def _is_stdout(options: argparse.Namespace) -> bool:
    """Return whether the answer is no text for people."""
    return options.json == "-" or options.found is not None


_BF16_GRADIENTS = "--grad-reduce-in-bf16"
_GRANULARITY = "--recompute-granularity"


def _parser() -> ToolParser:
    parser = ToolParser(
        "Find the layouts of a model that fit on some devices, and estimate which is fastest.", __doc__, command="plan"
    )
    parser.usage = "%(prog)s [options] -- <training flags>"
    parser.add_argument("--world-size", type=int, metavar="N", help="devices")
    parser.add_argument("--evaluate", action="store_true", help="time and memory of the layout given, as it is")
    parser.add_argument(
        "--device", type=str.lower, choices=sorted(TABLE), default="h100", help="row of the table of data sheets"
    )
    parser.add_argument("--device-memory-gb", type=float, metavar="GB", help="of one device; default the table's")
    parser.add_argument("--memory-share", type=float, default=USABLE, help="of a device's memory that may be filled")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="devices with fast links to each other"
    )
    parser.add_argument(
        "--efficiency", type=float, help="share of the peak that large matrix products reach; default the table's"
    )
    parser.add_argument(
        "--link-efficiency", type=float, help="share of a link that collectives reach; default 0.8 inside a node, 0.95"
    )
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="of dense matrices; default the table's")
    parser.add_argument(
        "--memory-bandwidth-gb-s",
        "--memory-gb-s",
        type=float,
        metavar="X",
        help="memory bandwidth; default the table's. That of another row of the same chip means that row",
    )
    parser.add_argument(
        "--intra-node-gb-s", type=float, metavar="X", help="a device to its node, one way; default the table's"
    )
    parser.add_argument(
        "--inter-node-gb-s", type=float, metavar="X", help="a device to other nodes; default the table's"
    )
    parser.add_argument(
        "--hf-config", metavar="FOLDER", help="take the model from the config.json in this folder; no dropout"
    )
    parser.add_argument(
        _BF16_GRADIENTS, action="store_true", help="plan with 2-byte gradients, also where given after --"
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="METRICS", help="metrics.jsonl of a run of yours, which corrects all times"
    )
    parser.add_argument(
        "--calibrate-flags",
        metavar="'FLAGS'",
        help="that run's flags; default the config.yaml of the checkpoint next to the file, or the flags after --",
    )
    parser.add_argument(
        "--processor-cores", type=int, metavar="N", help="with --device cpu: cores that a node's processes share"
    )
    parser.add_argument("--number", type=int, default=8, metavar="N", help="layouts to show")
    parser.add_argument("--limits", action="store_true", help="say what 10%% more or less of each part would change")
    for flag in ("--tokens", "--dollars-per-hour", "--watts", "--mtbf-hours", "--stall", "--restart-minutes"):
        parser.remove_flag(flag, "multiply the seconds a step that --json - has by the steps of the run")
    for flag in ("--over-devices", "--over-seq-lengths"):
        parser.remove_flag(flag, "run the planner for each --world-size or --seq-length and read its --json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the layouts as a page as well")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the memory of the plain ways to share the model")
    parser.add_argument("--json", metavar="FILE", help="write everything there as well; - is the standard output")
    return parser


def _above_zero(options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise ConfigurationError(f"{flag_of(name)} {value} is not above 0")
    for name in ("efficiency", "link_efficiency", "memory_share"):
        value = getattr(options, name)
        if value is not None and value > 1:
            raise ConfigurationError(f"{flag_of(name)} {value} is above 1, a share of the whole")
