"""Warns of flags that together with other flags change nothing, or have a side effect: one function for each warning.

A value that has no effect whatever else is given is dropped where it is read (`config/parse/ineffective_flags.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megatron_ext.config.derived import attention_flags as attention_kernels
from megatron_ext.config.derived import newton_schulz, overlapped_products
from megatron_ext.config.derived.cuda_graphs import FULL_ITERATION, graphs_warning, makes_graphs
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.parse.options import flag_of, options, options_by_name
from megatron_ext.config.resolve import Facts, graph_obstacles
from megatron_ext.config.schema import Config
from megatron_ext.errors import listed
from megatron_ext.parts.experts.describe import GROUPED_ALIGNMENT
from megatron_ext.parts.stack import layers
from megatron_ext.registry import brought

Given = Mapping[str, Any]
"""The values that the user typed, by field name."""

Warning = Callable[[Given, Config, Facts], Iterable[str]]


def dropout_exchanges_heads(given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that dropout chooses another exchange of context-parallel ranks."""
    layout = config.layout
    if layout.context_parallel_size > 1 and "cp_comm_type" not in given and layout.cp_comm_type == ("a2a",):
        yield (
            f"--attention-dropout {config.model.attention_dropout:g} with context parallelism: ranks exchange heads "
            "(--cp-comm-type a2a), for the blocks of a ring have no dropout; --attention-dropout 0 keeps the ring"
        )


def checkpoint_has_no_flags(_given: Given, config: Config, facts: Facts) -> Iterator[str]:
    """Warn that --use-checkpoint-args finds no flags."""
    if config.checkpoint.use_checkpoint_args and facts.saved is None:
        yield (
            f"--use-checkpoint-args changes nothing here: --load {config.checkpoint.load} holds no flags of a "
            "checkpoint, and the model is that of the command line"
        )


def positions_stay(_given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that --no-position-embedding leaves rotary positions as they are."""
    if config.model.no_position_embedding:
        yield (
            "--no-position-embedding changes nothing with --position-embedding-type rope: the rotary positions stay, "
            "and there is no learned table in any case"
        )


def blockwise_updates(_given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that Muon by blocks depends on the layout."""
    divide = max(config.layout.tensor_model_parallel_size, config.layout.expert_tensor_size) > 1
    if divide and config.optimizer.muon_tp_mode == "blockwise":
        yield (
            "--muon-tp-mode blockwise updates the part of a matrix that a rank has as a matrix of its own: the curve "
            "is another than on one rank; --muon-tp-mode duplicated keeps it"
        )


def muon_settings(_given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn of numbers of Newton-Schulz steps that do not fit their coefficients, and of updates that grow despite
    muP."""
    optimizer = config.optimizer
    if "muon_scale_mode" not in traits_of(optimizer).flags:
        return
    steps, kind = optimizer.muon_num_ns_steps, optimizer.muon_coefficient_type
    if (reason := newton_schulz.mismatch(kind, steps)) is not None:
        made_for = newton_schulz.made_for(kind)
        yield (
            f"--muon-coefficient-type {kind} with --muon-num-ns-steps {steps}: its list is {reason}; "
            f"--muon-num-ns-steps {made_for} takes all of it"
        )
    if config.model.use_mup and optimizer.muon_scale_mode == "spectral":
        yield (
            "--muon-scale-mode spectral makes Muon's updates larger as matrices get wider, so that the best learning "
            "rate falls despite --use-mup; --muon-scale-mode unit_rms_norm keeps it"
        )


def short_second_moment(_given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn of a second moment in bf16 that never falls: bf16 has 8 bits, so that a value just above a power of two
    stays as it is where a step takes away less than 1/256 of it."""
    optimizer = config.optimizer
    if optimizer.exp_avg_sq_dtype == "bf16" and 1 - optimizer.adam_beta2 < 2.0**-8:
        yield (
            f"--exp-avg-sq-dtype bf16 with --adam-beta2 {optimizer.adam_beta2:g}: bf16 is too coarse for what a step "
            "changes, so that the second moment may not fall again after large gradients, and stops early on its way "
            "up; --exp-avg-sq-dtype fp16 is fine enough, and so is --adam-beta2 0.95"
        )


def random_experts(_given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that a benchmark's choice of experts trains no model."""
    if config.model.moe_router_force_load_balancing:
        yield (
            "--moe-router-force-load-balancing is for benchmarks: experts are chosen at random, and no layout chooses "
            "as another does"
        )


def unread_on_cpu(given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn of flags that only GPUs read."""
    if config.layout.device == "cpu":
        for option in options():
            if option.unread_on_cpu and given.get(option.name):
                yield f"{option.flag} changes nothing here: with --device cpu {option.unread_on_cpu}"


def products_do_not_overlap(_given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that products of tensor-parallel layers wait for what they send."""
    if config.layout.tp_comm_overlap and (reason := overlapped_products.in_the_way(config)) is not None:
        yield f"--tp-comm-overlap changes nothing here: {reason}"


def experts_are_not_grouped(_given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that no products of experts are grouped (`parts/experts/compute.py`)."""
    if not config.model.moe_grouped_gemm:
        return
    if not config.training.bf16:
        reason = "grouped products are in bf16, and without --bf16 experts are multiplied one after another"
        yield f"--moe-grouped-gemm changes nothing here: {reason}"
        return
    ranks = config.layout.expert_tensor_parallel_size or 1
    widths = {layer.experts.mlp.width // ranks for layer in layers(config) if layer.experts is not None}
    shapes = [(config.model.hidden_size, width) for width in sorted(widths)]
    if not any(all(size % GROUPED_ALIGNMENT == 0 for size in shape) for shape in shapes):
        each = listed([" x ".join(map(str, shape)) for shape in shapes])
        reason = f"grouped products need multiples of {GROUPED_ALIGNMENT}, and experts of a rank have {each}"
        yield f"--moe-grouped-gemm changes nothing here: {reason}"


def no_kernel_to_choose(given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn of flags that ask for a kernel of attention where there is one."""
    backend = given.get("attention_backend", config.training.attention_backend)
    if (reason := attention_kernels.chooses_nothing(config, backend)) is not None:
        yield from (f"{flag_of(name)} changes nothing here: {reason}" for name in attention_kernels.asked_for(given))


def graphs_are_not_made(given: Given, config: Config, facts: Facts) -> Iterator[str]:
    """Warn of a run that asks for CUDA graphs and has none, or others than the flags say."""
    if given.get("cuda_graph_impl") != FULL_ITERATION:
        return  # config/parse/ineffective_flags.py knows the others
    steps = given.get("cuda_graph_warmup_steps")
    if not makes_graphs(config):
        yield graphs_warning(graph_obstacles(config, facts))
        if steps not in (None, options_by_name()["cuda_graph_warmup_steps"].default):
            yield f"--cuda-graph-warmup-steps {steps} changes nothing here: steps run without CUDA graphs"
    elif steps == 0:
        yield (
            "--cuda-graph-warmup-steps 0 is taken for 1: kernels are compiled and chosen, and connections made, in a "
            "step without a graph"
        )


def own_layers_compute(given: Given, config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that a part of the model is not Transformer Engine's."""
    asked, resolved = given.get("transformer_impl", "local"), config.model.transformer_impl
    if asked != resolved:
        yield (
            f"--transformer-impl {asked} changes nothing here: experts, FSDP's layers, documents that are kept apart "
            f"and products in FP8 are computed as with --transformer-impl {resolved}"
        )


def another_seed(_given: Given, config: Config, facts: Facts) -> Iterator[str]:
    """Warn that the run goes on with another seed than it began with."""
    seed, flags = config.training.seed, config.checkpoint
    was = seed if facts.saved is None else facts.saved.get("seed", seed)
    if was != seed and not flags.finetune:
        yield (
            f"--seed {seed}, but the checkpoint in --load {flags.load} was saved with {was}: samples still to come "
            f"are in another order, and the run is not the one that was begun; use --seed {was} to go on with that one"
        )


WARNINGS: tuple[Warning, ...] = (
    dropout_exchanges_heads,
    checkpoint_has_no_flags,
    positions_stay,
    blockwise_updates,
    muon_settings,
    short_second_moment,
    random_experts,
    unread_on_cpu,
    products_do_not_overlap,
    experts_are_not_grouped,
    no_kernel_to_choose,
    *brought("warnings"),
    graphs_are_not_made,
    own_layers_compute,
    another_seed,
)


def warnings_of(given: Given, config: Config, facts: Facts) -> list[str]:
    """Return all warnings of the configuration, in the order of their functions."""
    return [text for warning in WARNINGS for text in warning(given, config, facts)]
