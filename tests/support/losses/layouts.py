"""Lists what tools/loss_compare.py runs: each layout's stages as command lines, with paths relative to a scratch
folder.

    jobs(["default"])["FSDP2"]      # {"name", "folder", "stages": [{"name", "ranks", "script", "words"}, ...]}

A layout trains 6 steps and saves after the third and the last (`train`), goes on from the third to the sixth
(`resume`), may go on from it in another layout (`reshard`), and may be written for transformers (`export`).
"""

import functools
import hashlib
import random
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STEPS, SAVED = 6, 3
SEQ_LENGTH = 32
_SAVES = f"--save-interval {SAVED}"

RECIPE = (
    "--hidden-size 64 --num-attention-heads 4 --init-method-std 0.1 --micro-batch-size 2 --global-batch-size 8 "
    f"--train-iters {STEPS} --lr 1e-3 --lr-decay-style constant --lr-warmup-iters 2 --hidden-dropout 0 "
    f"--attention-dropout 0 --seq-length {SEQ_LENGTH} --train-data-path data/train --valid-data-path data/valid "
    "--tokenizer-type ByteTokenizer --eod-mask-loss --full-validation --eval-interval 3 "
    f"{_SAVES} --log-interval 1 --log-params-norm --log-num-zeros-in-grad --device cpu --num-workers 0"
)
_LLAMA = (
    "--num-layers 4 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 2"
)
_UNTIED = "--untie-embeddings-and-output-weights"
_PACKED = "--reset-position-ids --reset-attention-mask"
MODELS = {
    "tied": _LLAMA,
    "llama": f"{_LLAMA} {_UNTIED}",
    "gpt2": "--num-layers 4 --openai-gelu",
    "qwen3": f"{_LLAMA} {_UNTIED} --qk-layernorm",
    "packed": f"{_LLAMA} {_UNTIED} {_PACKED}",
    "mixtral": f"{_LLAMA} {_UNTIED} --num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.1",
    "experts": (
        f"{_LLAMA} {_UNTIED} --num-experts 4 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 40 "
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
    ),
}

_TP2 = "--tensor-model-parallel-size 2"
_TP2_SP = f"{_TP2} --sequence-parallel"
_PP2 = "--pipeline-model-parallel-size 2"
_PP2_VPP2 = f"{_PP2} --num-virtual-stages-per-pipeline-rank 2"
_DISTRIBUTED = "--use-distributed-optimizer"
_OVERLAP = f"{_DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
_FSDP2 = "--use-torch-fsdp2"
_MEGATRON_FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_CP2 = "--context-parallel-size 2 --cp-comm-type"
_EP2 = "--expert-model-parallel-size 2"
_ALLTOALL = "--moe-token-dispatcher-type alltoall"
_FP16 = "--fp16 --initial-loss-scale 16777216 --loss-scale-window 2"


@dataclass(frozen=True)
class Layout:
    """One line of the comparison."""

    model: str
    """Key of MODELS."""

    ranks: int = 1
    flags: str = ""
    reshard: tuple[int, str] | None = None
    """Ranks and flags of the layout that goes on from the third step."""

    export: bool = False
    quick: bool = False
    """Whether it is part of --quick."""


_ALONE = (1, "")
DEFAULT = {
    "one process": Layout("llama", reshard=(2, _TP2_SP), export=True, quick=True),
    "one process, tied": Layout("tied", reshard=(2, _FSDP2)),
    "one process, gpt2": Layout("gpt2", reshard=(2, _PP2), export=True),
    "one process, qwen3": Layout("qwen3", export=True),
    "one process, packed": Layout("packed"),
    "one process, experts": Layout("experts", reshard=(2, _EP2)),
    "one process, mixtral": Layout("mixtral", export=True),
    "one process, dropout": Layout("gpt2", flags="--hidden-dropout 0.1 --attention-dropout 0.1"),
    "one process, bf16": Layout("llama", flags="--bf16", export=True, quick=True),
    "one process, fp16": Layout("llama", flags=_FP16),
    "one process, SGD": Layout("llama", flags="--optimizer sgd"),
    "one process, recompute full": Layout(
        "llama", flags="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "one process, recompute selective": Layout(
        "llama", flags="--recompute-granularity selective --recompute-modules core_attn mlp layernorm"
    ),
    "TP2 SP, tied": Layout("tied", 2, _TP2_SP, reshard=_ALONE, quick=True),
    "TP2 SP, gpt2, dropout": Layout("gpt2", 2, f"{_TP2_SP} --hidden-dropout 0.1 --attention-dropout 0.1"),
    "PP2 VPP2, tied": Layout("tied", 2, _PP2_VPP2, reshard=_ALONE),
    "DP2": Layout("llama", 2),
    "DP2 distributed optimizer, overlap": Layout("llama", 2, _OVERLAP, reshard=_ALONE, quick=True),
    "DP2 distributed optimizer, overlap, bf16": Layout("llama", 2, f"{_OVERLAP} --bf16"),
    "DP2 distributed optimizer, fp16": Layout("llama", 2, f"{_DISTRIBUTED} {_FP16}"),
    "DP2 distributed optimizer in host memory": Layout("llama", 2, f"{_DISTRIBUTED} --optimizer-cpu-offload"),
    "FSDP2": Layout("llama", 2, _FSDP2, reshard=_ALONE, quick=True),
    "FSDP2, bf16": Layout("llama", 2, f"{_FSDP2} --bf16"),
    "FSDP2 in host memory": Layout("tied", 2, f"{_FSDP2} --torch-fsdp2-cpu-offload"),
    "Megatron-FSDP, ZeRO-1": Layout("llama", 2, f"{_MEGATRON_FSDP} optim"),
    "Megatron-FSDP, ZeRO-2": Layout("tied", 2, f"{_MEGATRON_FSDP} optim_grads"),
    "Megatron-FSDP, ZeRO-3": Layout("llama", 2, f"{_MEGATRON_FSDP} optim_grads_params", reshard=_ALONE, quick=True),
    "Megatron-FSDP, ZeRO-3, bf16": Layout("llama", 2, f"{_MEGATRON_FSDP} optim_grads_params --bf16"),
    "HSDP 2 x 2, ZeRO-3": Layout(
        "llama", 4, f"{_MEGATRON_FSDP} optim_grads_params --num-distributed-optimizer-instances 2"
    ),
    "CP2 p2p": Layout("llama", 2, f"{_CP2} p2p", reshard=_ALONE, quick=True),
    "CP2 a2a": Layout("llama", 2, f"{_CP2} a2a"),
    "CP2 all_gather, packed": Layout("packed", 2, f"{_CP2} all_gather"),
    "EP2, experts": Layout("experts", 2, _EP2, reshard=_ALONE),
    "EP2, alltoall, experts": Layout("experts", 2, f"{_EP2} {_ALLTOALL}", quick=True),
    "TP2 SP EP2, experts": Layout("experts", 4, f"{_TP2_SP} {_EP2}"),
    "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap, tied": Layout(
        "tied", 8, f"{_TP2_SP} {_PP2_VPP2} {_OVERLAP}", reshard=_ALONE
    ),
}
"""Layouts that use every sharding scheme and technique at least once."""

GOLDEN = ("one process", "TP2 SP, tied", "PP2 VPP2, tied", "DP2 distributed optimizer, overlap", "FSDP2")
GOLDEN += ("EP2, alltoall, experts",)
"""Layouts whose losses are kept in tests/golden/losses."""


def job(name: str, layout: Layout, folder: str, steps_only: bool = False) -> dict[str, Any]:
    """Return the command lines of a layout.

    Args:
        name: what the comparison calls it.
        layout: what to run.
        folder: folder of its output, relative to the scratch folder.
        steps_only: train and evaluate; save nothing, and leave the other stages out.
    """
    return _job(name, folder, MODELS[layout.model].split(), layout, steps_only)


def _job(name: str, folder: str, model: list[str], layout: Layout, steps_only: bool = False) -> dict[str, Any]:
    def train(stage: str, ranks: int, flags: str, *, load: bool) -> dict[str, Any]:
        place = f"{folder}/{stage}"
        paths = ["--data-cache-path", f"{folder}/cache", "--metrics-file", f"{place}/metrics.jsonl"]
        paths += [] if steps_only else ["--save", place]
        paths += ["--load", f"{folder}/train", "--ckpt-step", str(SAVED)] if load else []
        recipe = RECIPE.replace(_SAVES, "") if steps_only else RECIPE
        words = [*recipe.split(), *model, *paths, *flags.split()]
        return {"name": stage, "ranks": ranks, "script": "pretrain_gpt.py", "words": words}

    stages = [train("train", layout.ranks, layout.flags, load=False)]
    if not steps_only:
        stages.append(train("resume", layout.ranks, layout.flags, load=True))
    if layout.reshard is not None and not steps_only:
        stages.append(train("reshard", *layout.reshard, load=True))
    if layout.export and not steps_only:
        words = ["to-hf", "--load", f"{folder}/train", "--save", f"{folder}/export", "--no-verify"]
        stages.append({"name": "export", "ranks": 1, "script": "tools/convert_checkpoint.py", "words": words})
    return {"name": name, "folder": folder, "stages": stages}


def chosen(which: str) -> dict[str, dict[str, Any]]:
    """Return the jobs of a set, by name: `quick`, `default`, or `all`, which adds the parity table in fp32 and bf16."""
    layouts = {name: layout for name, layout in DEFAULT.items() if layout.quick or which != "quick"}
    found = {name: job(name, layout, f"runs/{slug(name)}") for name, layout in layouts.items()}
    return {**found, **_parity_jobs()} if which == "all" else found


def golden_jobs() -> dict[str, dict[str, Any]]:
    """Return the jobs of the layouts in `GOLDEN`, by name."""
    return {name: job(name, DEFAULT[name], f"runs/{slug(name)}", steps_only=True) for name in GOLDEN}


def _parity_jobs() -> dict[str, dict[str, Any]]:
    """Return every row of docs/parity.md, to the sixth step and with a resumption, on the data of this comparison."""
    from megatron_ext.plugins.prove import cases

    found = {}
    for precision in ("fp32", "bf16"):
        for case in cases.CASES.values():
            name = f"{precision} {case.name}"
            flags = [*case.flags, *(["--bf16"] if precision == "bf16" else [])]
            layout = Layout("", case.world_size, " ".join(flags))
            found[name] = _job(name, f"runs/{slug(name)}", cases.MODELS[case.model].split(), layout)
    return found


def slug(name: str) -> str:
    """Return a name as a folder's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def write_corpus(folder: Path) -> None:
    """Write folder/train and folder/valid (.bin and .idx), the same bytes whatever the commit: none of its code runs.

    Documents have 1 to 64 tokens below 256 and an end of document, so that loss masks differ from sample to sample.
    The validation data is no multiple of the global batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_pair(folder / "train", samples=64, seed=1)
    _write_pair(folder / "valid", samples=13, seed=2)


@functools.cache
def corpus_hash() -> str:
    """Return the SHA-256 of what `write_corpus` writes."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        contents = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _write_pair(prefix: Path, samples: int, seed: int) -> None:
    numbers = random.Random(seed)
    left, lengths, tokens = samples * SEQ_LENGTH + 1, [], []
    while left:
        length = min(left, numbers.randint(2, 65) if numbers.random() < 2 / 3 else 2)
        start, step = numbers.randrange(256), numbers.choice([1, 1, 1, 3])
        tokens += [(start + step * place) % 256 for place in range(length - 1)] + [256]
        lengths.append(length)
        left -= length
    prefix.with_suffix(".bin").write_bytes(np.array(tokens, "<u2").tobytes())
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
    header += np.array([len(lengths), len(lengths) + 1], "<u8").tobytes()
    documents = np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    body = np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + documents
    prefix.with_suffix(".idx").write_bytes(header + body)
