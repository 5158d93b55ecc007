"""The second stage of the configuration turns typed values and facts of the machine into one frozen `Config`.

Resolving derives the values that the user left out and never complains: a value that cannot be derived, because its
inputs are missing or wrong, stays as it is for `validate` to name.
"""

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.derived import attention_flags as attention_kernels
from megatron_ext.config.derived.batch_size import read_schedule
from megatron_ext.config.derived.cuda_graphs import makes_graphs, obstacles
from megatron_ext.config.derived.gradient_sums import add_by_default
from megatron_ext.config.derived.layer_patterns import DEPTH, PIPE
from megatron_ext.config.derived.lr_scale import scale
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.derived.pipeline_split import read_pipeline_layout
from megatron_ext.config.parse.options import options
from megatron_ext.config.schema import Config, ModelConfig, TrainingConfig
from megatron_ext.registry import brought


@dataclass(frozen=True)
class Facts:
    """Facts that torch-free readers found outside of the flags.

    Attributes:
        global_batch_is_given: whether the user typed --global-batch-size.
        world_size: ranks that really run ($WORLD_SIZE, else 1), or None where --dry-run --world-size decides.
        cuda_available: whether this machine shows an NVIDIA GPU.
        packages: the installed packages among the ones that only some flags need.
        missing_compiler: the C++ compiler that torch.compile would call and that is not installed, or None.
        uncapturing_torch: the installed torch's version if it cannot capture the passes of a step, or None.
        vocab_size: entries of the tokenizer that the flags name, or None if they name none.
        tokenizer_error: why that tokenizer could not be read, or None.
        huggingface: values of the model that --load-hf names, by field name; empty without it.
        huggingface_problems: why its config.json cannot be used.
        unread: fields that the user, or a file that the flags name, gave, but whose value could not be read.
        saved: the resolved values, by field name, of the run that wrote the checkpoint to load; None without one.
        missing_paths: files that the flags name and that do not exist (`config.parse.blend.missing_paths`).
        missing_checkpoint: the problem of the --load folder for --exit-on-missing-checkpoint.
        skip_samples_error: why --skip-samples cannot be read, or None.
        eval_tasks_problems: why the tasks of --eval-tasks cannot be done; empty without it.
        missing_task_files: files that the tasks of --eval-tasks name and that do not exist.
        load_problem: why --load cannot be what the user means (`checkpoint_folder.load_problem`), or None.
    """

    world_size: int | None = None
    global_batch_is_given: bool = False
    cuda_available: bool = False
    packages: frozenset[str] = frozenset()
    missing_compiler: str | None = None
    uncapturing_torch: str | None = None
    vocab_size: int | None = None
    tokenizer_error: str | None = None
    missing_paths: tuple[str, ...] = ()
    missing_checkpoint: str | None = None
    skip_samples_error: str | None = None
    eval_tasks_problems: tuple[str, ...] = ()
    missing_task_files: tuple[str, ...] = ()
    load_problem: str | None = None
    huggingface: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    huggingface_problems: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    saved: Mapping[str, Any] | None = None


def resolve(typed: Mapping[str, Any], facts: Facts) -> Config:
    """Return the configuration with every derived value filled in; wrong input is left for `validate`.

    Args:
        typed: values by field name, as `arguments.parse` gives them.
        facts: the facts of machine and files.
    """
    values = {**facts.huggingface, **typed}
    _resolve_pattern(values)
    _resolve_layout(values, facts)
    _resolve_model(values, facts)
    for derive in brought("resolvers"):
        derive(values, {**facts.huggingface, **typed})
    _resolve_implementation(values)
    if values.get("use_mup"):
        _resolve_mup(values)
    if values.get("mtp_num_layers") == 0:
        values["mtp_num_layers"] = None
    _resolve_exchange(values)
    _resolve_training(values)
    if "split" in values:
        values["split"] = values["split"].strip(" '\"")  # quotes that a script has twice, as Megatron takes them
    if values.get("save"):
        _fill(values, "metrics_file", default_metrics_file(values["save"]))
    config = _build(values)
    speed = {**_without_kernels(values, config), **_resolved_graphs(config, facts)}
    if "gradient_accumulation_fusion" not in values and not runs_on_cpu(config, facts):
        speed["gradient_accumulation_fusion"] = add_by_default(config)
    return _build({**values, **speed}) if speed else config


def runs_on_cpu(config: Config, facts: Facts) -> bool:
    """Return whether the ranks are CPU processes, as --device says or this machine's lack of a GPU."""
    return config.layout.device == "cpu" or (config.layout.device == "auto" and not facts.cuda_available)


def graph_obstacles(config: Config, facts: Facts) -> list[str]:
    """Return everything that keeps the steps of a configuration from being captured, as `cuda_graphs.obstacles`."""
    return obstacles(config, on_cpu=runs_on_cpu(config, facts), uncapturing_torch=facts.uncapturing_torch)


def positive(*values: Any) -> bool:
    """Return whether no value is None and all are above zero, so that one may divide by them."""
    return all(value is not None and value > 0 for value in values)


def default_ffn_hidden_size(hidden_size: int, gated: bool) -> int:
    """Return 4 x hidden size; with a gate, which makes it three matrices for two, 2/3 of it, rounded down to a multiple
    of 64.

    Source: Megatron-LM's default; the 2/3 is from Shazeer 2020 (arXiv:2002.05202), section 3.1. A width below 24
    would round to 0, so that at least 64 is given.
    """
    return max(int(4 * hidden_size * 2 / 3 / 64) * 64, 64) if gated else 4 * hidden_size


def default_metrics_file(save: str) -> str:
    """Return the path of the metrics file in the folder of --save."""
    return os.path.join(save, "metrics.jsonl")


def padded_vocabulary(vocab_size: int, divisor: int, tensor_parallel_size: int) -> int:
    """Return the vocabulary rounded up to a multiple of divisor x tensor-parallel size, as Megatron sizes it."""
    multiple = divisor * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def _resolve_pattern(values: dict[str, Any]) -> None:
    """Fill in the layers of a pattern of letters, its depths of multi-token prediction where they are alike, and the
    chunks of the pipeline by its pipes, which are no part of the model."""
    if values.get("mtp_hybrid_override_pattern"):
        text = values["mtp_hybrid_override_pattern"]
        values["mtp_hybrid_override_pattern"] = text.strip(" '\"")  # quotes that a script has twice
    letters = values.get("hybrid_layer_pattern")
    if not letters:
        return
    letters, *depths = letters.split(DEPTH)
    of_depths = {"mtp_num_layers": len(depths), "mtp_hybrid_override_pattern": (depths or [""])[0]}
    are_alike = len(set(depths)) == 1 and all(values.get(name) in (None, of) for name, of in of_depths.items())
    if are_alike:
        values.update(of_depths)
    chunks = letters.split(PIPE)
    if len(chunks) > 1 and values.get("pipeline_model_parallel_size", 1) != 1:
        text = "|".join("t" * len(chunk) for chunk in chunks) + "m" * (values.get("mtp_num_layers") or 0)
        _fill(values, "pipeline_model_parallel_layout", f"E{text}L")
    if depths and not are_alike:
        return  # for the rule to say why
    values["hybrid_layer_pattern"] = "".join(chunks)
    _fill(values, "num_layers", len(values["hybrid_layer_pattern"]))


def _resolve_layout(values: dict[str, Any], facts: Facts) -> None:
    _fill(values, "world_size", facts.world_size if facts.world_size is not None else 1)
    if "cp_comm_type" in values:
        kinds = values["cp_comm_type"]
        values["cp_comm_type"] = tuple("all_gather" if kind == "allgather" else kind for kind in kinds)
    if values.get("use_megatron_fsdp"):
        _fill(values, "data_parallel_sharding_strategy", "optim_grads_params")
    _resolve_virtual_stages(values)


def _resolve_virtual_stages(values: dict[str, Any]) -> None:
    """Fill in the chunks per stage from the layers of a chunk, or the other way round; a layout string sets the number
    of chunks."""
    stages = values.get("pipeline_model_parallel_size", 1)
    split = values.get("pipeline_model_parallel_layout")
    if split is not None:
        try:
            total = len(read_pipeline_layout(split))
        except ValueError:
            return
        if positive(stages) and total % stages == 0 and total > stages:
            _fill(values, "num_virtual_stages_per_pipeline_rank", total // stages)
        return
    if any(values.get(f"decoder_{end}_pipeline_num_layers") is not None for end in ("first", "last")):
        return
    chunks = values.get("num_virtual_stages_per_pipeline_rank")
    chunk_size = values.get("num_layers_per_virtual_pipeline_stage")
    layers: Any = values.get("num_layers")
    if not positive(layers):
        return
    layers += sum(bool(values.get(f"account_for_{what}_in_pipeline_split")) for what in ("embedding", "loss"))
    if chunks is None and positive(stages, chunk_size) and layers % (stages * chunk_size) == 0:
        values["num_virtual_stages_per_pipeline_rank"] = layers // (stages * chunk_size)
    elif chunk_size is None and positive(stages, chunks) and layers % (stages * chunks) == 0:
        values["num_layers_per_virtual_pipeline_stage"] = layers // (stages * chunks)


def _resolve_implementation(values: dict[str, Any]) -> None:
    """Select this program's own layers (--transformer-impl local) where a field asks for something that Transformer
    Engine's layers cannot compute. The results are the same, in FP8 up to rounding."""
    if any(values.get(name) for name in _computed_by_ours()):
        values["transformer_impl"] = "local"


@functools.cache
def _computed_by_ours() -> tuple[str, ...]:
    return tuple(option.name for option in options() if option.computed_by_ours)


def _resolve_exchange(values: dict[str, Any]) -> None:
    """Select the exchange of heads (a2a) between context-parallel ranks where attention has dropout and no exchange is
    given: a ring puts attention together from blocks, and kernels of blocks have no dropout."""
    size, tensor = values.get("context_parallel_size", 1), values.get("tensor_model_parallel_size", 1)
    groups: Any = values.get("num_query_groups" if values.get("group_query_attention") else "num_attention_heads")
    dropout = values.get("attention_dropout", ModelConfig.attention_dropout)
    local: Any = values.get("num_query_groups_local") or groups
    if positive(size, tensor, groups, local, dropout) and size > 1 and math.gcd(groups, local) % (size * tensor) == 0:
        _fill(values, "cp_comm_type", ("a2a",))


def _resolve_model(values: dict[str, Any], facts: Facts) -> None:
    hidden, heads = values.get("hidden_size", 0), values.get("num_attention_heads", 0)
    if positive(hidden):
        gated = any(values.get(name) for name in ("swiglu", "geglu", "quick_geglu"))
        _fill(values, "ffn_hidden_size", default_ffn_hidden_size(hidden, gated))
    if values.get("position_embedding_type") == "yarn":
        values["position_embedding_type"] = "rope"
        _fill(values, "rope_type", "yarn")
    if values.get("rope_type") == "rope":
        del values["rope_type"]
    if positive(hidden, heads) and hidden % heads == 0:
        _fill(values, "kv_channels", hidden // heads)
    _fill(
        values, "num_query_groups", 1 if values.get("group_query_attention") else heads or None
    )  # 1 as Megatron has it
    _fill(values, "max_position_embeddings", values.get("seq_length"))
    if values.get("window_size") is not None:
        values["window_size"] = "".join(values["window_size"].split()).strip("()")  # one spelling of one window
    _fill(values, "vocab_size", facts.vocab_size)
    divisor = values.get("make_vocab_size_divisible_by", 128)
    tensor_size = values.get("tensor_model_parallel_size", 1)
    if positive(values.get("vocab_size"), divisor, tensor_size):
        _fill(values, "padded_vocab_size", padded_vocabulary(values["vocab_size"], divisor, tensor_size))


def _resolve_mup(values: dict[str, Any]) -> None:
    """Fill in the multipliers of the maximal update parametrization, as Megatron derives them (Yang et al. 2022,
    arXiv:2203.03466, table 8 and appendix B.1), and of its depth form (Dey et al. 2025, arXiv:2505.01618, table 1)."""
    hidden, head, layers = (values.get(name) for name in ("hidden_size", "kv_channels", "num_layers"))
    _fill(values, "mup_base_hidden_size", hidden)
    base, base_layers = values.get("mup_base_hidden_size"), values.get("mup_base_num_layers")
    _fill(values, "embedding_multiplier", values.get("mup_embedding_mult", 1.0))
    if positive(hidden, base) and hidden and base:
        given = values.get("mup_output_mult", 1.0)
        _fill(values, "logits_multiplier", base / hidden if given == 1.0 else given)
    if positive(head):
        scale = math.sqrt(values.get("mup_base_head_dim") or 1.0)
        _fill(values, "softmax_scale", scale / head ** values.get("mup_attn_scale_power", 1.0))
    if positive(layers, base_layers) and layers and base_layers:
        _fill(values, "residual_multiplier", base_layers / layers)


def _resolve_training(values: dict[str, Any]) -> None:
    axes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    model_parallel_size = math.prod(values.get(axis, 1) for axis in axes)
    micro, world = values.get("micro_batch_size"), values["world_size"]
    _resolve_schedule(values)
    if positive(micro, world, model_parallel_size) and world % model_parallel_size == 0:
        _fill(values, "global_batch_size", micro * (world // model_parallel_size))
    scale(values)
    if OPTIMIZERS.get(values.get("optimizer", ""), OPTIMIZERS["adam"]).averages:
        _fill(values, "lr_decay_style", "constant")
    if values.get("recompute_activations"):
        _fill(values, "recompute_granularity", "selective")
    if values.get("moe_layer_recompute") and values.get("recompute_granularity") != "full":
        _fill(values, "recompute_granularity", "selective")
        values["recompute_modules"] = tuple(dict.fromkeys((*(values.get("recompute_modules") or ()), "moe")))
    if values.get("bf16") and values.get("main_grads_dtype") == "bf16":
        values["grad_reduce_in_bf16"] = True
    if values.get("bf16") and not values.get("grad_reduce_in_bf16"):
        values["accumulate_allreduce_grads_in_fp32"] = True
    if values.get("skip_train"):
        values["no_load_optim"] = True


def _resolve_schedule(values: dict[str, Any]) -> None:
    """Take the last size of --step-batch-size-schedule for the global batch."""
    text, length = values.get("step_batch_size_schedule"), values.get("seq_length")
    if text is None or not positive(length):
        return
    try:
        _fill(values, "global_batch_size", read_schedule(text, length or 0)[-1][1])
    except ValueError:
        return  # a rule names it


def _without_kernels(values: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the defaults of the flags that choose a kernel of attention, where they choose nothing."""
    asked = attention_kernels.asked_for(values)
    if not asked or attention_kernels.chooses_nothing(config, config.training.attention_backend) is None:
        return {}
    return {name: getattr(TrainingConfig, name) for name in asked}


def _resolved_graphs(config: Config, facts: Facts) -> dict[str, Any]:
    """Return that steps run without graphs, where something is in the way of these; else at least one step does, in
    which kernels are compiled and chosen, and connections made."""
    if not makes_graphs(config):
        return {}
    if graph_obstacles(config, facts):
        return {"cuda_graph_impl": "none"}
    return {"cuda_graph_warmup_steps": max(1, config.training.cuda_graph_warmup_steps)}


def _fill(values: dict[str, Any], name: str, derived: Any) -> None:
    if values.get(name) is None:
        values[name] = derived


def _build(values: Mapping[str, Any]) -> Config:
    by_group: dict[str, dict[str, Any]] = {name: {} for name in _groups()}
    homes = _homes()
    unknown = values.keys() - homes.keys()
    assert not unknown, f"not in the schema: {unknown}"
    for name, value in values.items():
        by_group[homes[name]][name] = value
    return Config(**{name: _group(name, of_group) for name, of_group in by_group.items()})


_last: dict[str, tuple[dict[str, Any], Any]] = {}
"""Name of a group -> its values and the group built from them, of the last call."""


def _group(name: str, values: dict[str, Any]) -> Any:
    """Return the group with these values; the same object as the last time where they are the same, since a search
    resolves thousands of configurations that differ in a few values."""
    before = _last.get(name)
    if before is not None and len(before[0]) == len(values) and all(map(_same, before[0].items(), values.items())):
        return before[1]
    _last[name] = values, _groups()[name](**values)
    return _last[name][1]


def _same(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    (name, value), (other_name, old) = one, other
    return name == other_name and (
        value is old or (type(value) is type(old) and type(value) in (int, str) and value == old)
    )


@functools.cache
def _groups() -> dict[str, type]:
    """Return the groups of the schema by name."""
    return {group.name: typing.cast(type, group.type) for group in dataclasses.fields(Config)}


@functools.cache
def _homes() -> dict[str, str]:
    """Return the name of the group of every field."""
    return {field.name: name for name, group in _groups().items() for field in dataclasses.fields(group)}
