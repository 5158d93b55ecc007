"""Tiny models, trained on a short text until they know parts of it by heart, and exported.

A model that has learned less goes on with blanks whatever the prompt is, and every test of its words passes.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert

_LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
_GROUPS = "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
FAMILIES = {
    "Llama": f"{_LLAMA} {_GROUPS}",
    "GPT-2": "--max-position-embeddings 512 --init-method-std 0.06 --lr 3e-3",
    "Qwen3": f"{_LLAMA} {_GROUPS} --qk-layernorm --kv-channels 16",
    "Mixtral": f"{_LLAMA} {_GROUPS} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48",
}
"""Flags of each, besides those of `_COMMON`."""
_COMMON = """
    --num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type ByteTokenizer --split 100,0,0 --micro-batch-size 8 --global-batch-size 8 --lr 5e-3
    --lr-decay-style constant --eval-interval 0 --device cpu --num-workers 0
"""
TEXT = " ".join(Path(shlex.__file__).read_text().split())[:1500]


def write_corpus(folder: Path) -> Path:
    """Write the texts as a corpus of bytes, and return its prefix."""
    from megatron_ext.data.indexed import IndexedWriter

    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        for start in range(0, len(TEXT), 300):
            tokens = np.array([*TEXT[start : start + 300].encode(), 256], dtype=np.uint16)
            writer.add_tokens(tokens.tobytes(), [len(tokens)])
    return folder / "corpus"


def train_families(folder: str, families: Sequence[str], steps: int) -> list[tuple[float, float]]:
    """Train and save each as folder/name; return first and last loss. On a rank of `run_ranks`."""
    from tests.support.several_models import in_turn

    return in_turn(_train, [(folder, family, steps) for family in families])


def _train(task: tuple[str, str, int]) -> tuple[float, float]:
    from megatron_ext import device
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    folder, family, steps = task
    flags = [*shlex.split(_COMMON), *shlex.split(FAMILIES[family]), "--data-path", f"{folder}/corpus"]
    flags += ["--train-iters", str(steps)]
    run = build_run(configure(flags).config, device.install("cpu"))
    trainer = Trainer(run, [])
    losses = [trainer.step().loss for _ in range(steps)]
    save_checkpoint(run, f"{folder}/{family}")
    run.loaders.close()
    return losses[0], losses[-1]


def export(folder: Path, family: str) -> str:
    """Export a trained one, and return the folder for transformers. Tokenizers are compared in other tests."""
    exported = str(folder / f"{family}-hf")
    assert (
        convert(["to-hf", "--load", str(folder / family), "--save", exported, "--no-verify", "--skip-tokenizer-check"])
        == 0
    )
    return exported
