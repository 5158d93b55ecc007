"""Says after how many random draws each planted fault of a layout is found.

    python -m tests.support.faults_found --record faults.json
    python -m tests.support.faults_found --faults shift_qkv turn_the_ring_around --draws 300 --seed 300

A draw that has none of what a fault breaks is counted, and not trained: it cannot show the fault. Ranks that fail show
none either: what is looked for trains something else in silence.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from megatron_ext import device
from megatron_ext.plugins.prove.draws import Draw, Draws, draw
from megatron_ext.plugins.prove.parity import write_corpus
from megatron_ext.plugins.prove.trials import Trials
from tests.support import planted_faults as planted

_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CONTEXT, _EXPERTS, _CLIPPED = "--context-parallel-size", "--num-experts", "--qk-clip "
_LATE = "--overlap-param-gather|--use-megatron-fsdp"
_MUON = "--optimizer (muon|adaptive_muon)"
_BY_MATRICES = "--optimizer (muon|adaptive_muon|adafactor)"

FAULTS: Mapping[Callable[[], None], Sequence[str]] = {
    planted.shift_qkv: (_TENSOR,),
    planted.forget_sequence_parallel_mark: ("--sequence-parallel",),
    planted.keep_the_gradient_of_shared_keys_apart: ("--multi-latent-attention", _TENSOR),
    planted.move_the_bias_by_local_counts: ("--moe-router-enable-expert-bias",),
    planted.choose_groups_by_another_rank: ("--moe-router-num-groups",),
    planted.scale_weights_of_experts_twice: ("--moe-router-topk-scaling-factor",),
    planted.skip_tied_embedding_reduction: (_PIPELINE,),
    planted.read_tied_weights_before_their_gather: (_LATE,),
    planted.read_convolutions_before_their_gather: (_LATE, "gated_delta_net|kda"),
    planted.average_per_microbatch: (),
    planted.count_tokens_of_own_rank_only: (),
    planted.scale_depths_by_counts_of_own_rank: ("--mtp-num-layers",),
    planted.batch_sends_between_two_stages: (_PIPELINE,),
    planted.double_the_gradient_of_one_expert: (_EXPERTS, "--expert-model-parallel-size"),
    planted.add_the_bias_of_experts_on_every_rank: (_EXPERTS, _TENSOR),
    planted.weigh_no_bias_of_an_expert: (_EXPERTS,),
    planted.keep_what_another_rank_would: ("--moe-expert-capacity-factor",),
    planted.give_each_rank_two_neighbouring_chunks: (_CONTEXT,),
    planted.turn_the_ring_around: (f"{_CONTEXT} 4", "p2p"),
    planted.average_over_ranks: ("--use-torch-fsdp2",),
    planted.multiply_nothing_on_the_last_stage: (_PIPELINE, "--(residual|mlp)-multiplier|--use-mup"),
    planted.add_the_bias_of_attention_on_every_rank: (_TENSOR,),
    planted.give_every_rank_the_slopes_of_the_first: ("alibi", _TENSOR),
    planted.count_positions_from_each_chunk: ("alibi", _CONTEXT),
    planted.leave_out_the_sink_of_the_ring: ("--softmax-type", _CONTEXT, "p2p"),
    planted.gate_heads_in_the_order_of_the_last: ("--attention-output-gate", _TENSOR),
    planted.leave_parts_of_the_momentum_on_their_ranks: (_BY_MATRICES, _TENSOR),
    planted.leave_rows_of_the_momentum_on_their_ranks: (_MUON, "fsdp"),
    planted.take_means_of_parts: (_BY_MATRICES, f"{_TENSOR}|fsdp"),
    planted.bound_the_products_of_own_tokens: (_CLIPPED,),
    planted.look_at_the_keys_of_own_positions: (_CLIPPED, _CONTEXT),
    planted.rescale_rows_of_another_rank: (_CLIPPED, "fsdp"),
    planted.give_every_rank_its_own_momentum: (_MUON,),
}
"""Faults of layouts (those of one process alone would need no second layout to be seen), each with regular expressions
of flags, all of which a draw must have if the fault is to change anything in it."""


def found(
    faults: Sequence[Callable[[], None]], draws: Draws, trials: Trials, most: int
) -> Iterator[tuple[Callable[[], None], int, str]]:
    """Yield the faults that draws find, each with the number of draws until then and what was found.

    Args:
        faults: keys of FAULTS.
        draws: the draws, which are tried in their order, without those kills.
        trials: trains them.
        most: number of draws after which no more are tried.
    """
    left = list(faults)
    for number in range(most):
        drawn = replace(draw(draws, number), kill=None)
        for fault in [one for one in left if _can_show(drawn, FAULTS[one])]:
            verdict = trials.with_fault(fault).verdict(drawn)
            if verdict.problems and not verdict.is_rounding and not verdict.fails:
                left.remove(fault)
                yield fault, number + 1, verdict.problems[0]
        if not left:
            return


def _can_show(drawn: Draw, flags: Sequence[str]) -> bool:
    text = " ".join([*drawn.flags, *drawn.first.flags, *drawn.second.flags])
    return all(re.search(flag, f"{text} ") for flag in flags)


def main() -> None:
    """Print, and record, after how many draws each fault is found."""
    by_name = {fault.__name__: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=sorted(by_name), default=list(by_name), metavar="NAME")
    parser.add_argument("--seed", type=int, default=300)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--record", type=Path, help="a JSON list, to which each found fault is added at once")
    options = parser.parse_args()
    device.install("cpu")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        data = write_corpus(Path(folder), 5)
        draws, trials = Draws(options.seed, data, tuple(options.ranks)), Trials(Path(folder), data)
        faults = [by_name[name] for name in options.faults]
        for fault, count, problem in found(faults, draws, trials, options.draws):
            print(f"{fault.__name__}: found by draw {count}: {problem}", flush=True)
            if options.record is not None:
                known = json.loads(options.record.read_text()) if options.record.exists() else []
                row = {"fault": fault.__name__, "seed": options.seed, "found by draw": count, "problem": problem}
                row |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "seconds": round(time.monotonic() - begun)}
                options.record.write_text(json.dumps([*known, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
