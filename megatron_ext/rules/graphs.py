"""Rules about CUDA graphs of a step's passes: what a replay cannot repeat, or was not shown to."""

from collections.abc import Iterator

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.rules.sharding import flags_that_divide_weights

_GRAPHS = "--cuda-graph-impl full_iteration"


def _captures(config: Config) -> bool:
    return config.training.cuda_graph_impl == "full_iteration"


def captured_steps_keep_the_model_whole(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse graphs where a rank has a part of the model or of a sample, or communicates within the passes."""
    if not _captures(config):
        return
    layout = config.layout
    for flag, size in (
        ("--tensor-model-parallel-size", layout.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", layout.pipeline_model_parallel_size),
        ("--context-parallel-size", layout.context_parallel_size),
    ):
        if size > 1:
            yield (
                f"{_GRAPHS} captures the passes of ranks that have the whole model and whole samples, and not those of "
                f"{flag} {size}; use {flag} 1, or leave --cuda-graph-impl out"
            )
    if config.model.num_experts is not None:
        yield (
            f"{_GRAPHS} with --num-experts: in every layer the host reads how many tokens an expert gets, which a "
            "replay does not; leave --cuda-graph-impl out"
        )
    for flag in flags_that_divide_weights(layout):
        yield (
            f"{_GRAPHS} reads weights where they are in every step, and {flag} gathers them anew; leave one of the "
            "two out"
        )
    overlapping = " and ".join(
        flag
        for flag, on in (
            ("--overlap-grad-reduce", layout.overlap_grad_reduce),
            ("--overlap-param-gather", layout.overlap_param_gather),
        )
        if on
    )
    if overlapping:
        yield (
            f"{_GRAPHS} with {overlapping}: hooks begin these collectives and wait for them, and a replay "
            f"calls no hook; leave {overlapping} out, or --cuda-graph-impl"
        )
    if layout.num_distributed_optimizer_instances > 1:
        yield (
            f"{_GRAPHS} with --num-distributed-optimizer-instances {layout.num_distributed_optimizer_instances}: "
            "gradients are summed in another stream; leave one of the two out"
        )


def captured_steps_are_alike(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse graphs of passes that are others in every step."""
    if not _captures(config):
        return
    training, model = config.training, config.model
    dropout = " and ".join(
        f"{flag} {value:g}"
        for flag, value in (
            ("--hidden-dropout", model.hidden_dropout),
            ("--attention-dropout", model.attention_dropout),
        )
        if value > 0.0
    )
    if dropout:
        yield (
            f"{_GRAPHS} with {dropout}: replays draw from generators of their own kind, which this "
            "version does not keep; use --hidden-dropout 0 --attention-dropout 0, or leave --cuda-graph-impl out"
        )
    if training.fp16:
        yield (
            f"{_GRAPHS} with --fp16: the loss scale lies elsewhere after each change, where a replay does not look; "
            "use --bf16 instead of --fp16, or leave --cuda-graph-impl out"
        )
    if config.data.reset_attention_mask:
        yield (
            f"{_GRAPHS} with --reset-attention-mask: each microbatch has as many documents as it has, and a replay "
            "those of one step; leave one of the two out"
        )
    for flag, on in (
        ("--fp8-format", training.fp8_format is not None),
        ("--torch-compile", training.torch_compile),
        ("--transformer-impl transformer_engine", model.transformer_impl == "transformer_engine"),
        ("--optimizer-cpu-offload", config.optimizer.optimizer_cpu_offload),
        ("--spike-threshold", training.spike_threshold is not None),
    ):
        if on:
            yield f"{_GRAPHS} was never tried with {flag}; leave one of the two out"
    if training.cuda_graph_warmup_steps == 0:
        yield (
            f"{_GRAPHS} with --cuda-graph-warmup-steps 0: kernels are compiled and chosen, and connections made, in "
            "steps before; use --cuda-graph-warmup-steps 1 or more"
        )


def captured_steps_recompute_nothing(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse graphs of passes that compute activations anew."""
    training = config.training
    kind = training.recompute_granularity or ("selective" if training.recompute_activations else None)
    if _captures(config) and kind is not None:
        flag = "--recompute-activations" if training.recompute_activations else f"--recompute-granularity {kind}"
        yield (
            f"{_GRAPHS} with {flag}: what is computed anew reads the generators' states on the host; leave one of the "
            "two out"
        )


def captured_steps_are_timed_as_a_whole(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse to time or mark parts of passes that are replayed at once."""
    if not _captures(config):
        return
    logging = config.logging
    flags = " and ".join(
        flag
        for flag, on in (
            (f"--timing-log-level {logging.timing_log_level}", logging.timing_log_level > 0),
            ("--log-communication-share", logging.log_communication_share),
            ("--log-straggler", logging.log_straggler),
            ("--nvtx-ranges", config.profiling.nvtx_ranges),
        )
        if on
    )
    if flags:
        yield (
            f"{_GRAPHS} replays the passes of a step at once, and {flags} would see nothing of them; leave "
            f"{flags} out, or --cuda-graph-impl (--profile shows the kernels of a replay)"
        )


RULES = (
    captured_steps_keep_the_model_whole,
    captured_steps_are_alike,
    captured_steps_recompute_nothing,
    captured_steps_are_timed_as_a_whole,
)
