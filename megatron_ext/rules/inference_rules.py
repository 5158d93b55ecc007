"""Rules about what is asked of the model in the middle of training: tasks and samples of text."""

from collections.abc import Iterator

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config


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


RULES = (samples_are_made_of_prompts, samples_fit_the_positions, tasks_can_be_done)
