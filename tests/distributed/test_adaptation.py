"""Every row of the CPU adaptation is needed: without it, what we use of megatron-core fails on a CPU."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_ext import device
from megatron_ext.device import adaptation
from megatron_ext.device.adaptation import REPLACEMENTS
from megatron_ext.forkserver.ranks import RankError, run_ranks
from tests.support.several_models import end_layout

BASE = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--eval-iters 1 --make-vocab-size-divisible-by 8 --distributed-timeout-minutes 0.5 "
)
# Between them, what this project promises on a CPU.
RUNS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --fp16 --log-num-zeros-in-grad "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --position-embedding-type rope",
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--use-distributed-optimizer --overlap-grad-reduce --num-distributed-optimizer-instances 2",
    "--use-megatron-fsdp --bf16",
)


# Of these rows, each is needed where tokens go to the ranks of experts that are tensor-parallel too.
FOR_EXPERTS = {row.name for row in adaptation._FOR_EXPERTS}
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--tensor-model-parallel-size 2 --sequence-parallel",
)


def _train_without(name: str | None, folder: str, runs: tuple[str, ...]) -> None:
    """Train, evaluate, save and load; without one row of the table on a fresh rank, which nobody has adapted yet."""
    adapt = adaptation.adapt
    adaptation.adapt = lambda: adapt(without=[name] if name else [])
    from megatron_ext import device

    here = device.install("cpu")
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.evaluation import evaluate
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    for number, flags in enumerate(runs):
        run = build_run(configure((BASE + flags).split()).config, here)
        _check_dropout_generators(run.groups.tp.rank())
        trainer = Trainer(run, [])
        trainer.step()
        trainer.step()
        assert run.loaders.valid is not None
        evaluate(run, run.loaders.valid)
        save_checkpoint(run, f"{folder}/{number}")
        load_checkpoint(run, f"{folder}/{number}")
        run.loaders.close()
        # The default group stays: one store serves it only once.
        end_layout()


def _check_dropout_generators(tp_rank: int) -> None:
    """The engine's tracker really switches generators; where it does not, nothing fails by itself."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, tp_rank=tp_rank, ep_rank=0, etp_rank=0, force_reset_rng=True)
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    with tracker.fork():
        inside = torch.rand(3)
    outside = torch.rand(3)
    offset = 2718  # megatron-core's, between the seed of replicated and of sharded regions
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(7 + offset + tp_rank)))
    assert torch.equal(outside, torch.rand(3, generator=torch.Generator().manual_seed(7)))


# Slow: all other tests have all rows.
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "runs"), [(2, RUNS), (4, EXPERTS)], ids=["dense", "experts"])
def test_with_all_rows_the_runs_work(ranks: int, runs: tuple[str, ...], tmp_path) -> None:
    run_ranks(ranks, _train_without, None, str(tmp_path), runs)


# Slow: what is needed changes with torch and megatron-core alone.
@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in REPLACEMENTS])
def test_a_row_that_nothing_misses_must_go(name: str, tmp_path) -> None:
    ranks, runs = (4, EXPERTS) if name in FOR_EXPERTS else (2, RUNS)
    try:
        run_ranks(ranks, _train_without, name, str(tmp_path), runs, fresh=True, timeout=90)
    except RankError:
        return
    pytest.fail(f"megatron-core no longer needs the replacement of {name}: remove its row")


def _gather_and_free(rounds: int) -> None:
    """Coalesced gathers in flight together, whose outputs are freed once they have been waited for."""
    device.install("cpu")
    dist.init_process_group("gloo")
    shards = [torch.full((size,), float(dist.get_rank())) for size in (12288, 25000, 25000, 25000, 25000, 12288, 64)]
    for _ in range(rounds):
        outputs = [shard.new_full((2 * shard.numel(),), -1.0) for shard in shards]
        pending = []
        for output, shard in zip(outputs, shards, strict=True):
            with dist._coalescing_manager(dist.group.WORLD, async_ops=True) as works:  # pyright: ignore
                dist.all_gather_into_tensor(output, shard, async_op=True)
            pending.append(works)
        for works, output in zip(pending, outputs, strict=True):
            works.wait()
            assert output.sum() == output.numel() / 2
            assert (output[0], output[-1]) == (0.0, 1.0)
            output.untyped_storage().resize_(0)


# 3,000 rounds are slow: they find a broken heap that 10 may miss.
@pytest.mark.parametrize("rounds", [10, pytest.param(3000, marks=pytest.mark.slow)])
def test_coalesced_gathers_may_be_freed_after_their_wait(rounds: int) -> None:
    """Without `_FOR_GLOO` the long one dies of a broken heap two times out of three."""
    run_ranks(2, _gather_and_free, rounds)


def _threads_of_groups() -> tuple[int, list[float]]:
    """The threads that ten more groups start on this rank, and a sum over each."""
    device.install("cpu")
    dist.init_process_group("gloo")
    before, rank = len(os.listdir("/proc/self/task")), dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 0], [0, 1], [0], [1]) * 2]
    started = len(os.listdir("/proc/self/task")) - before
    sums = []
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            total = torch.tensor([1.0 + rank])
            dist.all_reduce(total, group=group)
            sums.append(total.item())
    return started, sums


@pytest.mark.skipif(not hasattr(c10d, "_create_gloo_process_group"), reason="older torch makes groups elsewhere")
def test_groups_share_the_thread_that_waits_for_messages() -> None:
    found = run_ranks(2, _threads_of_groups)
    # Each rank is in eight of the groups, which have two threads for their work.
    assert found == [(16, [3.0, 3.0, 3.0, own] * 2) for own in (1.0, 2.0)]
