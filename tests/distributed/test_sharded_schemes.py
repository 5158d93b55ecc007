"""Whatever data-parallel ranks divide: what is saved (in the background too) resumes to the bit, loads in one process,
and exports to Hugging Face as one process's checkpoint does."""

import filecmp
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import Save, save_checkpoint
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors, differences
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from megatron_ext.plugins.prove import gather
from megatron_ext.train.callbacks.parameters_norm import parameters_norm
from megatron_ext.train.trainer import Trainer
from tests.support.checkpoints import build
from tests.support.hf_models import quiet_transformers
from tests.support.program import tiny
from tests.support.run_state import state_hash
from tests.support.several_models import end_layout

quiet_transformers()

# Three ranks would not divide it evenly; of SwiGLU's first matrix two ranks hold gate and up, four hold halves.
FLAGS = tiny("""
    --ffn-hidden-size 48 --group-query-attention --num-query-groups 2 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --train-iters 10 --lr 1e-2 --attention-dropout 0.1
    --hidden-dropout 0.1 --log-num-zeros-in-grad
""")
EXPERTS = "--num-experts=4 --moe-ffn-hidden-size=48"
UNTIED, BF16, FP16 = ("--untie-embeddings-and-output-weights", "--bf16", "--fp16 --initial-loss-scale 131072")
LION = "--optimizer=lion --lr=1e-3"
_MEGATRON = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_COPIES = "--num-distributed-optimizer-instances 2"
FAST: dict[str, tuple[int, str]] = {
    "ZeRO-3": (3, f"{_MEGATRON} optim_grads_params {BF16} --global-batch-size 3"),
    "FSDP2": (3, f"--use-torch-fsdp2 {BF16} --global-batch-size 3"),
    "PP2 FSDP2": (4, f"--use-torch-fsdp2 --pipeline-model-parallel-size 2 {UNTIED} {BF16}"),
}
SLOW = {
    # Megatron-FSDP's as ZeRO-3 is; the distributed optimizer's and two copies of FSDP2, which
    # test_checkpoint_layouts.py saves and loads; another optimizer, whose state goes with each scheme as Adam's does.
    "ZeRO-2": (2, f"{_MEGATRON} optim_grads {UNTIED} {BF16}"),
    "HSDP 2 x 2, ZeRO-1": (4, f"--use-distributed-optimizer {_COPIES} {UNTIED} {BF16}"),
    "ZeRO-1": (2, f"--use-distributed-optimizer {UNTIED} {BF16}"),
    "HSDP 2 x 2, FSDP2": (4, f"--use-torch-fsdp2 {_COPIES} {UNTIED} {BF16}"),
    "ZeRO-1, Lion": (2, f"--use-distributed-optimizer {UNTIED} {BF16} {LION}"),
    "ZeRO-3, Lion": (2, f"{_MEGATRON} optim_grads_params {BF16} {LION}"),
    "FSDP2, Lion": (2, f"--use-torch-fsdp2 {UNTIED} {LION}"),
    "HSDP 2 x 2, ZeRO-3": (4, f"{_MEGATRON} optim_grads_params {_COPIES} {UNTIED} {BF16}"),
    "HSDP 2 x 2, ZeRO-2": (4, f"{_MEGATRON} optim_grads {_COPIES} {BF16}"),
    "HSDP 2 x 2, Megatron-FSDP optim": (4, f"{_MEGATRON} optim {_COPIES} {BF16}"),
    "HSDP 2 x 2, Megatron-FSDP no_shard": (4, f"{_MEGATRON} no_shard {_COPIES} {BF16}"),
    "Megatron-FSDP no_shard": (2, f"{_MEGATRON} no_shard {UNTIED} {BF16}"),
    "Megatron-FSDP optim": (2, f"{_MEGATRON} optim {UNTIED} {BF16}"),
    "ZeRO-2, fp32": (2, f"{_MEGATRON} optim_grads"),
    "ZeRO-3, fp32": (2, f"{_MEGATRON} optim_grads_params {UNTIED}"),
    "ZeRO-1, fp16": (2, f"--use-distributed-optimizer {UNTIED} {FP16}"),
    "ZeRO-2, fp16": (2, f"{_MEGATRON} optim_grads {UNTIED} {FP16}"),
    "ZeRO-3, fp16": (2, f"{_MEGATRON} optim_grads_params {FP16}"),
    "ZeRO-2, experts": (3, f"{_MEGATRON} optim_grads {EXPERTS} {UNTIED} {BF16} --global-batch-size 3"),
    "ZeRO-3, EP2, expert DP2": (
        4,
        f"{_MEGATRON} optim_grads_params --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        f"{EXPERTS} {UNTIED} {BF16}",
    ),
    "HSDP 2 x 2, ZeRO-1, EP2": (
        4,
        f"--use-distributed-optimizer {_COPIES} --expert-model-parallel-size 2 {EXPERTS} {UNTIED} {BF16}",
    ),
    "HSDP 2 x 2, ZeRO-3, optimizer state divided over all, EP2": (
        4,
        f"{_MEGATRON} optim_grads_params {_COPIES} --outer-dp-sharding-strategy optim --expert-model-parallel-size 2 "
        f"{EXPERTS} {UNTIED} {BF16}",
    ),
    "HSDP 2 x 2, ZeRO-3, optimizer state divided over all": (
        4,
        f"{_MEGATRON} optim_grads_params {_COPIES} --outer-dp-sharding-strategy optim {UNTIED} {BF16}",
    ),
    "FSDP2 in host memory": (2, f"--use-torch-fsdp2 --torch-fsdp2-cpu-offload {UNTIED} {BF16}"),
    "HSDP 2 x 2, FSDP2 in host memory": (4, f"--use-torch-fsdp2 --torch-fsdp2-cpu-offload {_COPIES}"),
    "ZeRO-3, CP2": (4, f"{_MEGATRON} optim_grads_params --context-parallel-size 2 --attention-dropout 0 {UNTIED}"),
    "ZeRO-3, TP2 SP": (
        4,
        f"{_MEGATRON} optim_grads_params --tensor-model-parallel-size 2 --sequence-parallel {UNTIED} {BF16}",
    ),
    "FSDP2, CP2": (4, f"--use-torch-fsdp2 --context-parallel-size 2 --attention-dropout 0 {UNTIED} {BF16}"),
}


@dataclass(frozen=True)
class Trace:
    """What one rank computed."""

    losses: list[str]
    grad_norms: list[str]
    hashes: list[str]
    """Of this rank's weights and optimizer state: where it was saved or loaded, and at the end."""
    weights_norm: float
    """Of all weights, where it was saved or loaded."""


def _save_go_on_and_resume(flags: list[str], folder: str) -> tuple[Trace, Trace]:
    """One rank: the run that goes on after its save, and the one that is resumed from it."""
    run = build(flags)
    trainer = Trainer(run, [])
    _check_the_count_of_zeros(run, trainer)
    trainer.step()
    save_checkpoint(run, f"{folder}/now")
    pending = Save(run, f"{folder}/meanwhile", background=True)
    uninterrupted = _two_steps(run, trainer)
    pending.finish()
    run.loaders.close()
    end_layout()

    run = build(flags)
    assert load_checkpoint(run, f"{folder}/meanwhile") == 2
    return uninterrupted, _two_steps(run, Trainer(run, []))


def _check_the_count_of_zeros(run: Any, trainer: Any) -> None:
    """In the first step: what the optimizer counts in its shards is what is in the whole gradients, without padding."""
    prepare_grads, gradients = run.optimizer.prepare_grads, []

    def gather_then_prepare() -> bool:
        gradients.extend(gather.gradients(run))
        return prepare_grads()

    run.optimizer.prepare_grads = gather_then_prepare
    result = trainer.step()
    run.optimizer.prepare_grads = prepare_grads
    if (
        run.groups.tp.size() == run.groups.ep.size() == run.groups.pp.size() == 1
    ):  # else other ranks count what this one does not hold
        whole, problems = gather.assemble(run.config, gradients)
        zeros = sum(int((values == 0).sum()) for values in whole.values())
        assert not problems
        assert result.num_zeros == zeros
        # A tied embedding has a gradient in every row, from the loss.
        assert zeros > 0 or not run.config.model.untie_embeddings_and_output_weights


def _two_steps(run: Any, trainer: Any) -> Trace:
    hashes, norm = [state_hash(run)], parameters_norm(run)
    results = [trainer.step(), trainer.step()]
    assert all(result.updated for result in results)
    return Trace(
        losses=[result.loss.hex() for result in results],
        grad_norms=[float(result.grad_norm).hex() for result in results],
        hashes=[*hashes, state_hash(run)],
        weights_norm=norm,
    )


def _to_one_process(flags: list[str], folder: str) -> float:
    """Load what the ranks saved, and save it; returns the norm of the weights."""
    run = build(flags)
    assert load_checkpoint(run, f"{folder}/meanwhile") == 2
    save_checkpoint(run, f"{folder}/whole")
    return parameters_norm(run)


@pytest.mark.first("ZeRO-3")
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_is_sharded_resumes_reshards_and_exports(name: str, tmp_path: Path) -> None:
    ranks, words = {**FAST, **SLOW}[name]
    flags = [*FLAGS, *words.split()]
    traces = run_ranks(ranks, _save_go_on_and_resume, flags, str(tmp_path))
    for uninterrupted, resumed in traces:
        assert resumed == uninterrupted
        assert resumed.losses[0] != resumed.losses[1]
    model = f"{UNTIED} {EXPERTS} {BF16} {FP16} {LION}".split()
    one_process = [*FLAGS, *(word for word in words.split() if word in model)]
    [norm] = run_ranks(1, _to_one_process, one_process, str(tmp_path))
    assert traces[0][0].weights_norm == pytest.approx(norm, rel=1e-6)

    saved, *others = (Tensors(tmp_path / folder / "iter_0000002") for folder in ("meanwhile", "now", "whole"))
    moments = {key.split(".")[2] for key in saved.names() if key.startswith("optimizer.state.exp_avg")}
    assert moments == ({"exp_avg"} if LION in words else {"exp_avg", "exp_avg_sq"})
    for other in others:
        assert list(differences(saved, other)) == []
    for folder in ("meanwhile", "whole"):
        exported = str(tmp_path / f"{folder}-hf")
        assert convert(["to-hf", "--load", str(tmp_path / folder), "--save", exported, "--no-verify"]) == 0
    one, other = (tmp_path / f"{folder}-hf" / "model.safetensors" for folder in ("meanwhile", "whole"))
    assert filecmp.cmp(one, other, shallow=False)
