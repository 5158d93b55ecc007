"""Translates Axolotl's YAML file.

The data of an Axolotl file: which preprocess_data.py commands make it, and which flags train on it.

    datasets:                         tools/preprocess_data.py --input 'hf://datasets/tatsu-lab/alpaca/**/train-*'
      - path: tatsu-lab/alpaca   ->       --data-format alpaca --on-error skip --seq-length 4096 ...
        type: alpaca                  --data-path data/train_alpaca_document --assistant-only-loss
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.foreign.key_meanings import (
    EPOCHS,
    FSDP,
    FSDP_VERSION,
    FULL_RECOMPUTE,
    OFF,
    Cases,
    Default,
    Fact,
    Flags,
    NoCounterpart,
    Table,
    only_off,
    optimizers,
    switch,
)

_TEXT = NoCounterpart("text becomes tokens once, before training: megatron-ext preprocess, then --data-path")
_ADAPTER = only_off("all weights are trained; adapters and quantized weights are for fine-tuning tools")

TABLE: Table = {
    "base_model": Flags("--load-hf {} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {}"),
    "model_type": Default("config.json of the --load-hf folder says it"),
    "tokenizer_type": Default("tokenizer.json of the --load-hf folder says it"),
    **{f"datasets.*.{name}": _TEXT for name in ("path", "type", "split", "data_files", "ds_type", "name")},
    **{f"datasets.*.{name}": _TEXT for name in ("field", "field_messages", "chat_template")},
    "chat_template": _TEXT,
    "train_on_inputs": Cases({"false": OFF}, _TEXT),
    "dataset_prepared_path": Flags("--data-cache-path {}"),
    "val_set_size": NoCounterpart("--split gives training, validation and test their shares: --split 95,5,0"),
    "tensor_parallel_size": Fact("tensor"),
    "context_parallel_size": Fact("context"),
    "sequence_parallel_degree": Fact("context"),
    "dp_shard_size": Fact("shard"),
    "dp_replicate_size": Fact("replicate"),
    "fsdp_version": FSDP_VERSION,
    "deepspeed": NoCounterpart("import that file too: --from deepspeed"),
    "ddp": Default("data parallelism is what ranks do without a flag"),
    "ddp_timeout": Flags("--distributed-timeout-minutes {}", lambda seconds: float(seconds) / 60),
    "distributed_backend": Flags("--distributed-backend {}"),
    "sequence_len": Flags("--seq-length {}"),
    "sample_packing": switch("--reset-position-ids --reset-attention-mask --eod-mask-loss"),
    "pad_to_sequence_len": Default("every sample has --seq-length tokens"),
    "micro_batch_size": Fact("micro_batch_size"),
    "gradient_accumulation_steps": Fact("accumulation"),
    "num_epochs": EPOCHS,
    "max_steps": Flags("--train-iters {}"),
    "optimizer": optimizers("axolotl"),
    "learning_rate": Flags("--lr {}", float),
    "lr_scheduler": Cases(
        {
            "cosine": Flags("--lr-decay-style cosine"),
            "linear": Flags("--lr-decay-style linear"),
            "constant": Flags("--lr-decay-style constant"),
            "constant_with_warmup": Flags("--lr-decay-style constant"),
            "inverse_sqrt": Flags("--lr-decay-style inverse-square-root"),
        },
        NoCounterpart("the curves are constant, linear, cosine, inverse-square-root, WSD and power: --lr-decay-style"),
    ),
    "warmup_steps": Flags("--lr-warmup-iters {}"),
    "warmup_ratio": Flags("--lr-warmup-fraction {}"),
    "weight_decay": Flags("--weight-decay {}"),
    "adam_beta1": Flags("--adam-beta1 {}"),
    "adam_beta2": Flags("--adam-beta2 {}"),
    "adam_epsilon": Flags("--adam-eps {}"),
    "max_grad_norm": Flags("--clip-grad {}"),
    "seed": Flags("--seed {}"),
    "bf16": Cases({"true": Flags("--bf16"), "auto": Flags("--bf16"), "full": Flags("--bf16"), "false": OFF}, OFF),
    "fp16": switch("--fp16"),
    "tf32": switch("--tf32"),
    "fp8": switch("--bf16 --fp8-format hybrid"),
    "flash_attention": Cases(
        {"true": Default("torch's scaled_dot_product_attention takes its flash kernel where it can"), "false": OFF}, OFF
    ),
    "sdp_attention": Default("attention is torch's scaled_dot_product_attention"),
    "gradient_checkpointing": Cases(
        {"true": Flags(FULL_RECOMPUTE.format(1)), "false": OFF, "null": OFF},
        NoCounterpart("recomputed layers keep their one input on the GPU"),
    ),
    "torch_compile": switch("--torch-compile"),
    "adapter": _ADAPTER,
    "load_in_8bit": _ADAPTER,
    "load_in_4bit": _ADAPTER,
    "dataloader_num_workers": Flags("--num-workers {}"),
    "dataloader_pin_memory": Default("batches for a GPU are pinned"),
    "dataloader_prefetch_factor": NoCounterpart("the background threads read ahead as far as there are threads"),
    "output_dir": Flags("--save {}"),
    "logging_steps": Flags("--log-interval {}"),
    "save_strategy": Default("--save-interval counts steps"),
    "save_steps": Flags("--save-interval {}"),
    "save_total_limit": Flags("--keep-last-checkpoints {}"),
    "resume_from_checkpoint": Flags("--load {}"),
    "eval_steps": Flags("--eval-interval {}"),
    "wandb_project": Flags("--wandb-project {}"),
    "wandb_entity": Flags("--wandb-entity {}"),
    "wandb_name": Flags("--wandb-exp-name {}"),
    **FSDP,
}

IMPLIED = {"base_model": "the folder must be there: download the model into it first"}
# transformers' Trainer takes the steps where both are given.
SHADOWED = {"warmup_ratio": "warmup_steps"}
DEFAULT_ACCUMULATION = 1


FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "sharegpt", "completion": "completion"}
"""Our --data-format by the part of Axolotl's `type` before a dot or colon."""
_TEMPLATES = {
    "tokenizer_default": "tokenizer",
    "alpaca": "alpaca",
    "chatml": "chatml",
    "llama3": "llama3",
    "zephyr": "zephyr",
}
_COLUMNS = {"messages": ("field_messages", "messages"), "completion": ("field", "text")}
_FOLDER = "data"


@dataclass(frozen=True)
class PreparedData:
    """What becomes of the keys of the data."""

    commands: tuple[str, ...] = ()
    """Command lines that make the .bin/.idx files."""
    flags: str = ""
    """Flags that train on them."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Key -> what is said of it; those that are not here mean what the table says."""
    unread: frozenset[str] = frozenset()
    """Keys of `reasons` that nothing here does."""


def prepare(content: Mapping[str, Any]) -> PreparedData:
    """Return the commands and flags for `datasets:`; nothing where a file has none, or none that can be read."""
    datasets = content.get("datasets")
    if not isinstance(datasets, list) or not all(isinstance(one, Mapping) for one in datasets):
        return PreparedData()
    commands, prefixes, reasons, unread = [], [], {}, set()
    for number, one in enumerate(datasets):
        form = FORMATS.get(str(one.get("type", "")).replace(":", ".").split(".")[0])
        key = f"datasets.{number}"
        for name in one:
            reasons[f"{key}.{name}"] = "see the commands below" if name in _READ else "leave it out, or change the data"
        unread |= {f"{key}.{name}" for name in one if name not in _READ}
        if form is None or "path" not in one:
            reasons[f"{key}.type"] = f"the formats are {', '.join(FORMATS)}: write the records as messages"
            unread |= {name for name in reasons if name.startswith(f"{key}.")}
            continue
        name = "train" if len(datasets) == 1 else f"train-{number}"
        commands.append(_command(one, form, name, content))
        prefixes.append(f"{_FOLDER}/{name}_{form}_document")
    if not commands:
        return PreparedData(reasons=reasons, unread=frozenset(unread))
    for name in ("chat_template", "train_on_inputs"):
        if name in content:
            reasons[name] = "see the commands below"
    flags = f"--data-path {' '.join(prefixes)}" + ("" if content.get("train_on_inputs") else " --assistant-only-loss")
    share = content.get("val_set_size")
    if isinstance(share, (int, float)) and 0 <= share < 1:
        reasons["val_set_size"] = "see --split"
        held_out = round(100 * share, 6)
        flags += f" --split {100 - held_out:g},{held_out:g},0"
    return PreparedData(tuple(commands), flags, reasons, frozenset(unread))


_READ = ("path", "type", "split", "data_files", "field_messages", "field", "chat_template", "ds_type", "name")


def _command(one: Mapping[str, Any], form: str, name: str, content: Mapping[str, Any]) -> str:
    words = ["megatron-ext", "preprocess", "--input", *_inputs(one), "--output-prefix", f"{_FOLDER}/{name}"]
    words += ["--data-format", form]
    column, default = _COLUMNS.get(form, ("", ""))
    if one.get(column, default) != default:
        words += ["--json-keys", str(one[column])]
    template = one.get("chat_template", content.get("chat_template"))
    # The type `alpaca` has one prompt, whatever the template; alpaca_chat and the others go through it.
    if form in ("messages", "sharegpt") and template is not None:
        words += ["--chat-template", _TEMPLATES.get(str(template), str(template))]
    if form == "completion":
        words.append("--append-eod")
    if content.get("sample_packing") and content.get("sequence_len"):
        words += ["--seq-length", str(content["sequence_len"]), "--on-error", "skip"]
    if content.get("train_on_inputs"):
        words.append("--train-on-inputs")
    if content.get("base_model"):
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(content["base_model"])]
    return shlex.join(words)


def _inputs(one: Mapping[str, Any]) -> list[str]:
    """Return --input: files and folders as they are, a repository's as URLs."""
    path = str(one["path"])
    files = one.get("data_files")
    names = [str(file) for file in (files if isinstance(files, list) else [files] if files else [])]
    if path in ("json", "parquet", "arrow", "text") and names:
        return names
    if "://" in path or path.startswith((".", "/", "~")) or path.count("/") != 1 or "." in path.rsplit("/", 1)[-1]:
        return [path]
    if names:
        return [f"hf://datasets/{path}/{file}" for file in names]
    return [f"hf://datasets/{path}/**/{one.get('split', 'train')}*"]
