"""Finds the obstacles to `--cuda-graph-impl full_iteration`.

Graphs are a matter of speed alone: a run that cannot have them goes on without, and one warning says why.

A replay repeats kernels on the tensors of the capture, and nothing else (`train/captured_passes.py`): operations that
differ from step to step, or are decided in Python, cannot be replayed, or have not been tested. The resolved
configuration holds the answer: its `cuda_graph_impl` is "full_iteration" where passes are captured, and "none" in all
other runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_ext.config.parse.options import options
from megatron_ext.config.schema import Config

FULL_ITERATION = "full_iteration"


def makes_graphs(config: Config) -> bool:
    """Return whether the passes of a step are captured into a graph and replayed."""
    return config.training.cuda_graph_impl == FULL_ITERATION


def without_graphs(config: Config) -> Config:
    """Return the configuration of a run whose steps are not captured."""
    return replace(config, training=replace(config.training, cuda_graph_impl="none"))


def graphs_warning(in_the_way: Sequence[str]) -> str:
    """Return the warning of a run that asks for CUDA graphs and runs without them.

    Args:
        in_the_way: the obstacles, each with its reason and the change that removes it.
    """
    return (
        f"--cuda-graph-impl {FULL_ITERATION} changes nothing here: steps run without CUDA graphs, and compute the "
        f"same. In the way: {'; '.join(in_the_way)}"
    )


def obstacles(config: Config, *, on_cpu: bool, uncapturing_torch: str | None) -> list[str]:
    """Return the obstacles to a capture of steps, each with the change that removes it; empty without any.

    Args:
        config: all other flags, resolved.
        on_cpu: whether the ranks are CPU processes.
        uncapturing_torch: the installed torch's version if it cannot capture, else None.
    """
    texts = [_of_the_device(config)] if on_cpu else []
    if uncapturing_torch is not None and not on_cpu:
        texts.append(
            f"torch {uncapturing_torch} (it cannot capture a backward pass whose weights have hooks: install torch "
            "2.15)"
        )
    parts = (_of_divided_models, _of_passes_that_differ, _of_untried_flags, _of_parts_that_are_timed)
    return [*texts, *(text for part in parts for text in part(config))]


def _of_the_device(config: Config) -> str:
    if config.layout.device == "cpu":
        return "--device cpu (CPU processes have no CUDA graphs: use --device cuda)"
    return "this machine shows no NVIDIA GPU (CPU processes have no CUDA graphs: run it on GPUs)"


def _of_divided_models(config: Config) -> Iterator[str]:
    layout = config.layout
    for flag, size in (
        ("--tensor-model-parallel-size", layout.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", layout.pipeline_model_parallel_size),
        ("--context-parallel-size", layout.context_parallel_size),
    ):
        if size > 1:
            yield f"{flag} {size} (only ranks with the whole model and whole samples capture: use {flag} 1)"
    for flag in layout.flags_that_divide_weights:
        yield f"{flag} (weights are gathered anew, and a graph reads them where they were: leave it out)"
    for flag, on in (
        ("--overlap-grad-reduce", layout.overlap_grad_reduce),
        ("--overlap-param-gather", layout.overlap_param_gather),
    ):
        if on:
            yield f"{flag} (hooks begin these collectives, and a replay calls none: leave it out)"
    instances = layout.num_distributed_optimizer_instances
    if instances > 1:
        flag = "--num-distributed-optimizer-instances"
        yield f"{flag} {instances} (gradients are summed in another stream: use {flag} 1)"


def _of_passes_that_differ(config: Config) -> Iterator[str]:
    model, training = config.model, config.training
    if model.num_experts is not None:
        yield (
            f"--num-experts {model.num_experts} (the host reads in every layer how many tokens an expert gets: none "
            "but a model without experts has graphs)"
        )
    for flag, rate in (
        ("--hidden-dropout", model.hidden_dropout),
        ("--attention-dropout", model.attention_dropout),
    ):
        if rate > 0.0:
            yield f"{flag} {rate:g} (replays would need generators of their own kind: use {flag} 0)"
    for flag, on in (
        ("--qk-clip", config.optimizer.qk_clip),
        ("--log-max-attention-logit", config.logging.log_max_attention_logit),
    ):
        if on:
            yield f"{flag} (each step begins to measure anew: leave it out)"
    if model.mtp_num_layers:
        flag = f"--mtp-num-layers {model.mtp_num_layers}"
        yield f"{flag} (each global batch has a scale of its own for the losses of the depths: leave it out)"
    if training.fp16:
        yield "--fp16 (the loss scale changes, where a replay does not look: use --bf16 in its place)"
    if config.data.reset_attention_mask:
        yield "--reset-attention-mask (each microbatch has a number of documents of its own: leave it out)"
    if training.recompute_granularity is not None:
        flag = f"--recompute-granularity {training.recompute_granularity}"
        if training.recompute_activations:
            flag = "--recompute-activations"
        yield f"{flag} (the host reads the states of the generators to compute anew: leave it out)"


def _of_untried_flags(config: Config) -> Iterator[str]:
    for option in options():
        value = getattr(getattr(config, option.group), option.name) if option.untried_with_graphs else option.default
        if value != option.default:
            yield f"{option.typed(value)} (nobody has tried it with graphs: leave it out)"


def _of_parts_that_are_timed(config: Config) -> Iterator[str]:
    logging = config.logging
    for flag, on in (
        (f"--timing-log-level {logging.timing_log_level}", logging.timing_log_level > 0),
        ("--log-communication-share", logging.log_communication_share),
        ("--log-straggler", logging.log_straggler),
        ("--nvtx-ranges", config.profiling.nvtx_ranges),
    ):
        if on:
            yield f"{flag} (it looks at parts of the passes, which a replay launches at once: leave it out)"
