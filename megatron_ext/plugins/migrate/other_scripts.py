"""Translates into our flags the scripts of three programs that take Megatron-LM's flags and some of their own.

`read_mindspeed` is for MindSpeed-LLM, which runs on Ascend's processors; meanings follow its source (features_manager/,
core/transformer/moe/router.py, training/initialize.py). `read_mamba` is for Megatron-LM's pretrain_mamba.py, and
`read_weighted_splits` for BigScience's data.
"""

import re
import shlex
from collections.abc import Iterable, Sequence

from megatron_ext.plugins.migrate.script import Script
from megatron_ext.untrusted.text import read_file

_SPECS = ("qwen3_spec", "deepseek_spec")
"""Modules whose layers are those that --qk-layernorm, --multi-latent-attention and --num-experts describe."""
_MOST_LAYERS = 10_000  # as many as --num-layers may be


def read_mindspeed(script: Script) -> None:
    """Take the flags that have an equivalent here; those without one stay, to be refused by their names."""
    if script.take("--ai-framework") is not None:
        script.warnings.append("--ai-framework changes nothing here: the program runs on torch")
    module = (script.values("--spec") or [""])[0]
    if module.startswith("mindspeed_llm.") and module.rpartition(".")[2] in _SPECS:
        script.take("--spec")
        script.warnings.append(
            f"--spec {module} changes nothing here: its layers are those of --qk-layernorm, --multi-latent-attention "
            "and --num-experts"
        )
    if "--enable-hf2mg-convert" in script:
        script.take("--model-type-hf")  # config.json says it
        script.take("--exit-on-missing-checkpoint")  # of --load, in whose place this is
        script.translate("--enable-hf2mg-convert", "--load-hf", *(script.take("--load") or ()))
    counts = (script.values("--num-layer-list") or [""])[0].split(",")
    if all(map(str.isdecimal, counts)):
        script.translate("--num-layer-list", *_layout(script, map(int, counts)))
    _positions(script)
    _experts(script)
    _leave_out_layers(script)


def _layout(script: Script, layers: Iterable[int]) -> tuple[str, str]:
    """Return the flag of stages, or chunks of them, that have so many layers each."""
    depths = "m" * (script.number("--mtp-num-layers") or 0)
    return (
        "--pipeline-model-parallel-layout",
        f"E{'|'.join(f't*{count}' if count else '' for count in layers)}{depths}L",
    )


def _positions(script: Script) -> None:
    """Take YaRN of latent attention, and Llama 3's stretched frequencies."""
    kind = (script.values("--rope-scaling-type") or [""])[0]
    if kind == "yarn" and "--multi-latent-attention" in script:
        names = {
            "--rope-scaling-factor": "--rotary-scaling-factor",
            "--rope-scaling-original-max-position-embeddings": "--original-max-position-embeddings",
            "--rope-scaling-mscale": "--mscale",
            "--rope-scaling-mscale-all-dim": "--mscale-all-dim",
        }
        script.take("--rope-scaling-type")
        script.give(("--rope-type", kind))
        script.give(*((new, *values) for old, new in names.items() if (values := script.take(old))))
    elif kind == "llama3":
        script.take("--rope-scaling-type")
        names = {
            "--low-freq-factor": "--rope-scaling-low-freq-factor",
            "--high-freq-factor": "--rope-scaling-high-freq-factor",
            "--original-max-position-embeddings": "--rope-scaling-original-max-position-embeddings",
        }
        script.give(("--use-rope-scaling",))
        script.give(*((new, *values) for old, new in names.items() if (values := script.take(old))))


def _experts(script: Script) -> None:
    """Take what its router and its layers of experts have under other names."""
    width = script.number("--moe-ffn-hidden-size") or script.number("--ffn-hidden-size")
    shared = script.number("--n-shared-experts")
    if shared and width:
        script.translate("--n-shared-experts", "--moe-shared-expert-intermediate-size", str(shared * width))
    dense, layers = script.number("--first-k-dense-replace"), script.number("--num-layers") or 0
    every = 1 if "--moe-layer-freq" not in script else script.number("--moe-layer-freq")
    if dense is not None and every and 0 < layers <= _MOST_LAYERS:
        script.take("--first-k-dense-replace")
        if dense:  # the source tests it so: with 0 every layer has experts
            pattern = ",".join(str(int(layer >= dense and layer % every == 0)) for layer in range(layers))
            script.give(("--moe-layer-freq", f"[{pattern}]"))
    if script.take("--fix-router") is not None:  # token t goes to the experts t K, ..., t K + K - 1 modulo their number
        script.give(("--moe-router-force-load-balancing",))
    divided = script.take("--norm-topk-prob") is not None
    kind = (script.values("--moe-router-load-balancing-type") or ["aux_loss"])[0]
    if kind == "softmax_topk":  # weights out of the softmax over all experts, and no loss of balance
        script.give(("--moe-router-load-balancing-type", "none"), *([] if divided else [("--moe-router-pre-softmax",)]))
    elif divided and kind == "aux_loss":
        script.take("--moe-router-pre-softmax")
    if divided:
        script.warnings.append(
            "--norm-topk-prob changes nothing here: without --moe-router-pre-softmax a token's weights add up to 1"
        )
    if kind == "none" and script.take("--seq-aux") is not None:
        script.give(("--moe-router-load-balancing-type", "seq_aux_loss"))
    tensor = script.number("--tensor-model-parallel-size") or 1
    if script.take("--moe-tp-extend-ep") is not None:  # experts are whole, and divided over these ranks, too
        flag = "--expert-model-parallel-size"
        experts = script.take_number(flag) if flag in script else 1
        if experts is None:
            return
        script.give(("--expert-tensor-parallel-size", "1"), (flag, str(tensor * experts)))
        script.spellings |= {
            f"use {flag}": f"leave out --moe-tp-extend-ep, and use --expert-tensor-parallel-size 1 {flag}",
            f"{flag} {tensor * experts}": (
                f"{flag} {experts} x --tensor-model-parallel-size {tensor} (--moe-tp-extend-ep)"
            ),
        }


def _leave_out_layers(script: Script) -> None:
    """Translate --noop-layers, the numbers from 0 of layers that do nothing: each pipeline stage keeps the other layers
    that MindSpeed-LLM places on it."""
    named = (script.values("--noop-layers") or [""])[0].split(",")
    layers, stages = script.number("--num-layers") or 0, script.number("--pipeline-model-parallel-size") or 1
    in_chunk = script.number("--num-layers-per-virtual-pipeline-stage") or layers // stages
    left_out = {int(one) for one in named if one.isdecimal()}
    if len(left_out) < len(named) or not max(left_out) < layers <= _MOST_LAYERS or not in_chunk or layers % in_chunk:
        return
    kept = [layer not in left_out for layer in range(layers)]
    counts = [sum(kept[start : start + in_chunk]) for start in range(0, layers, in_chunk)]
    for flag in ("--noop-layers", "--num-layers-per-virtual-pipeline-stage"):
        script.take(flag)
    script.give(("--num-layers", str(sum(kept))))
    if stages > 1:
        script.give(_layout(script, counts))
    pattern = (script.values("--moe-layer-freq") or [""])[0]
    has_experts = pattern.strip("[]").split(",")
    if pattern.startswith("[") and len(has_experts) == layers:
        own = ",".join(one for one, stays in zip(has_experts, kept, strict=True) if stays)
        script.give(("--moe-layer-freq", f"[{own}]"))


_MAMBA_SPECS = tuple(f"megatron.core.models.{one}.{one}_layer_specs" for one in ("mamba", "hybrid"))
"""Modules of megatron-core whose layers are the ones that the letters name."""


def read_mamba(script: Script) -> None:
    """Remove the layer spec and the ratios of kinds of layers where a pattern is given, whose letters decide in
    Megatron-LM, too.

    Without a pattern they stay, to be refused by their names.
    """
    if not any(flag in script for flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern")):
        return
    spec = (script.values("--spec") or [""])[0]
    for flag in ("--spec", "--hybrid-attention-ratio", "--hybrid-mlp-ratio"):
        if flag in script and (flag != "--spec" or spec in _MAMBA_SPECS):
            script.take(flag)
            script.warnings.append(f"{flag} changes nothing here: --hybrid-layer-pattern says what each layer is")


_GROUP = re.compile(r"\s*[^\s:,]+\s*:\s+(.+)", re.DOTALL)


def read_weighted_splits(script: Script) -> None:
    """Give --train-data-path and its like for the data that a script names in BigScience's way."""
    for part in ("train", "valid", "test"):
        flag = f"--{part}-weighted-split-paths"
        path, groups = script.take(f"{flag}-path"), script.take(flag)
        try:
            if path is not None:
                flag = f"{flag}-path"
                groups = shlex.split(read_file(" ".join(path), 2**24).decode())
            if groups is not None:
                script.give([f"--{part}-data-path", *_prefixes(groups)])
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and "--dry-run" in script:
                named = " ".join(path or ())
                script.give(("--per-split-data-args-path", named))  # which a dry run does not open either
                script.warnings.append(f"{flag} {named} does not exist; a run needs it, --dry-run does not")
                continue
            script.problems.append(f"{' '.join([flag, *(path or ())])}: {getattr(error, 'strerror', None) or error}")
            script.unread |= {"data_path", "train_data_path"}


def _prefixes(groups: Sequence[str]) -> list[str]:
    """Return weights and prefixes in turn. Raises ValueError where the words have another form, or a meaning that we do
    not support."""
    found = _GROUP.fullmatch(groups[0]) if len(groups) == 1 else None
    items = [item.split() for item in found[1].split(",")] if found else []
    if not items or any(len(item) != 3 for item in items):
        raise ValueError(f'{len(groups)} words, but expected one, "NAME: WEIGHT BEGIN:END PREFIX, ..."; give one group')
    for _, share, prefix in items:
        if not re.fullmatch(r"0*(\.0*)?:1(\.0*)?", share):
            raise ValueError(f"{prefix} has {share}, not the whole, 0:1; use --data-path with --split, alike for each")
    return [word for weight, _, prefix in items for word in (weight, prefix)]
