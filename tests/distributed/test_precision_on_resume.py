"""A run that goes on in another precision than its checkpoint was saved in goes on with the fp32 weights: to the bit,
under every sharding scheme, with and without the optimizer's state."""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.plugins.huggingface.exporter import export_huggingface
from megatron_ext.plugins.huggingface.load_hf import load_huggingface
from megatron_ext.plugins.huggingface.saved_model import SavedModel
from tests.support.checkpoints import build, train
from tests.support.resaving import FLAGS, Saved, saved_by, tensors_of
from tests.support.selection import marked
from tests.support.several_models import end_layout

# Of the second tier: tests/distributed/test_checkpoints_of_others.py reads fp32 weights of another precision, and
# tests/unit/checkpoint.
pytestmark = pytest.mark.full

_MASTERS = "optimizer.state.param."
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAVED_BY = {
    "fp32": (2, "--use-distributed-optimizer --ddp-bucket-size 3000"),
    "bf16": (2, "--use-torch-fsdp2"),
    "fp16": (1, ""),
}
_MEGATRON = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_BUCKETS = "--use-distributed-optimizer --ddp-bucket-size 3000"
SCHEMES = {
    "DDP": (2, ""),
    "ZeRO-1": (2, _BUCKETS),
    "ZeRO-1, TP2": (4, f"{_BUCKETS} --tensor-model-parallel-size 2"),
    "FSDP2": (3, "--use-torch-fsdp2 --global-batch-size 6 --micro-batch-size 1"),
    "Megatron-FSDP no_shard": (2, f"{_MEGATRON} no_shard"),
    "Megatron-FSDP optim": (2, f"{_MEGATRON} optim"),
    "Megatron-FSDP optim_grads": (2, f"{_MEGATRON} optim_grads"),
    "Megatron-FSDP optim_grads_params": (2, f"{_MEGATRON} optim_grads_params"),
    "state in host memory": (1, "--optimizer-cpu-offload"),
    "state half in host memory, ZeRO-1": (2, f"{_BUCKETS} --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    "weights in host memory, FSDP2": (2, "--use-torch-fsdp2 --torch-fsdp2-cpu-offload"),
}
# Others do the same with more or fewer parts: left to --all.
SLOW = {
    "DDP",
    "ZeRO-1, TP2",
    "Megatron-FSDP no_shard",
    "Megatron-FSDP optim",
    "Megatron-FSDP optim_grads",
    "state in host memory",
    "weights in host memory, FSDP2",
}
_FULL, _WEIGHTS = "", "--no-load-optim"


def _flags(precision: str, words: str) -> list[str]:
    return [*FLAGS, *words.split(), *([] if precision == "fp32" else [f"--{precision}"])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {
        precision: saved_by(layout, _flags(precision, ""), None, tmp_path_factory.mktemp(precision), steps=0)
        for precision, layout in SAVED_BY.items()
    }


def resave(flags: list[str], load: str, save: str) -> float:
    """Load and save; return the loss of the step after."""
    run = build(flags)
    assert load_checkpoint(run, load) == 2
    save_checkpoint(run, save)
    [loss] = train(run, 1)
    end_layout()
    return loss


def resave_each(jobs: list[tuple[list[str], str, str]]) -> list[float]:
    return [resave(*job) for job in jobs]


def _fp32(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By weight: what the optimizer updates."""
    weights = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")}
    return {key: tensors.get(f"{_MASTERS}{key}", tensor) for key, tensor in weights.items()}


def _assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert tensor.dtype == wanted[key].dtype, key
        assert torch.equal(tensor.view(torch.uint8), wanted[key].view(torch.uint8)), key


@pytest.fixture(scope="module")
def losses_of_one_process(saved: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, float]:
    pairs = [(was, now) for was in DTYPES for now in DTYPES if was != now]
    folder = tmp_path_factory.mktemp("one")
    jobs = [(_flags(now, ""), saved[was].folder, str(folder / f"{was}-{now}")) for was, now in pairs]
    [losses] = run_ranks(1, resave_each, jobs)
    return dict(zip(pairs, losses, strict=True))


@pytest.mark.parametrize("scheme", marked(SCHEMES, slow=SLOW))
def test_training_goes_on_with_the_fp32_weights(
    scheme: str, saved: dict[str, Saved], losses_of_one_process: dict[Any, float], tmp_path: Path
) -> None:
    ranks, words = SCHEMES[scheme]
    targets = [precision for precision in DTYPES if precision != "fp16" or "fsdp2" not in words]  # which is refused
    cases = [(was, now, how) for now in targets for was in DTYPES if was != now for how in (_FULL, _WEIGHTS)]
    jobs = [
        (_flags(now, f"{words} {how}"), saved[was].folder, str(tmp_path / f"{was}{now}{how}"))
        for was, now, how in cases
    ]
    losses, *_ = run_ranks(ranks, resave_each, jobs)
    for (was, now, how), (_, _, folder), loss in zip(cases, jobs, losses, strict=True):
        before, after = saved[was].tensors, tensors_of(folder)
        _assert_equal(_fp32(after), _fp32(before))
        assert any(key.startswith(_MASTERS) for key in after) == (now != "fp32")
        for key, master in _fp32(after).items():
            assert torch.equal(after[key], master.to(DTYPES[now])), key
        moments = [key for key in before if key.startswith("optimizer.") and not key.startswith(_MASTERS)]
        if how is _FULL:
            _assert_equal({key: after[key] for key in moments}, {key: before[key] for key in moments})
        # Three ranks have other batches, and tensor-parallel ranks round sums in 16 bits otherwise.
        if how is _FULL and ranks == 2:
            assert loss == pytest.approx(losses_of_one_process[was, now], rel=1e-6)


def _load_and_listen(flags: list[str], folder: str) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        load_checkpoint(build(flags), folder)
    return said.getvalue()


def test_16_bit_weights_without_masters_are_said(tmp_path: Path) -> None:
    saved_by((1, ""), _flags("bf16", "--no-save-optim"), None, tmp_path, steps=0)
    told = f"{tmp_path}/iter_0000002 holds its weights in bfloat16 alone, without fp32 masters that can be read"
    for precision in DTYPES:
        [said] = run_ranks(1, _load_and_listen, _flags(precision, _WEIGHTS), str(tmp_path))
        assert (told in said) == (precision != "bf16")
    with pytest.raises(RankError, match="saved without optimizer state; add --no-load-optim"):
        run_ranks(1, _load_and_listen, _flags("fp32", _FULL), str(tmp_path))


def _begin(flags: list[str], source: str, save: str) -> None:
    run = build([*flags, "--load-hf", source])
    load_huggingface(run, source)
    save_checkpoint(run, save)
    end_layout()


def begin_each(jobs: list[tuple[list[str], str, str]]) -> None:
    for job in jobs:
        _begin(*job)


LLAMA = "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """An fp32 Hugging Face folder, with the checkpoint that it was made from."""
    saved = saved_by((1, LLAMA), FLAGS, None, tmp_path_factory.mktemp("llama"), steps=0)
    exported = tmp_path_factory.mktemp("hf")
    export_huggingface(SavedModel(saved.folder), exported, with_tokenizer=False)
    return Saved(str(exported), saved.tensors, [])


@pytest.mark.parametrize("scheme", marked(SCHEMES, slow=SLOW))
def test_masters_of_a_folder_are_its_fp32_values(scheme: str, folder: Saved, tmp_path: Path) -> None:
    ranks, words = SCHEMES[scheme]
    targets = [precision for precision in DTYPES if precision != "fp16" or "fsdp2" not in words]  # which is refused
    jobs = [(_flags(now, f"{LLAMA} {words}"), folder.folder, str(tmp_path / now)) for now in targets]
    run_ranks(ranks, begin_each, jobs)
    for now in targets:
        begun = tensors_of(str(tmp_path / now), iteration=0)
        _assert_equal(_fp32(begun), _fp32(folder.tensors))
        for key, master in _fp32(begun).items():
            assert torch.equal(begun[key], master.to(DTYPES[now])), key
