"""Drops flags that have no effect next to the others, and says so: Megatron drops them too, or never reads them.

    values, warnings = without_effect({"sequence_parallel": True})   # one tensor-parallel rank

A flag is dropped only where the training and the saved files are the same with and without it. Conditions on one other
field stand at the field (`ReadWith`); all other conditions stand here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.derived.cuda_graphs import FULL_ITERATION
from megatron_ext.config.derived.sharding import given_schemes
from megatron_ext.config.parse.options import counted, flag_of, options_by_name
from megatron_ext.config.schema.option import ReadWith


def without_effect(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values (by field name) without those that cannot stay where they have no effect, and a warning
    for each that has none."""
    left = dict(values)
    warnings = []
    dropped = dict(_dropped(values))
    for name, reason in (dict(_unread(values)) | dropped).items():
        if left[name] is not False:  # --switch=false asks for nothing
            warnings.append(f"{flag_of(name)} changes nothing here: {reason}")
        if name in dropped or options_by_name()[name].dropped_unread:
            del left[name]
    return left, warnings + _drop_parts_of_experts(left)


_PARTS_OF_EXPERTS = ("moe_act", "shared_experts", "mla_up_proj")
"""Values of --recompute-modules that belong to experts and to latent attention."""


def _drop_parts_of_experts(left: dict[str, Any]) -> list[str]:
    """Drop parts of experts and latents from the typed --recompute-modules, and return the warning, if there is one."""
    parts = left.get("recompute_modules") or ()
    whole = ("moe",) if left.get("recompute_granularity") == "full" else ()
    dropped = [part for part in parts if part in (*_PARTS_OF_EXPERTS, *whole)]
    if not dropped:
        return []
    left["recompute_modules"] = tuple(part for part in parts if part not in dropped)
    if not left["recompute_modules"]:
        del left["recompute_modules"]
        if left.get("recompute_granularity") == "selective":
            del left["recompute_granularity"]
    return [
        f"--recompute-modules {' '.join(dropped)} changes nothing here: parts of experts and latents are not "
        "recomputed by themselves; --recompute-modules moe recomputes whole experts, --recompute-granularity full all"
    ]


def _unread(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    seen = counted(values)
    for name in values:
        for needed in options_by_name()[name].read_with:
            if not _is_read(needed, seen):
                yield name, needed.words
    saves = values.get("save") is not None and not values.get("no_save_optim")
    if values.get("ema_decay") and not saves and not values.get("eval_ema"):
        yield "ema_decay", "the averages are neither saved (--save without --no-save-optim) nor evaluated (--eval-ema)"


def _dropped(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("save_interval", "exit_interval", "exit_duration_in_mins"):
        if values.get(name) == 0 and not (name == "save_interval" and values.get("save") is None):
            yield name, "0 is no interval, and nothing happens by it"
    for scheme in given_schemes(values):
        yield from ((name, reason) for name, reason in scheme.ignores.items() if name in values)
    yield from _of_gradients(values)
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


_FROM_A_CHECKPOINT = ("load_hf", "use_checkpoint_args")
_SAID_BY: dict[str, tuple[str, ...]] = {
    "shape": _FROM_A_CHECKPOINT,
    "function": _FROM_A_CHECKPOINT,
    "tokenizer": _FROM_A_CHECKPOINT,
    "curve": ("use_checkpoint_opt_param_scheduler",),
}
"""Resume role of a field -> the fields that name another file as the source of its value."""


def _is_read(needed: ReadWith, values: Mapping[str, Any]) -> bool:
    """Return whether one of the other fields, as these values or another file may say them, has it read."""
    return any(
        any(values.get(source) for source in _SAID_BY.get(options_by_name()[field].resume, ()))
        or (
            needed.holds(field, values.get(field, options_by_name()[field].default))
            and all(_is_read(one, values) for one in options_by_name()[field].read_with)
        )
        for field in needed.any_of
    )
