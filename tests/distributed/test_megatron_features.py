"""What scripts of Megatron-LM ask for beyond the usual, on real ranks: layouts against one process, and effects."""

import gc
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prove.parity import compare
from megatron_ext.plugins.prove.recorded_training import RunRecord, record
from tests.support.corpora import write_corpus
from tests.support.resaving import assert_same_tensors, saved_by

# Of the second tier: its flags are held by tests/unit, and by rows of tests/parity/test_matrix.py.
pytestmark = pytest.mark.full

FLAGS = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --position-embedding-type rope --seq-length 16 --mock-data --vocab-size 61
    --make-vocab-size-divisible-by 16 --micro-batch-size 2 --train-iters 12 --lr 1e-3 --lr-warmup-iters 2
    --lr-decay-style cosine --eval-interval 4 --eval-iters 1 --init-method-std 0.1 --hidden-dropout 0
    --attention-dropout 0 --disable-bias-linear --num-workers 0
"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24"
MODELS = {
    "dense": (
        "--rotary-interleaved --rotary-percent 0.5 --init-method-xavier-uniform --embedding-init-method-std 0.3 "
        "--decoupled-lr 5e-3 --decoupled-min-lr 1e-4 --step-batch-size-schedule '0:4 64:8 192:12' "
        "--eval-global-batch-size 4 --eval-micro-batch-size 1"
    ),
    "sinkhorn": f"--global-batch-size 8 {EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    "sinkhorn, two experts": f"--global-batch-size 8 {EXPERTS} --moe-router-load-balancing-type sinkhorn",
    "loss of each sample": (
        f"--global-batch-size 8 {EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3"
    ),
    "loss of the global batch": (
        f"--global-batch-size 8 {EXPERTS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.3"
    ),
    "moments in bf16": "--global-batch-size 8 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
    "moments in fp16": "--global-batch-size 8 --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 --adam-beta2 0.95",
}
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CP2 = "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = [
    ("dense", 4, f"{TP2} {PP2}"),
    ("dense", 4, f"{PP2} --use-tp-pp-dp-mapping {ZERO}"),
    ("dense", 2, "--use-torch-fsdp2"),
    ("dense", 2, f"{CP2} --optimizer-cpu-offload"),
    ("sinkhorn, two experts", 2, CP2),
    ("loss of each sample", 2, CP2),
    ("loss of the global batch", 2, f"{ZERO} --expert-model-parallel-size 2"),
    ("loss of the global batch", 4, f"{TP2} {CP2} {RECOMPUTE}"),
    ("moments in bf16", 2, "--use-megatron-fsdp"),
    ("moments in fp16", 2, ZERO),
]
REPEATED = [
    ("dense", 2, "--use-megatron-fsdp"),
    ("sinkhorn", 4, f"{TP2} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
    ("sinkhorn", 2, CP2),
    ("loss of each sample", 4, f"{TP2} {CP2}"),
    ("sinkhorn, two experts", 2, TP2),
    ("loss of the global batch", 4, f"{PP2} {RECOMPUTE}"),
    ("loss of the global batch", 2, "--use-megatron-fsdp"),
    ("moments in bf16", 4, f"{TP2} {ZERO}"),
    ("moments in fp16", 2, "--use-torch-fsdp2"),
    ("moments in fp16", 2, "--use-megatron-fsdp"),
]
"""The same with another scheme or number of experts: left to --all."""


def _flags(model: str, more: str = "") -> list[str]:
    return shlex.split(f"{FLAGS} {MODELS[model]} {more}")


STEPS = 4  # two of the warmup, and in these the dense model's global batch grows from 4 samples to 12


@cache
def _one_process(model: str) -> RunRecord:
    return record(_flags(model), 1, STEPS)


@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [pytest.param(*case, id=f"{case[0]}: {case[2]}") for case in LAYOUTS]
    + [pytest.param(*case, id=f"{case[0]}: {case[2]}", marks=pytest.mark.slow) for case in REPEATED],
)
def test_a_layout_trains_as_one_process(model: str, ranks: int, layout: str):
    assert compare(_one_process(model), record(_flags(model, layout), ranks, STEPS)).problems() == []


def _balancing_gradients(run: Any) -> list[list[Any]]:
    """Gradients of the scores of three microbatches by the loss of the global batch: ours, and the engine's."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_ext.parts.experts.router import Router

    router: Any = next(module for module in run.chunks[0].modules() if isinstance(module, Router))
    found: list[list[Any]] = []
    for apply in (Router._apply_global_aux_loss, TopKRouter._apply_global_aux_loss):
        generator = torch.Generator().manual_seed(0)
        router.reset_global_aux_loss_tracker()
        router.global_tokens_per_expert, router.ga_steps = torch.zeros(4), torch.zeros(())
        found.append([])
        for _ in range(3):
            scores = torch.rand(32, 4, generator=generator).requires_grad_()
            chosen = scores.detach().argsort(dim=1).argsort(dim=1) >= 2
            apply(router, scores * 1, scores, chosen).sum().backward()
            found[-1].append(scores.grad)
    return found


def test_the_loss_of_the_global_batch_is_the_engines_own_for_one_rank():
    flags = [*_flags("loss of the global batch"), "--device", "cpu"]
    [(ours, engines)] = run_ranks(1, _in_run, flags, _balancing_gradients)
    for found, known in zip(ours, engines, strict=True):
        assert (found == known).all()
        assert (found != 1).any()
    assert (ours[0] != ours[1]).any()


def test_first_weights_are_drawn_as_asked():
    weights = _one_process("dense").weights
    embedding = weights["embedding.word_embeddings.weight"][:61]
    assert embedding.std() == pytest.approx(0.3, rel=0.05)
    for name, weight in weights.items():
        if name.endswith(".weight") and weight.ndim == 2 and "embedding" not in name:
            bound = np.sqrt(6 / sum(weight.shape))
            assert 0.97 * bound < abs(weight).max() <= bound, name
            assert weight.std() == pytest.approx(bound / np.sqrt(3), rel=0.06), name


def _rates(flags: list[str]) -> list[tuple[float, dict[str, float]]]:
    """By step, the rate of the curve and that of each parameter's group on this rank."""
    from megatron_ext import device
    from megatron_ext.model.names import global_named_parameters
    from megatron_ext.optim.curves import LearningRateCurve, learning_rate
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    config = configure(flags).config
    run = build_run(config, device.install("cpu"))
    names = {id(parameter): name for name, parameter in global_named_parameters(run.chunks)}
    curve, seen = LearningRateCurve.from_config(config), []
    trainer = Trainer(run, [])
    for _ in range(4):
        progress = run.state.scheduled_samples
        trainer.step()
        rates = {}
        for part in run.sharding.parts(run.optimizer):
            of_group = {id(main): group["lr"] for group in part.core.optimizer.param_groups for main in group["params"]}
            rates |= {names[id(weight)]: of_group[id(main)] for weight, main in part.main_parameters()}
        seen.append((learning_rate(progress, curve), rates))
    return seen


@pytest.mark.parametrize("layout", ["", "--use-distributed-optimizer --bf16", "--optimizer lion"])
def test_embeddings_and_output_layer_have_a_rate_of_their_own(layout: str):
    """Of the same shape, so that at every step it is 5 times the usual one where it decays to 5 times the lowest."""
    more = f"--untie-embeddings-and-output-weights --min-lr 1e-5 --decoupled-min-lr 5e-5 {layout}"
    [steps] = run_ranks(1, _rates, [*_flags("dense", more), "--device", "cpu"])
    for rate, rates in steps:
        assert {"embedding.word_embeddings.weight", "output_layer.weight"} < set(rates)
        for name, found in rates.items():
            own = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            assert found == pytest.approx(5 * rate if own else rate), name


@pytest.mark.parametrize(
    ("moments", "layout"),
    [
        # Slow: whole states, and another sharding of the same roots.
        pytest.param("bf16", "", marks=pytest.mark.slow),
        ("bf16", "--bf16 --main-grads-dtype bf16 --use-distributed-optimizer"),
        ("bf16", "--use-torch-fsdp2"),
        ("fp16", "--bf16 --use-distributed-optimizer"),
        pytest.param("fp16", "--use-torch-fsdp2", marks=pytest.mark.slow),
    ],
)
def test_moments_in_16_bits_survive_a_checkpoint(moments: str, layout: str, tmp_path: Path):
    flags = [*_flags(f"moments in {moments}", "--train-iters 14 --global-batch-size 4"), "--device", "cpu"]
    saved = saved_by((2, layout), flags, None, tmp_path / "saved")
    found = saved_by((2, layout), flags, saved.folder, tmp_path / "found")
    assert_same_tensors(found, saved)
    assert found.losses == saved.losses


def _in_run(flags: list[str], what: Callable[[Any], Any]) -> Any:
    """Build the run on this rank, and return what is made of it."""
    from megatron_ext import device
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    return what(build_run(configure(flags).config, device.install("cpu")))


def _gradients(run: Any) -> tuple[list[str], float, float]:
    """Types of the gradients that are reduced, their norm, and the loss of the first step."""
    from megatron_ext.train.trainer import Trainer

    result = Trainer(run, []).step()
    assert result.grad_norm is not None
    buffers = [buffer for chunk in run.chunks for buffer in chunk.buffers]
    return sorted({str(buffer.grad_data.dtype) for buffer in buffers}), result.grad_norm, result.loss


# DDP is slow: the distributed optimizer reduces the same buffers.
@pytest.mark.parametrize("layout", [pytest.param("", marks=pytest.mark.slow), ZERO])
def test_gradients_are_kept_and_reduced_in_bf16(layout: str):
    """The gradients are the same but for rounding to 8 bits, of each microbatch and of each rank's sum."""
    flags = [*_flags("dense", f"--bf16 {layout}"), "--device", "cpu"]
    exact, norm, loss = run_ranks(2, _in_run, flags, _gradients)[0]
    short, rounded_norm, same_loss = run_ranks(2, _in_run, [*flags, "--grad-reduce-in-bf16"], _gradients)[0]
    assert (exact, short) == (["torch.float32"], ["torch.bfloat16"])
    assert loss == same_loss
    assert norm != rounded_norm
    assert norm == pytest.approx(rounded_norm, rel=2**-7)


def _collections(run: Any) -> tuple[list[int], bool, bool, int]:
    """Steps after which garbage was collected, whether Python collects by itself in between and afterwards, and the
    objects that are frozen afterwards."""
    from megatron_ext.train.callbacks.garbage import GarbageCollection
    from megatron_ext.train.trainer import Callback, Trainer

    seen: list[int] = []
    during: list[bool] = []

    class Watch(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            during.append(gc.isenabled() or gc.get_freeze_count() == 0)

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append(run.state.iteration)

    gc.callbacks.append(collected)
    Trainer(run, [GarbageCollection(3, 4), Watch()]).fit()
    gc.callbacks.remove(collected)
    return sorted(set(seen)), any(during), gc.isenabled(), gc.get_freeze_count()


def test_garbage_is_collected_on_all_ranks_at_the_same_steps():
    flags = [*_flags("moments in bf16", "--manual-gc --global-batch-size 4 --num-layers 1"), "--device", "cpu"]
    ranks = run_ranks(2, _in_run, flags, _collections)
    assert ranks == [([0, 3, 4, 6, 8, 9, 12], False, True, 0)] * 2


def _microbatch(run: Any) -> tuple[str, list[list[int]]]:
    """What reads the tokens, and those of the first microbatch."""
    reader = run.loaders.samples.part(0).dataset.bin_reader
    return type(reader).__name__, run.loaders.train.global_batch(0, 4)[0].tokens.tolist()


def test_tokens_are_the_same_without_a_memory_map(tmp_path: Path):
    write_corpus(tmp_path / "corpus", 4000)
    data = (
        f"--mock-data=false --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size 64 --data-path {tmp_path}/corpus"
    )
    flags = [*_flags("sinkhorn", f"{data} --eval-interval 0"), "--device", "cpu"]
    [(mapping, mapped)] = run_ranks(1, _in_run, flags, _microbatch)
    [(reading, tokens)] = run_ranks(1, _in_run, [*flags, "--no-mmap-bin-files"], _microbatch)
    assert (mapping, reading) == ("_MMapBinReader", "_FileBinReader")
    assert mapped == tokens
    assert len({token for sample in tokens for token in sample}) > 10


def _evaluations(run: Any) -> tuple[list[tuple[int, float]], int, int]:
    """(Iteration, loss) of each evaluation, the steps that were taken, and the files that were saved."""
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.signals import SignalWatcher
    from megatron_ext.train.callbacks.standard import standard_callbacks
    from megatron_ext.train.trainer import Callback, Trainer

    seen: list[tuple[int, float]] = []

    class Watch(Callback):
        def on_evaluation(self, trainer: Trainer, metrics: Any) -> None:
            loss = getattr(metrics, "validation_loss", None)
            seen.append((metrics.iteration, metrics.test_loss if loss is None else loss))

    flags = run.config.checkpoint
    if flags.load is not None:
        load_checkpoint(run, flags.load)
    first = run.state.iteration
    with SignalWatcher(None, None) as signals:
        Trainer(run, [*standard_callbacks(run, signals, RunStatus(run.rank)), Watch()]).fit()
    return seen, run.state.iteration - first, len(list(Path(flags.save).glob("iter_*")))


def test_evaluation_alone_trains_and_saves_nothing(tmp_path: Path):
    folders = f"--save {tmp_path / 'saved'}"
    words = "--global-batch-size 4 --start-eval-at-iter 8 --no-save-optim --log-interval 1"
    flags = [*_flags("sinkhorn", words), "--device", "cpu"]
    [(trained, steps, saved)] = run_ranks(1, _in_run, [*flags, *folders.split()], _evaluations)
    assert [iteration for iteration, _ in trained] == [8, 12, 12]
    assert (steps, saved) == (12, 1)
    alone = f"--skip-train --load {tmp_path / 'saved'} --save {tmp_path / 'other'} --tensor-model-parallel-size 2"
    for found in run_ranks(2, _in_run, [*flags, *alone.split(), "--sequence-parallel"], _evaluations):
        losses, steps, saved = found
        assert [iteration for iteration, _ in losses] == [12, 12]
        assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in trained[1:]], rel=1e-6)
        assert (steps, saved) == (0, 0)
