"""Rules about observations in the middle of training: profiles and timings, tasks and samples of text."""

from collections.abc import Iterator

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts, runs_on_cpu
from megatron_ext.config.schema import Config

_OF_TORCH = ("pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack", "pytorch_profiler_collect_chakra")
_OF_NSIGHT = {
    "record_shapes": "use --pytorch-profiler-collect-shapes instead of --record-shapes",
    "nvtx_ranges": "leave it out",
}


def profile_has_a_range(config: Config, facts: Facts) -> Iterator[str]:
    """Require that a profile begins before it ends."""
    profiling = config.profiling
    if profiling.profile and not 0 <= profiling.profile_step_start < profiling.profile_step_end:
        start = max(profiling.profile_step_start, 0)
        yield (
            f"--profile-step-start {profiling.profile_step_start} is not below --profile-step-end "
            f"{profiling.profile_step_end}; use --profile-step-start {start} --profile-step-end {start + 2}"
        )


def profiled_ranks_exist(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the profiled ranks exist."""
    ranks, world = config.profiling.profile_ranks or (), config.layout.world_size
    wrong = [rank for rank in ranks if not 0 <= rank < world]
    if wrong and world > 0:
        yield (
            f"--profile-ranks {' '.join(map(str, ranks))}: there is no rank {wrong[0]} among {world}; "
            f"use ranks from 0 to {world - 1}"
        )


def options_are_of_the_chosen_profiler(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse options of the profiler that was not chosen."""
    profiling = config.profiling
    if not profiling.profile:
        return
    if profiling.use_pytorch_profiler:
        for name, fix in _OF_NSIGHT.items():
            if getattr(profiling, name):
                yield f"{flag_of(name)} is Nsight's, but --use-pytorch-profiler chooses torch's profiler; {fix}"
        return
    names = [flag_of(name) for name in _OF_TORCH if getattr(profiling, name)]
    if names:
        yield f"{' '.join(names)} without --use-pytorch-profiler: Nsight's profiler does not read it; add that switch"
    elif runs_on_cpu(config, facts):
        yield (
            "--profile marks steps for Nsight Systems, which traces GPUs, but the run is on CPU processes; "
            "add --use-pytorch-profiler for traces by torch"
        )


def recorded_memory_is_of_a_gpu(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a history of GPU memory without a GPU."""
    if config.profiling.record_memory_history and runs_on_cpu(config, facts):
        yield (
            "--record-memory-history records the allocator of GPU memory, but the run is on CPU processes; leave it "
            "out (--profile --use-pytorch-profiler traces a CPU)"
        )


def samples_are_made_of_prompts(config: Config, facts: Facts) -> Iterator[str]:
    """Require an interval and prompts together."""
    training = config.training
    if training.sample_interval is not None and training.sample_prompts is None:
        yield (
            f"--sample-interval {training.sample_interval} has nothing to go on from; add --sample-prompts FILE, or "
            "leave it out"
        )
    if training.sample_prompts is not None and training.sample_interval is None:
        yield f"--sample-prompts {training.sample_prompts} is never read; add --sample-interval 1000, or leave it out"


def samples_fit_the_positions(config: Config, facts: Facts) -> Iterator[str]:
    """Require that a sample leaves the prompt a position."""
    training, model = config.training, config.model
    longest = model.max_position_embeddings
    if training.sample_interval is None or model.position_embedding_type != "learned_absolute" or not longest:
        return
    if training.sample_tokens >= longest:
        tokens = training.sample_tokens
        fix = f"--sample-tokens {longest // 2}" if longest > 1 else f"--max-position-embeddings {2 * tokens}"
        yield (
            f"--sample-tokens {tokens} leaves none of the {longest} positions (--max-position-embeddings) to a prompt; "
            f"use {fix}"
        )


def tasks_can_be_done(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the list of tasks can be read, and that the layers are ones that inference goes through."""
    training = config.training
    yield from (*facts.eval_tasks_problems, *facts.missing_task_files)
    asked = [
        flag
        for flag, value in (("--eval-tasks", training.eval_tasks), ("--sample-interval", training.sample_interval))
        if value is not None
    ]
    if asked and config.model.transformer_impl != "local":
        yield (
            f"{' and '.join(asked)} cannot be used with --transformer-impl {config.model.transformer_impl}, whose "
            "layers keep no keys and values here; use --transformer-impl local"
        )
    if asked and config.data.tokenizer_type in (None, "NullTokenizer"):
        needs = "needs" if len(asked) == 1 else "need"
        yield f"{' and '.join(asked)} {needs} a tokenizer of text; use for example --tokenizer-type ByteTokenizer"


RULES = (
    profile_has_a_range,
    profiled_ranks_exist,
    options_are_of_the_chosen_profiler,
    recorded_memory_is_of_a_gpu,
    samples_are_made_of_prompts,
    samples_fit_the_positions,
    tasks_can_be_done,
)
