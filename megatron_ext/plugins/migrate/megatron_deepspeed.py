"""Reads the command line of a script of Megatron-DeepSpeed, and of its like, as a command line of ours.

    typed = read(["--deepspeed", "--deepspeed_config", "ds_config.json", "--zero-stage", "1", ...])

Meanings follow Megatron-DeepSpeed's source. It gives DeepSpeed Megatron's own optimizer and schedule, but takes
clipping, loss scale and ZeRO's stage from DeepSpeed's file. Flags that only have another name are in
`old_spellings.py`.
"""

import base64
import contextlib
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.config.parse import arguments
from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.schema.data_flags import FOLDER_TOKENIZERS
from megatron_ext.environment import world_size
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.deepspeed import nearest_stages
from megatron_ext.plugins.migrate.other_scripts import read_mamba, read_mindspeed, read_weighted_splits
from megatron_ext.plugins.migrate.script import Script
from megatron_ext.untrusted.text import load_json


def read(argv: Sequence[str]) -> Typed:
    """Return the flags as `config.parse.arguments.read` returns them, with Megatron-DeepSpeed's flags translated into
    ours."""
    script = Script(argv)
    if any(flag in script for flag in _MARKS):
        _experts(script)
    stage, chosen = script.number("--zero-stage"), [flag for flag in _SCHEMES if flag in script]
    of_stage = _engine(script) == stage is not None
    spelled = {flag: f"--zero-stage {stage}" for flag in _SCHEMES if of_stage and flag in script and flag not in chosen}
    _ranks_by_hand(script)
    read_mindspeed(script)
    read_mamba(script)
    _other_words(script)
    _tokens(script)
    read_weighted_splits(script)
    typed = arguments.read(script.words())
    return replace(
        typed,
        warnings=(*script.warnings, *typed.warnings),
        problems=(*script.problems, *typed.problems),
        unread=typed.unread | script.unread,
        spellings={**typed.spellings, **spelled, **script.spellings},
    )


_SCHEMES = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-distributed-optimizer")
"""Flags that a stage of ZeRO stands for."""


def _ranks_by_hand(script: Script) -> None:
    """Take the rank that a script names by hand, where a launcher's variables say it, too, or nobody asks for it."""
    named = [flag for flag in ("--rank", "--dist-url") if flag in script]
    if named and (os.environ.get("RANK") or "--dry-run" in script):
        for flag in named:
            script.take(flag)
        script.warnings.append(
            f"{' and '.join(named)} change nothing here: ranks are those of the launcher's variables (mpirun's, "
            "srun's, torchrun's), and $MASTER_ADDR says where rank 0 is"
        )


_CONFIG = "--deepspeed_config"
_ENGINES = {
    "--clip-grad": ("gradient_clipping", 0.0),
    "--loss-scale": ("fp16.loss_scale", 0),
    "--initial-loss-scale": ("fp16.initial_scale_power", 16),
    "--loss-scale-window": ("fp16.loss_scale_window", 1000),
    "--hysteresis": ("fp16.hysteresis", 2),
    "--min-loss-scale": ("fp16.min_loss_scale", 1),
}
"""Flags of settings that DeepSpeed reads from its own file alone -> the file's key, and its default."""

_LENGTHS = "lengths that grow are --stages FILE here, with lines as `1000: {seq_length: 2048}`; give that instead"
_TRAINS_OTHERWISE = {
    "curriculum_learning": _LENGTHS,
    "data_efficiency": _LENGTHS,
    "compression_training": "weights are not compressed while they train; leave it out",
}
"""Sections of the file that change the training where they are enabled -> the fix to suggest."""

_STAGES = (
    "it cuts samples of --seq-length short, and here a stage has other samples, of its own length; put {} into a file, "
    "and give it as --stages FILE"
)
_IDLE = ("optimizer", "scheduler", "aio", "autotuning", "checkpoint", "comms_logger", "flops_profiler", "pipeline")
"""Sections of the file that change nothing: the first two, since DeepSpeed is given Megatron's own."""


def _engine(script: Script) -> object:
    """Take what chooses DeepSpeed as the engine, and give what that comes to; return ZeRO's stage, None without one."""
    chosen, named = script.take("--deepspeed"), script.take("--deepspeed-config")
    stage = script.take_number("--zero-stage")
    content: dict[str, Any] = {} if stage is None else {"zero_optimization.stage": stage}
    if chosen is not None:
        script.warnings.append("--deepspeed changes nothing here: megatron-core is always the engine")
    here, machines = map(os.environ.get, ("LOCAL_SIZE", "CROSS_SIZE"))
    if here and machines and script.take("--local-rank"):
        first = os.environ.get("MASTER_ADDR", "ADDRESS")
        others = "" if machines == "1" else f" --nnodes {machines} --node-rank RANK --master-addr {first}"
        script.warnings.append(
            f"deepspeed starts no rank again; {'on each machine, ' if others else ''}torchrun --nproc-per-node "
            f"{here}{others} --max-restarts 3 pretrain_gpt.py with these flags does"
        )
    try:
        if named is not None and chosen is not None:
            content = _effective(script, _content(" ".join(named)), stage)
        elif named is not None:
            script.warnings.append(f"{_CONFIG} changes nothing, there too: without --deepspeed nobody reads it")
        if content:
            _give(script, content)
    except ConfigurationError as error:
        script.problems += error.problems
    return content.get("zero_optimization.stage")


def _content(named: str) -> dict[str, Any]:
    """Return each value of the file, or of its content given in base64, as DeepSpeed allows, by its dotted key."""
    from megatron_ext.plugins.migrate import translate

    content = translate.read(named) if os.path.exists(named) else None
    with contextlib.suppress(ValueError):
        content = content or load_json(base64.urlsafe_b64decode(named))
    if not isinstance(content, dict):
        raise ConfigurationError(f"{_CONFIG} {named[:200]} does not exist; give a JSON file, or its text in base64")
    return {name.replace("bfloat16", "bf16"): value for name, value in translate.leaves(content) if value != {}}


def _effective(script: Script, content: dict[str, Any], stage: int | None) -> dict[str, Any]:
    """Return the entries of DeepSpeed's file that it uses, with its defaults; for "auto" the script's value is
    taken."""
    auto = {name for name, value in content.items() if value == "auto"}
    content = {name: value for name, value in content.items() if name not in auto}
    for name in (*_TRAINS_OTHERWISE, *_IDLE):
        section = {key: content.pop(key) for key in [*content] if key.split(".")[0] == name}
        if name in _IDLE[:2] and section:
            script.warnings.append(f"{name} of {_CONFIG} changes nothing, there too: Megatron's own is used")
        elif name not in _IDLE and any(value is True for key, value in section.items() if key.endswith("enabled")):
            stages = nearest_stages({key.partition(".")[2]: value for key, value in section.items()})
            instead = _STAGES.format(stages) if stages else _TRAINS_OTHERWISE[name]
            if stages and "--stages" in script:
                script.warnings.append(f"{name} of {_CONFIG} changes nothing: --stages says which lengths there are")
            else:
                script.problems.append(f"{name} of {_CONFIG} is not supported: {instead}")
    _precision(script, content, auto)
    for flag, (key, default) in _ENGINES.items():
        if "--fp16" not in script and key.startswith("fp16"):
            content.pop(key, None)
        elif key not in auto:
            own = content.setdefault(key, default)
            given = " ".join(script.take(flag) or (["1.0"] if flag == "--clip-grad" else []))
            if given and given.removesuffix(".0") != str(own).removesuffix(".0"):
                script.warnings.append(f"{flag} {given} changes nothing, there too: {key} of {_CONFIG} is {own}")
    key = "zero_optimization.stage"
    own = content.setdefault(key, (stage or 0) if key in auto else 0)
    if stage not in (None, own):
        script.warnings.append(f"--zero-stage {stage} changes nothing, there too: {key} of {_CONFIG} is {own}")
    _batch(script, content)
    return content


def _precision(script: Script, content: dict[str, Any], auto: set[str]) -> None:
    """Give the precision of the file, or add a problem where the script has another one."""
    given = [flag for flag in ("--fp16", "--bf16") if flag in script]
    own = [flag for flag in ("--fp16", "--bf16") if content.pop(f"{flag[2:]}.enabled", False) is True]
    if given and given != own and (own or not all(f"{flag[2:]}.enabled" in auto for flag in given)):
        words = " and ".join(f"{name}.enabled {str(f'--{name}' in own).lower()}" for name in ("fp16", "bf16"))
        script.problems.append(f"{' '.join(given)}, but {words} in {_CONFIG}; let both say the same precision")
    script.give(*((flag,) for flag in own if not given))


def _batch(script: Script, content: dict[str, Any]) -> None:
    """Give the sizes of batches that the file has and the script does not; add a problem where they differ."""
    sizes = {"--micro-batch-size": "train_micro_batch_size_per_gpu", "--global-batch-size": "train_batch_size"}
    for flag, key in sizes.items():
        own, given = content.pop(key, None), script.number(flag)
        if own is not None and given not in (None, own):
            script.problems.append(
                f"{flag} {given} and {key} {own} of {_CONFIG} differ; let both say the same, or leave the key out"
            )
        elif own is not None:
            script.give((flag, str(own)))
    steps, micro, batch = content.pop("gradient_accumulation_steps", None), *map(script.number, sizes)
    ways = (f"--{way}-parallel-size" for way in ("tensor-model", "pipeline-model", "context", "ds-sequence"))
    ranks = (script.number("--world-size") or world_size()) // math.prod(script.number(way) or 1 for way in ways)
    product = None if steps is None or micro is None else steps * micro * ranks
    if product and batch is None:
        script.give(("--global-batch-size", str(product)))
    elif product and batch != product:
        script.problems.append(
            f"--global-batch-size {batch} is not gradient_accumulation_steps {steps} of {_CONFIG} x --micro-batch-size "
            f"{micro} x {ranks} data-parallel ranks; use --global-batch-size {product}, or leave the key out"
        )


def _give(script: Script, content: dict[str, Any]) -> None:
    """Give the flags that keys of DeepSpeed's file mean, and say what becomes of the others."""
    from megatron_ext.plugins.migrate.translate import translate

    # Settings of the script, absent from the file, that the meaning of the file's keys depends on.
    content["fp16.enabled"] = "--fp16" in script
    if "--cpu-optimizer" in script or "--cpu-torch-adam" in script:
        content["zero_optimization.cpu_offload"] = True
    found = translate("deepspeed", content)
    for key in found.keys:
        if key.became == "refused":
            text = f"{key.name} {key.value!r} of {_CONFIG} is not translated: {key.reason}; leave it out"
            (script.warnings if "--allow-unknown-flags" in script else script.problems).append(text)
        elif key.became == "none":
            script.warnings.append(f"{key.name} {key.value} of {_CONFIG} changes nothing here: {key.reason}")
    for flag, value in found.command.items():
        if flag not in script:
            script.give((flag, *shlex.split(value)))


_WORDS: dict[str, dict[str, Sequence[str]]] = {
    "--cpu-optimizer": {"": ["--optimizer-cpu-offload"]},
    "--cpu-torch-adam": {"": ["--optimizer-cpu-offload"]},
    "--no-tie-embed-logits": {"": ["--untie-embeddings-and-output-weights"]},
    "--use-rms-norm": {"": ["--normalization=RMSNorm"]},
    "--use-z-loss": {"": ["--z-loss-strength=1e-4"]},
    "--use-glm-rope": {"": ["--rotary-interleaved"]},
    "--glu-activation": {"swiglu": ["--swiglu"], "geglu": ["--geglu"]},
    "--activation-func-type": {"swiglu": ["--swiglu"], "gelu": []},
    "--attention-head-type": {"multihead": [], "multiquery": ["--group-query-attention", "--num-query-groups=1"]},
    "--pp-partition-method": {
        "type:transformer": [],
        "type:transformer|embedding": [f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss")],
    },
}
"""Flags, and which of ours each of their values stands for."""


def _other_words(script: Script) -> None:
    for flag, by_value in _WORDS.items():
        values = script.take(flag)
        if values is not None:
            value = " ".join(values)
            script.give(*([switch] for switch in by_value.get(value, ())))
            if value not in by_value:
                script.problems.append(f"{flag}: {value!r} is not one of {', '.join(by_value)}; use one of them")
    stages = script.number("--pipeline-model-parallel-size") or 1
    if script.take("--no-pipeline-parallel") is not None and stages > 1:
        script.problems.append(f"--no-pipeline-parallel, but --pipeline-model-parallel-size {stages}; leave one out")
    kind, file = ((script.values(f"--tokenizer-{of}") or [""])[0] for of in ("type", "model"))
    if kind == "TokenizerFromFile":
        file = (script.take("--tokenizer-file") or [file])[0]
    folder = os.path.dirname(file) or "." if os.path.basename(file) == "tokenizer.json" else file
    of_folder = kind in FOLDER_TOKENIZERS or (kind == "Llama2Tokenizer" and (folder != file or os.path.isdir(file)))
    if of_folder and file and "--vocab-file" not in script:
        script.give(("--tokenizer-type", "HuggingFaceTokenizer"), ("--tokenizer-model", folder))


_OF_EXPERTS: tuple[str, ...] = ("--topk", "--expert-interval", "--mlp-type", "--moe-expert-parallel-size")
_OF_EXPERTS += ("--moe-loss-coeff", "--disable-moe-token-dropping", "--create-moe-param-group")
_MARKS = (*_OF_EXPERTS, "--deepspeed", "--no-pipeline-parallel", "--deepspeed-activation-checkpointing")
"""Flags that only Megatron-DeepSpeed has; next to one of them, --num-experts has Megatron-DeepSpeed's meaning."""

_OF_EXPERTS += ("--moe-train-capacity-factor", "--moe-eval-capacity-factor", "--moe-min-capacity", "--use-tutel")
_OF_EXPERTS += ("--enable-expert-tensor-parallelism", "--disable-moe-top2-2nd-expert-sampling")


def _experts(script: Script) -> None:
    """Translate --num-experts from Megatron-DeepSpeed's meaning: 1 is a model without experts; every second layer has
    them; the gate's softmax is over all experts in fp32, and with --topk 1 the expert's weight, else divided by the sum
    over a token's; experts have a capacity."""
    given = {flag: script.take(flag) for flag in _OF_EXPERTS}
    numbers = script.take("--num-experts") or ["1"]
    if set(numbers) == {"1"}:
        return
    own = enumerate(("1", "2", "standard", "1", "0.1"))
    topk, interval, mlp, ranks, loss = ((given[_OF_EXPERTS[place]] or [default])[0] for place, default in own)
    layers, every = script.number("--num-layers") or 0, int(interval) if interval.isdecimal() else 0
    drops, factor = given[_OF_EXPERTS[5]] is None, (given["--moe-train-capacity-factor"] or ["1.0"])[0]
    refused = {
        f"--num-experts {' '.join(numbers)}: layers have one number of experts here; give it": len(set(numbers)) > 1,
        f"--topk {topk} divides a token's weights by the sum of those within the capacity of their experts there; add "
        "--disable-moe-token-dropping": drops and topk != "1",
        "--topk 2 draws the second expert, and counts the first alone in the loss; use 1 or 3": topk == "2",
        f"--mlp-type {mlp}: no layer adds an MLP to its experts here; use standard": mlp != "standard",
        f"--expert-interval {interval}: none of {layers} layers has experts; use 1": not 1 <= every <= layers,
    }
    script.problems += [text for text, is_so in refused.items() if is_so]
    if drops and topk == "1":
        script.warnings.append(
            f"--moe-train-capacity-factor {factor}: what is beyond an expert's capacity are the tokens of the least "
            "weight here, in training alone; there they are random ones, in evaluation by --moe-eval-capacity-factor, "
            "and --moe-min-capacity stay in any case"
        )
    script.give(
        ("--num-experts", numbers[0]),
        ("--expert-model-parallel-size", ranks),
        ("--moe-router-topk", topk),
        ("--moe-router-dtype", "fp32"),
        ("--moe-router-load-balancing-type", "aux_loss"),
        ("--moe-aux-loss-coeff", loss),
        *([("--moe-router-pre-softmax",)] if topk == "1" else []),
        *([("--moe-expert-capacity-factor", factor)] if drops else []),
        *([("--moe-layer-freq", f"([0]*{every - 1}+[1])*{layers // every}+[0]*{layers % every}")] if every > 1 else []),
    )


def _tokens(script: Script) -> None:
    """Take tokens as samples: the first length that is reached ends the run, and a schedule in tokens goes first."""
    flags = ("--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens")
    named = [flag for flag in flags if flag in script]
    if not named:
        return
    total, decay, warmup = map(script.take_number, flags)
    length, grows = script.number("--seq-length") or 0, "--rampup-batch-size" in script
    batch = 0 if grows else script.number("--global-batch-size") or 0
    steps = ("--train-iters", "--lr-decay-iters", "--lr-warmup-iters")
    in_samples = {flag: number * batch for flag in steps if (number := script.take_number(flag))}
    if length < 1 or (batch < 1 and (in_samples or not grows)):
        script.problems.append(
            f"{', '.join([*named, *in_samples])} are counted in samples here, which needs --seq-length and "
            "--global-batch-size, and with --rampup-batch-size no length in steps; give --train-samples and its like"
        )
        script.unread |= {"train_samples", "train_iters", "lr_decay_samples", "lr_warmup_samples"}
        return
    if warmup is not None and decay is None and script.values("--lr-decay-style") != ["constant"]:
        script.problems.append("--lr-warmup-tokens without --lr-decay-tokens: the decay begins at no step; give both")
    ends = [in_samples.get("--train-iters"), script.number("--train-samples")]
    ends += [] if total is None else [math.ceil(total / (length * (batch or 1))) * (batch or 1)]
    taken = {
        "--train-samples": min((samples for samples in ends if samples), default=None),
        "--lr-decay-samples": in_samples.get("--lr-decay-iters") if decay is None else decay // length,
        "--lr-warmup-samples": in_samples.get("--lr-warmup-iters") if warmup is None else warmup // length,
    }
    words = [f"{flag} {samples}" for flag, samples in taken.items() if samples is not None]
    script.give(*(word.split() for word in words))
    script.warnings.append(
        f"{', '.join(named)}: {' '.join(words)}; in tokens, Megatron-DeepSpeed's schedule is one step behind"
    )
