"""Drops flags that have no effect next to the others, and says so: Megatron drops them too, or never reads them.

    values, warnings = without_effect({"sequence_parallel": True})   # one tensor-parallel rank

A flag is dropped only where what is trained and what is kept are the same with and without it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.derived.attention_flags import LATENT_FLAGS
from megatron_ext.config.derived.cuda_graphs import FULL_ITERATION
from megatron_ext.config.derived.sharding import given_schemes
from megatron_ext.config.parse.options import flag_of, options_by_name

_READ_BY = {
    "vocab_file": ("GPT2BPETokenizer",),
    "merge_file": ("GPT2BPETokenizer",),
    "tiktoken_pattern": ("TikTokenizer",),
}
"""Field -> the kinds of tokenizer that read it; another kind is what its own files say."""


def without_effect(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values (by field name) without those that have no effect, and a warning for each of these."""
    left = dict(values)
    warnings = []
    for name, reason in _dropped(values):
        if left.pop(name) is not False:  # --switch=false asks for nothing
            warnings.append(f"{flag_of(name)} changes nothing here: {reason}")
    return left, warnings + _drop_parts_of_experts(left)


_PARTS_OF_EXPERTS = ("moe", "moe_act", "shared_experts", "mla_up_proj")
"""Values of --recompute-modules that belong to experts and to latent attention."""


def _drop_parts_of_experts(left: dict[str, Any]) -> list[str]:
    """Drop what is not recomputed by itself from the typed values, and return the warning, if there is one."""
    parts = left.get("recompute_modules") or ()
    dropped = [part for part in parts if part in _PARTS_OF_EXPERTS]
    if not dropped:
        return []
    left["recompute_modules"] = tuple(part for part in parts if part not in dropped)
    if not left["recompute_modules"]:
        del left["recompute_modules"]
        if left.get("recompute_granularity") == "selective":
            del left["recompute_granularity"]
    return [
        f"--recompute-modules {' '.join(dropped)} changes nothing here: what experts and latents keep for the backward "
        "pass stays on the device; --recompute-granularity full saves that memory"
    ]


def _dropped(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tensor_size = values.get("tensor_model_parallel_size", 1)
    for name in ("sequence_parallel", "sequence_parallel_keep_gathered"):
        if name in values and tensor_size == 1:
            yield name, "with --tensor-model-parallel-size 1 every rank has the whole sequence"
    if values.get("save") is None:
        for name in ("save_interval", "save_retain_interval"):
            if name in values:
                yield name, "without --save no checkpoint is written"
    if not any(name in values for name in ("recompute_granularity", "recompute_activations")):
        for name in ("recompute_method", "recompute_num_layers"):
            if name in values:
                yield name, "without --recompute-granularity nothing is recomputed"
    if not values.get("multi_latent_attention"):
        # That of YaRN is refused: it would change what is trained.
        for name in LATENT_FLAGS:
            if name in values and name != "rope_type":
                yield name, "without --multi-latent-attention there are no latents"
    yield from _of_other_tokenizers(values)
    yield from _of_experts(values)
    for name in ("save_interval", "exit_interval", "exit_duration_in_mins"):
        if values.get(name) == 0 and not (name == "save_interval" and values.get("save") is None):
            yield name, "0 is no interval, and nothing happens by it"
    for scheme in given_schemes(values):
        yield from ((name, reason) for name, reason in scheme.ignores.items() if name in values)
    yield from _of_gradients(values)
    yield from _of_fp8(values)
    yield from _of_graphs(values)


def _of_graphs(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind = values.get("cuda_graph_impl", "none")
    if kind == FULL_ITERATION:
        return
    if kind != "none":
        yield "cuda_graph_impl", "only full_iteration makes CUDA graphs, and steps compute the same without"
    steps = options_by_name()["cuda_graph_warmup_steps"].default
    if values.get("cuda_graph_warmup_steps", steps) != steps:
        yield "cuda_graph_warmup_steps", "without --cuda-graph-impl full_iteration there is no CUDA graph"


def _of_fp8(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kept = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if values.get("fp8_format") is None:
        for name in ("fp8_recipe", "first_last_layers_bf16", *kept):
            if name in values:
                yield name, "without --fp8-format nothing is in FP8"
    elif not values.get("first_last_layers_bf16"):
        for name in kept:
            if name in values:
                yield name, "without --first-last-layers-bf16 all layers are in FP8"


def _of_gradients(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    asked = [
        name
        for name, short in (("grad_reduce_in_bf16", True), ("main_grads_dtype", "bf16"))
        if values.get(name) == short
    ]
    if not values.get("bf16"):
        for name in asked:
            yield name, "without --bf16 gradients have the precision of the weights"
        return
    for scheme in given_schemes(values):
        if scheme.gradients_in_fp32:
            for name in asked:
                yield name, f"{flag_of(str(scheme.flag))} sums and keeps gradients in fp32"


def _of_experts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if any(values.get(name) for name in ("load_hf", "use_checkpoint_args")):
        return  # another file says whether there are experts, and how they are chosen
    if "moe_router_bias_update_rate" in values and not values.get("moe_router_enable_expert_bias"):
        yield "moe_router_bias_update_rate", "without --moe-router-enable-expert-bias there is no bias"
    if values.get("moe_router_score_function", "softmax") != "softmax" and "moe_router_pre_softmax" in values:
        yield (
            "moe_router_pre_softmax",
            f"--moe-router-score-function {values['moe_router_score_function']} is no softmax",
        )
    if values.get("num_experts"):
        return
    for name in ("expert_tensor_parallel_size", "moe_grouped_gemm"):
        if name in values:
            yield name, "without --num-experts there are no experts"


def _of_other_tokenizers(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind = values.get("tokenizer_type")
    for name, readers in _READ_BY.items():
        if kind is not None and name in values and kind not in readers:
            yield name, f"--tokenizer-type {kind} does not read it, only {' and '.join(readers)}"
