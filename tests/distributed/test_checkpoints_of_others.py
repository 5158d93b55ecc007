"""Checkpoints that Megatron-LM 0.19 and DeepSpeed 0.19.8 themselves wrote (tests/data/README.md) go on here."""

import json
import os
import pickle
import shlex
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.data.corpus import Splits
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from megatron_ext.plugins.migrate.deepspeed_checkpoint.importer import import_deepspeed
from megatron_ext.plugins.migrate.megatron_lm_checkpoint.saved_flags import read_args, saved_model
from megatron_ext.train.configure import configure
from megatron_ext.train.trainer import Trainer
from tests.support.checkpoints import build, train
from tests.support.corpora import write_corpus

DATA = Path(__file__).parents[1] / "data"
REST = shlex.split("""
    --seq-length 16 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 --train-iters 6
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --split 90,10,0
    --tokenizer-type NullTokenizer --vocab-size 64 --make-vocab-size-divisible-by 16 --eval-interval 0 --num-workers 0
    --device cpu
""")
MODEL = shlex.split("""
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --max-position-embeddings 16 --position-embedding-type rope --rotary-base 5000
""")
FLAGS = [*MODEL, *REST]
UNTIED = ["--untie-embeddings-and-output-weights"]
BF16 = shlex.split("--bf16 --normalization RMSNorm --qk-layernorm --disable-bias-linear --use-distributed-optimizer")
# Of the iterations after the checkpoint, as Megatron-LM logged them: the learning rate (which it logs one iteration
# before the one that is made with it), the loss, and the gradient norm.
LOGGED = [(8.681981e-3, 4.008337, 1.299), (5.5e-3, 3.906965, 1.838), (2.318020e-3, 3.863076, 1.420)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    with tarfile.open(DATA / "megatron_lm_0.19.2.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    write_corpus(folder / "corpus", 20_000)
    return folder


def _flags(written: Path, name: str, *more: str) -> list[str]:
    return [*FLAGS, *more, "--load", str(written / name), "--data-path", str(written / "corpus")]


def _go_on(flags: list[str], steps: int, save: str | None) -> list[tuple[float, float, float]]:
    """Load; save again; learning rate, loss and gradient norm of the next steps."""
    run = build(flags)
    load_checkpoint(run, run.config.checkpoint.load)
    if save is not None:
        save_checkpoint(run, save)
    trainer = Trainer(run, [])
    seen = []
    for _ in range(steps):
        result = trainer.step()
        assert result.grad_norm is not None
        seen.append((run.optimizer.param_groups[0]["lr"], result.loss, result.grad_norm))
    return seen


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"])
def test_training_goes_on_as_megatron_lm_did(layout: str, written: Path) -> None:
    flags = _flags(written, "fp32", *UNTIED, *layout.split())
    for rates in run_ranks(4 if layout else 1, _go_on, flags, 3, None):
        for (rate, loss, norm), (their_rate, their_loss, their_norm) in zip(rates, LOGGED, strict=True):
            assert rate == pytest.approx(their_rate, rel=1e-6)
            assert loss == pytest.approx(their_loss, abs=1.5e-6)  # the log has six digits after the point
            assert norm == pytest.approx(their_norm, abs=6e-4)


def _theirs(name: str) -> str:
    return name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
        ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
    )


@pytest.mark.parametrize(("name", "more"), [("fp32", UNTIED), ("bf16-tp2-dp2-reshardable", BF16)])
def test_weights_and_moments_are_theirs(name: str, more: list[str], written: Path, tmp_path: Path) -> None:
    run_ranks(2, _go_on, _flags(written, name, *more), 0, str(tmp_path))
    ours, theirs = Tensors(tmp_path / "iter_0000003"), Tensors(written / name / "iter_0000003")
    assert {_theirs(key) for key in ours.names()} == set(theirs.names())
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in ours.names()) > 5
    for key in ours.names():
        found, expected = ours.read(key), theirs.read(_theirs(key))
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), key
    common = ours.common()
    assert (common["optimizer_step"], common["train_state"]["consumed_samples"]) == (3, 12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fp32", [*UNTIED, "--bf16", "--use-distributed-optimizer"]),
        ("bf16-tp2-dp2-reshardable", [word for word in BF16 if word != "--bf16"]),
    ],
)
def test_another_precision_goes_on_with_their_fp32_weights(
    name: str, more: list[str], written: Path, tmp_path: Path
) -> None:
    run_ranks(2, _go_on, _flags(written, name, *more), 0, str(tmp_path))
    ours, theirs = Tensors(tmp_path / "iter_0000003"), Tensors(written / name / "iter_0000003")
    masters = "optimizer.state.param."
    weights = [key for key in ours.names() if not key.startswith("optimizer.")]
    assert len(weights) > 5
    for key in weights:
        found, expected = (f"{masters}{key}", key) if "--bf16" in more else (key, f"{masters}{key}")
        assert torch.equal(ours.read(found), theirs.read(_theirs(expected))), key
        assert torch.equal(ours.read(key), ours.read(found).to(ours.dtype(key))), key


@pytest.mark.full
@pytest.mark.parametrize(("more", "steps"), [([], 1), (["--no-load-optim"], 0), (["--finetune"], 0)])
def test_flat_optimizer_state_needs_a_word(more: list[str], steps: int, written: Path, tmp_path: Path) -> None:
    flags = _flags(written, "fp32-dp2", *more)
    if steps:
        with pytest.raises(
            RankError, match=r"DataError: .*--dist-ckpt-optim-fully-reshardable, or add --no-load-optim"
        ):
            run_ranks(1, _go_on, flags, 0, None)
        return
    run_ranks(1, _go_on, flags, 0, str(tmp_path))
    [saved] = tmp_path.glob("iter_*")
    ours, theirs = Tensors(saved), Tensors(written / "fp32-dp2" / "iter_0000003")
    for key in ours.names():
        if not key.startswith("optimizer."):
            assert torch.equal(ours.read(key), theirs.read(_theirs(key))), key
    assert saved.name == ("iter_0000000" if "--finetune" in more else "iter_0000003")


def test_every_other_flag_is_listed(written: Path) -> None:
    other = shlex.split("--rotary-base 10000 --vocab-size 100 --norm-epsilon 1e-6")
    with pytest.raises(RankError) as caught:
        run_ranks(1, _go_on, _flags(written, "fp32", *other), 0, None)
    for words in (
        "--rotary-base 5000 (given: 10000",
        "--norm-epsilon 1e-05 (given: 1e-06)",
        "--untie-embeddings-and-output-weights True (given: False)",
        "a vocabulary that is padded to 64 entries (given: --vocab-size 100",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(("name", "more"), [("fp32", UNTIED), ("bf16-tp2-dp2-reshardable", BF16)])
def test_the_model_comes_from_the_checkpoint(name: str, more: list[str], written: Path) -> None:
    files = ["--load", str(written / name), "--data-path", str(written / "corpus")]
    rest = [
        *REST,
        "--use-checkpoint-args",
        *files,
        *(["--bf16", "--use-distributed-optimizer"] if more is BF16 else []),
    ]
    adopted, given = configure(rest).config, configure(_flags(written, name, *more)).config
    assert adopted.model == given.model
    with pytest.raises(ConfigurationError, match=r"--num-layers 3, but the checkpoint .* saved with 2"):
        configure([*rest, "--num-layers", "3"])


class _Canary:
    def __init__(self, folder: str):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_reading_the_flags_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    planted = _Canary(str(canary))
    args = Namespace(num_layers=2, layernorm_epsilon=1e-6, swiglu=planted, hidden_size=[planted], none=int)
    with zipfile.ZipFile(tmp_path / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"args": args, "other": planted}, protocol=2))
    found = read_args(tmp_path)
    assert found is not None
    assert saved_model(found) == {"num_layers": 2, "norm_epsilon": 1e-6}
    assert not canary.exists()
    (tmp_path / "common.pt").write_bytes(b"PK")
    assert read_args(tmp_path) is None


def test_a_release_is_weights_alone(written: Path, tmp_path: Path) -> None:
    (tmp_path / "release").symlink_to(written / "fp32" / "iter_0000003")
    (tmp_path / TRACKER).write_text("release")
    [steps] = run_ranks(1, _go_on, [*_flags(written, "fp32", *UNTIED), "--load", str(tmp_path)], 1, None)
    [(rate, loss, _)] = steps
    assert rate == 0, "the warmup begins anew"
    first: Any = run_ranks(1, _go_on, _flags(written, "fp32", *UNTIED, "--finetune"), 1, None)[0]
    assert loss == first[0][1]


MODELS = {
    "deepspeed_0.19.8": "--hidden-size 16 --vocab-size 64",
    "deepspeed_0.19.8_bloom": "--hidden-size 8 --vocab-size 32 --position-embedding-type alibi --embed-layernorm",
}
OF_DEEPSPEED = shlex.split(
    "--num-layers 2 --num-attention-heads 4 --seq-length 12 --openai-gelu "
    "--make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2 "
    "--lr-decay-style constant --weight-decay 0.1 --attention-dropout 0 --hidden-dropout 0 --eval-interval 0 "
    "--num-workers 0 --mock-data --device cpu --bf16"
)


# How far a bf16 run here may be from the record of one on another processor, relative. The BLOOM's logits reach 8.75,
# which bf16 rounds by up to 3.1e-2: the mean over 48 tokens moves by some 4e-3. From the imported weights fp32 gives
# the losses 6.17955 and 5.48231. DeepSpeed's record is 2.7e-3 and 8.1e-3 off these; runs here are up to 2.7e-3 and
# 6.9e-3 off (AVX2 and AVX-512; microbatches of 1, 2 and 4; TP2). The record's 8.1e-3 and 4e-3 of ours are 2.2e-3 of the
# second loss. Without the moments that is 5.62, 2.6e-2 off.
APART = {"deepspeed_0.19.8": 1e-3, "deepspeed_0.19.8_bloom": 2.2e-3}


class _Samples:
    def __init__(self, rows: list[list[int]]):
        self.rows = np.array(rows)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[(index - 12) % len(self.rows)]
        places = {"position_ids": np.arange(12), "loss_mask": np.ones(12, np.float32)}
        return {"tokens": row[:-1], "labels": row[1:], **places}


def _go_on_from_deepspeed(flags: list[str], rows: list[list[int]]) -> list[float]:
    run = build(flags, datasets=lambda *_: Splits(_Samples(rows), None, None))
    assert load_checkpoint(run, run.config.checkpoint.load) == 3
    return train(run, 2)


_TP, _PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@pytest.mark.first("deepspeed_0.19.8-")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("deepspeed_0.19.8", layout) for layout in ("", _TP, "--use-distributed-optimizer")),
        *(("deepspeed_0.19.8_bloom", layout) for layout in ("", _TP, _PP, "--use-torch-fsdp2")),
    ],
)
def test_training_goes_on_as_deepspeed_went_on(name: str, layout: str, tmp_path: Path) -> None:
    """From a universal checkpoint, and from ZeRO's shards of a BLOOM's TP2 x PP2 next to its layer files."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path / "written", filter="data")
    import_deepspeed(tmp_path / "written", tmp_path / "ours")
    expected = json.loads((tmp_path / "written/expected.json").read_text())
    flags = [*OF_DEEPSPEED, *MODELS[name].split(), *layout.split(), "--load", str(tmp_path / "ours")]
    losses = run_ranks(2 if layout else 1, _go_on_from_deepspeed, flags, expected["samples"])
    assert losses[0] == pytest.approx(expected["losses"], rel=APART[name])
