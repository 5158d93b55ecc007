"""A model that was trained on a text: exported, transformers gives it the validation loss that training saw."""

import pathlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from megatron_ext.plugins.huggingface.transformers_reference import their_loss
from megatron_ext.train.callbacks.evaluation import evaluate
from tests.support.checkpoints import build, train
from tests.support.corpora import write_documents
from tests.support.hf_models import quiet_transformers
from tests.support.plain_process import in_plain_process

# Of the second tier: tests/distributed/test_huggingface.py compares logits.
pytestmark = pytest.mark.full

quiet_transformers()

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 48 --num-attention-heads 6 --group-query-attention --num-query-groups 2 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --seq-length 64
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type ByteTokenizer --split 80,20,0 --micro-batch-size 4
    --global-batch-size 8 --train-iters 6 --lr 1e-2 --lr-decay-style constant --eval-interval 100 --eval-iters 3
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --device cpu
""")


def _train(flags: list[str], save: str) -> tuple[float, float, list[list[list[int]]]]:
    """Train and save; the losses before and after on the validation data, and what this stage read of it."""
    run = build(flags)
    held_out: Any = run.loaders.valid
    before = evaluate(run, held_out)
    train(run, 6)
    save_checkpoint(run, save)
    samples = []
    (part,) = held_out.parts
    for start in range(part.positions.start, part.positions.stop, 8):
        for batch in held_out.loader.global_batch(start, 2, end=part.positions.stop):
            assert batch.loss_mask is None or bool(batch.loss_mask.all())
            samples += (batch.tokens if batch.tokens is not None else batch.labels).tolist()
    after = evaluate(run, held_out)
    run.loaders.close()
    return before, after, samples


@dataclass(frozen=True)
class Trained:
    folder: Path
    """Holds the data, `corpus`, and the checkpoint, `save`."""
    loss: float
    """On the validation data."""
    samples: torch.Tensor
    """What that loss is of."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    text = pathlib.Path(shlex.__file__).read_bytes() + pathlib.Path(re.__file__).read_bytes()
    write_documents(folder / "corpus", [part + b"\n\n" for part in text.split(b"\n\n")])
    flags = [*FLAGS, "--data-path", str(folder / "corpus")]
    ranks = run_ranks(4, _train, flags, str(folder / "save"))
    (before, after, tokens), (_, _, labels) = ranks[0], ranks[-1]
    assert after < 0.8 * before, "it has learned something"

    samples = torch.cat([torch.tensor(tokens), torch.tensor(labels)[:, -1:]], dim=1)
    assert samples.shape == (24, 65)
    return Trained(folder, after, samples)


def test_the_loss_is_that_of_training(trained: Trained, tmp_path: Path) -> None:
    exported = str(tmp_path / "hf")
    arguments = ["to-hf", "--load", str(trained.folder / "save"), "--save", exported]
    assert convert([*arguments, "--no-verify", "--skip-tokenizer-check"]) == 0
    theirs = in_plain_process(their_loss, exported, trained.samples.tolist())
    assert theirs == pytest.approx(trained.loss, rel=1e-6)


@pytest.mark.slow  # the quickstart checks the loss in the same way
def test_the_tool_compares_the_losses(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["to-hf", "--load", str(trained.folder / "save"), "--save", str(tmp_path / "hf"), "--no-verify"]
    assert convert([*arguments, "--check-loss", str(trained.folder / "corpus"), "--check-samples", "20"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"loss over 1,280 tokens of \S+: ours (\S+), transformers (\S+) \(", said)
    assert found is not None, said
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-6)
