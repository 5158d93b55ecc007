"""Buckets of gradients and weights: each is reduced once a step, however many microbatches, which take every sample
once; and gathered before its first use with --overlap-param-gather, whoever reads it.
"""

import importlib
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.names import global_named_parameters
from megatron_ext.train.callbacks.evaluation import evaluate
from megatron_ext.train.step import compute_gradients, held_out_loss
from megatron_ext.train.trainer import Trainer
from tests.support.checkpoints import build, train
from tests.support.program import tiny
from tests.support.selection import chosen, marked
from tests.support.several_models import in_turn

FLAGS = tiny("--num-layers 4")
RAMP = shlex.split("--global-batch-size 8 --rampup-batch-size 4 4 7 --train-samples 40")
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 3000"
LAYOUTS: dict[str, tuple[int, str]] = {
    "at the end of the step": (2, ""),
    "overlapped": (2, OVERLAP),
    "distributed optimizer": (2, f"--use-distributed-optimizer --overlap-param-gather {OVERLAP}"),
    "PP2 VPP2, distributed optimizer": (
        4,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer "
        f"{OVERLAP}",
    ),
}


def _reductions(flags: list[str]) -> tuple[list[int], list[int], list[list[int]]]:
    """One rank: global batch of every step, sizes of the buckets, and sizes of what every step reduced over DP."""
    run = build(flags)
    module: Any = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    reduced: list[int] = []
    all_reduce, reduce_scatter = torch.distributed.all_reduce, module.dist_reduce_scatter_func

    def counted_all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.numel() > 1000:  # the loss, token counts and norms are small
            reduced.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    def counted_reduce_scatter(output: torch.Tensor, whole: torch.Tensor, *args: Any, **options: Any) -> Any:
        reduced.append(whole.numel())
        return reduce_scatter(output, whole, *args, **options)

    torch.distributed.all_reduce, module.dist_reduce_scatter_func = counted_all_reduce, counted_reduce_scatter
    trainer, batches, of_steps = Trainer(run, []), [], []
    for _ in range(4):
        reduced.clear()
        batches.append(trainer.step().global_batch_size)
        of_steps.append(sorted(reduced))
    run.loaders.close()
    groups = [group for chunk in run.chunks for group in chunk.bucket_groups]
    return batches, sorted(b.grad_data.numel() for group in groups for b in group.buckets), of_steps


@pytest.mark.parametrize("layout", marked(LAYOUTS, slow={"overlapped"}))  # as the distributed optimizer is
def test_a_step_reduces_every_bucket_once_whatever_the_number_of_microbatches(layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    untied = "--untie-embeddings-and-output-weights"  # tied, their gradients are summed over the end stages as well
    for batches, buckets, of_steps in run_ranks(world_size, _reductions, [*FLAGS, *RAMP, *flags.split(), untied]):
        assert batches == [4, 4, 8, 8]  # 2 microbatches on each data-parallel rank, then 4
        assert len(buckets) > 1 or "overlap-grad-reduce" not in flags
        assert of_steps == [buckets] * 4


def _samples(flags: list[str], steps: int, load: str | None, save: str | None) -> list[list[int]]:
    """One rank: the tokens of every sample that it trains on, in order."""
    run = build(flags)
    if load is not None:
        load_checkpoint(run, load)
    seen: list[list[int]] = []
    read = run.loaders.train.global_batch

    def recorded(*args: Any, **options: Any) -> Any:
        microbatches = read(*args, **options)
        seen.extend(row for batch in microbatches for row in batch.tokens.tolist())
        return microbatches

    run.loaders.train.global_batch = recorded
    train(run, steps)
    if save is not None:
        save_checkpoint(run, save)
    run.loaders.close()
    return seen


@pytest.mark.full
def test_another_batch_and_number_of_ranks_on_resume_repeats_and_skips_nothing(tmp_path: Path) -> None:
    length = ["--train-samples", "64"]
    [whole] = run_ranks(1, _samples, [*FLAGS, *length, "--global-batch-size", "32"], 1, None, None)
    folder = str(tmp_path)
    before = run_ranks(2, _samples, [*FLAGS, *length, "--global-batch-size", "4"], 3, None, folder)
    [after] = run_ranks(1, _samples, [*FLAGS, *length, "--global-batch-size", "10"], 2, folder, None)
    assert len({tuple(sample) for sample in whole}) == 32
    assert sorted(sample for rank in before for sample in rank) == sorted(whole[:12])
    assert after == whole[12:32]


TWO_STAGES = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"  # tied embeddings at both ends
EXPERTS = "--num-experts 64 --expert-model-parallel-size 2 --disable-bias-linear"
WRITTEN: dict[str, str] = {
    "PP2 VPP2, distributed optimizer": f"{TWO_STAGES} --use-distributed-optimizer {OVERLAP}",
    "PP2, fused": "--pipeline-model-parallel-size 2 --bf16 --gradient-accumulation-fusion --linear-cross-entropy",
    "CP2, EP2": f"--context-parallel-size 2 {EXPERTS} --use-distributed-optimizer",
    "TP2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --overlap-grad-reduce",
}


def _written_and_added(all_flags: list[list[str]]) -> list[tuple[list[str], list[str], int]]:
    """One rank, of each layout: the weights whose gradients a step over NaN has with other bits than one that adds to
    megatron-core's zeros, the buffers with something in their padding, and how many experts have no gradient."""
    return in_turn(_differences, all_flags)


def _differences(flags: list[str]) -> tuple[list[str], list[str], int]:
    run: Any = build(flags)
    compute_gradients(run, range(8))  # the first step of a bucket is reduced at its end
    named: list[tuple[str, Any]] = list(global_named_parameters(run.chunks))
    buffers = [buffer for chunk in run.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for _, weight in named:
        weight.main_grad.fill_(float("nan"))
    held_out_loss(run, run.loaders.train.global_batch(0, 2))
    compute_gradients(run, range(8))
    written = [buffer.grad_data.clone() for buffer in buffers]
    for buffer in buffers:
        vars(buffer).pop("reset")  # megatron-core's own is left
        buffer.grad_data.zero_()
    compute_gradients(run, range(8))
    bits = torch.int16 if buffers[0].grad_data.dtype == torch.bfloat16 else torch.int32
    wrong = [
        name
        for buffer, before in zip(buffers, written, strict=True)
        for name, weight in named
        if weight in buffer.param_index_map
        for start, end, _ in [buffer.param_index_map[weight]]
        if not torch.equal(before[start:end].view(bits), buffer.grad_data[start:end].view(bits))
    ]
    for buffer, before in zip(buffers, written, strict=True):
        for start, end, _ in buffer.param_index_map.values():
            before[start:end] = 0.0
    padding = [str(before.numel()) for before in written if before.any()]
    matrices = [weight.main_grad for _, weight in named if weight.dim() == 3]
    without = sum(not of_expert.any() for main_grad in matrices for of_expert in main_grad)
    run.loaders.close()
    return wrong, padding, without


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest) -> dict[str, list[tuple[list[str], list[str], int]]]:
    """What each rank found, by layout; the same ranks take one after the other."""
    layouts = chosen(request, "written")
    common = "--global-batch-size 8 --train-samples 64 --hidden-dropout 0 --attention-dropout 0"
    flags = [[*FLAGS, *common.split(), *WRITTEN[layout].split()] for layout in layouts]
    by_rank = run_ranks(4, _written_and_added, flags)
    return dict(zip(layouts, map(list, zip(*by_rank, strict=True)), strict=True))


# The others are slow: this layout has stages, chunks and shards at once.
@pytest.mark.parametrize("written", marked(WRITTEN, slow=WRITTEN.keys() - {"PP2 VPP2, distributed optimizer"}))
def test_a_first_gradient_is_written_with_the_bits_of_a_sum_with_zeros(written: str, differences: Any) -> None:
    """A bad step and an evaluation before it change nothing, and experts without a token have zeros."""
    found = differences[written]
    assert [(wrong, padding) for wrong, padding, _ in found] == [([], [])] * 4
    assert (sum(without for *_, without in found) > 0) == ("EP2" in written)


GATHERED = """
    --ffn-hidden-size 48 --train-iters 4 --lr 1e-2 --eval-interval 2 --eval-iters 1 --hidden-dropout 0
    --attention-dropout 0 --num-workers 0 --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1000
"""
UNTIED = "--untie-embeddings-and-output-weights"
GATHERING = {
    "DP2, tied": (2, ""),
    "DP2, untied": (2, UNTIED),
    "DP2, untied, rotary, SwiGLU": (
        2,
        f"{UNTIED} --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--qk-layernorm",
    ),
    "DP2, untied, experts": (2, f"{UNTIED} --num-experts 4 --disable-bias-linear"),
    "TP2 SP DP2, untied": (4, f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 DP2, tied": (4, "--pipeline-model-parallel-size 2"),
}


def _numbers(flags: list[str]) -> list[str]:
    """Losses and norms of the gradients of four steps, and the loss of an evaluation after them."""
    run = build(flags)
    trainer, numbers = Trainer(run, []), []
    for _ in range(4):
        result = trainer.step()
        assert result.grad_norm is not None
        numbers += [result.loss.hex(), result.grad_norm.hex()]
    assert run.loaders.valid is not None
    numbers.append(evaluate(run, run.loaders.valid).hex())
    run.loaders.close()
    return numbers


# Slow: untied weights that the pipelined cases gather, too.
@pytest.mark.first("DP2, tied")
@pytest.mark.parametrize("name", marked(GATHERING, slow={"DP2, untied", "TP2 SP DP2, untied"}))
def test_weights_that_are_gathered_late_are_those_that_are_gathered_at_once(name: str) -> None:
    ranks, layout = GATHERING[name]
    flags = tiny(f"{GATHERED} {layout}")
    for at_once, late in run_ranks(ranks, in_turn, _numbers, [flags, [*flags, "--overlap-param-gather"]]):
        assert late == at_once
