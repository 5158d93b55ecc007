"""Makes a checked configuration from the command line. This needs no torch: `--dry-run` and `--help` come through here
too."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_ext import environment
from megatron_ext.checkpoint.native.checkpoint_folder import load_problem
from megatron_ext.checkpoint.native.extra_files import kept_tokenizer
from megatron_ext.checkpoint.native.resume import Resume, Search, look
from megatron_ext.config.derived.batch_size import training_steps
from megatron_ext.config.derived.cuda_graphs import FULL_ITERATION
from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.parse.blend import missing_paths
from megatron_ext.config.parse.command_line import read
from megatron_ext.config.parse.options import names_by_resume
from megatron_ext.config.parse.paths import path_problems
from megatron_ext.config.parse.saved import adopt, shapes_and_function
from megatron_ext.config.parse.stages import Stage, at_iteration, largest, read_stages
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.config.schema.data_flags import DataConfig
from megatron_ext.data.skipped import skipped_samples
from megatron_ext.device.graph_support import uncapturing_torch
from megatron_ext.device.hardware_queues import shows_gpu
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.registry import brought
from megatron_ext.rules.validate import problems
from megatron_ext.rules.warnings import warnings_of
from megatron_ext.tokenizer.from_flags import tokenizer_from_flags
from megatron_ext.train.dry_run_assumptions import assumed_facts
from megatron_ext.train.resumed_curves import other_curves

_OPTIONAL_PACKAGES = ("apex", "comet_ml", "fla", "mlflow", "trackio", "transformer_engine", "wandb")


@dataclass(frozen=True)
class Configured:
    """A checked configuration, and the inputs that it was made from."""

    config: Config
    typed: Typed
    """The flags that the user typed, with the values that these take from the checkpoint."""
    command_line: Typed
    """The flags as the user typed them."""
    search: Search | None = None
    """Contents of the --load folder; None without --load."""
    resume: Resume | None = None
    """The checkpoint that `config` was made with."""
    begins_stage: bool = False
    """Whether the checkpoint is the end of the stage of --stages that is before."""
    stage_end: int | None = None
    """Iterations before the next stage; None in the last."""


def configure(argv: Sequence[str], *, believing: bool = False, world_size: int | None = None) -> Configured:
    """Parse, resolve and validate.

    Args:
        argv: the command line, without the program's name.
        believing: whether --dry-run assumes what this machine does not have (`train.dry_run_assumptions`), for example
            where only a layout is asked for.
        world_size: number of ranks; default: the world size of the launch.
    Raises:
        ConfigurationError: the flags cannot work; the message has every problem that was found.
        DataError: the configuration of the checkpoint is no file, or a link out of it.
        StorageError: this process may not look at a path that a flag names.
    """
    return configure_typed(read(argv), believing=believing, world_size=world_size)


def configure_typed(typed: Typed, *, believing: bool = False, world_size: int | None = None) -> Configured:
    """Resolve and validate parsed flags; arguments and errors as `configure`."""
    unusable = path_problems(typed.values)
    if unusable:
        raise ConfigurationError([*typed.problems, *unusable])
    try:
        search = look(typed.values)
        resume = search.resume if search is not None else None
        believing = believing and typed.dry_run
        configured = _configured(typed, search, resume, believing=believing, world_size=world_size)
    except ConfigurationError as error:
        raise ConfigurationError([*typed.problems, *error.problems]) from None
    except DataError:
        if not typed.problems:
            raise
        raise ConfigurationError(list(typed.problems)) from None
    if typed.problems:
        raise ConfigurationError(list(typed.problems))
    return configured


def configure_for(configured: Configured, resume: Resume | None) -> Configured:
    """Resolve and validate once more, where another checkpoint will be loaded than the configuration was made with.

    Args:
        configured: result of `configure`.
        resume: the checkpoint that all ranks have agreed on; None where nothing will be loaded.
    Raises:
        ConfigurationError: the flags do not fit that checkpoint.
    """
    if configured.resume is None if resume is None else resume.gives_the_flags_of(configured.resume):
        return replace(configured, resume=resume)
    return _configured(configured.command_line, configured.search, resume)


def _configured(
    command_line: Typed,
    search: Search | None,
    resume: Resume | None,
    *,
    believing: bool = False,
    world_size: int | None = None,
) -> Configured:
    saved = _saved_values(resume)
    typed = command_line if saved is None else replace(command_line, values=adopt(command_line.values, saved))
    begun = 0 if resume is None or typed.values.get("finetune") else resume.iteration
    stages = at_iteration(read_stages(typed.values), begun)
    facts = gather_facts(typed, search)
    facts = replace(facts, unread=facts.unread | _not_given_by_the_checkpoint(typed, saved))
    if world_size is not None:
        facts = replace(facts, world_size=world_size)
    if believing:
        facts, warnings = assumed_facts(facts, typed)
        typed = replace(typed, warnings=(*typed.warnings, *warnings))
    refusals: dict[str, None] = {}
    made: list[tuple[Stage, dict[str, Any], Facts, Config]] = []
    for stage in stages:
        values = stage.of(typed.values)
        # Where a stage begins, the checkpoint is from the stage before.
        was = saved if saved is None or stage.first < begun else stage.of(saved)
        missing = missing_paths(values) if stage.values and not believing else facts.missing_paths
        of_stage = replace(facts, saved=was, missing_paths=missing)
        config = resolve(values, of_stage)
        found = [
            *path_problems(stage.values),
            *(problems(config, of_stage) or other_curves(config, of_stage, max(begun, stage.first))),
        ]
        refusals |= dict.fromkeys(stage.named + text for text in typed.as_typed(found))
        made.append((stage, values, of_stage, config))
    if refusals:
        raise ConfigurationError(list(refusals))
    chosen = stages.index(largest(stages, typed.values)) if typed.dry_run else 0
    stage, values, facts, config = made[chosen]
    steps = training_steps(config) if stages[1:] else 0
    notes = [f"{one.named}the run ends before, after {steps} iterations" for one in stages[1:] if one.first >= steps]
    if typed.dry_run and stage.path is not None:
        notes.append(f"{stage.named}this stage, the largest, is what is judged")
    typed = replace(typed, values=values, warnings=(*typed.warnings, *notes))
    ends = [one.first for one in stages[chosen + 1 :] if one.first < steps]
    warnings = (
        *typed.warnings,
        *typed.as_typed(warnings_of(typed.values, config, facts)),
        *_forgetful_restarts(config),
    )
    typed = replace(typed, warnings=warnings)
    begins = stage.path is not None and resume is not None and resume.iteration == stage.first
    return Configured(config, typed, command_line, search, resume, begins, ends[0] if ends else None)


_NOT_AGAIN = ("finetune", "no_load_optim", "no_load_rng", "ckpt_step", "moe_use_upcycling")
"""Flags about loading that hold at the start of a run, and not at the start of its later stages."""


def next_stage(configured: Configured) -> Configured:
    """Return the configuration of the stage that follows, which resumes from the checkpoint that this one has saved.

    Raises:
        ConfigurationError: the flags do not fit that checkpoint.
    """
    values = {name: value for name, value in configured.command_line.values.items() if name not in _NOT_AGAIN}
    values["load"] = configured.config.checkpoint.save
    search = look(values)
    resume = None if search is None else search.resume
    return _configured(replace(configured.command_line, values=values), search, resume)


def _forgetful_restarts(config: Config) -> list[str]:
    """Return a warning where torchrun's restarts do not resume from the run's own checkpoints."""
    save, load, left = config.checkpoint.save, config.checkpoint.load, environment.attempts_left()
    if not left or save is None or (load is not None and os.path.realpath(load) == os.path.realpath(save)):
        return []
    begins, remedy = (
        ("afresh", f"add --load {save}, which may be empty at first")
        if load is None
        else (f"with --load {load} again", f"copy that checkpoint into {save} and use --load {save}")
    )
    return [
        f"torchrun may start the ranks {left} times more, and each restart begins {begins}, not with what "
        f"--save {save} holds by then; {remedy}"
    ]


def _saved_values(resume: Resume | None) -> Mapping[str, Any] | None:
    """Return the configuration of the checkpoint, its copy of the tokenizer in place of files that are gone."""
    if resume is None or resume.saved is None:
        return None
    saved = resume.saved
    gone = {
        field: path
        for field, path in kept_tokenizer(saved, resume.path).items()
        if not Path(saved.get(field) or "").exists()
    }
    return {**saved, **gone}


def _missing_checkpoint(values: Mapping[str, Any], search: Search | None) -> str | None:
    """Return why --load has nothing to load, by the same conditions as loading itself, where that may not be."""
    if search is None or not values.get("exit_on_missing_checkpoint"):
        return None
    if search.candidates or load_problem(search.folder, values.get("ckpt_step")):
        return None
    if isinstance(search.error, OSError):
        return search.error.strerror
    return "it holds no checkpoint" if search.error is None else str(search.error).rstrip(".")


def gather_facts(typed: Typed, search: Search | None = None) -> Facts:
    """Read the facts outside of the flags that the configuration depends on: ranks, the machine, files, the vocabulary.

    Args:
        typed: the flags that the user typed.
        search: contents of its --load folder; default: unknown.
    """
    found = {name: value for facts_of in brought("facts") for name, value in facts_of(typed.values).items()}
    # NullTokenizer has as many ids as are asked for: the number of the model, if it has a size.
    model = found.get("huggingface", {})
    sizes = {"vocab_size": model["vocab_size"]} if "vocab_size" in model else {}
    vocab_size, tokenizer_error = _vocabulary({**sizes, **typed.values})
    dry_run_decides = typed.dry_run and typed.values.get("world_size") is not None
    return Facts(
        global_batch_is_given=typed.values.get("global_batch_size") is not None,
        world_size=None if dry_run_decides else environment.world_size(),
        cuda_available=shows_gpu(),
        packages=frozenset(name for name in _OPTIONAL_PACKAGES if importlib.util.find_spec(name)),
        missing_compiler=_missing_compiler(),
        uncapturing_torch=uncapturing_torch() if typed.values.get("cuda_graph_impl") == FULL_ITERATION else None,
        vocab_size=vocab_size,
        tokenizer_error=tokenizer_error,
        missing_paths=missing_paths(typed.values),
        missing_checkpoint=_missing_checkpoint(typed.values, search),
        load_problem=load_problem(load, typed.values.get("ckpt_step")) if (load := typed.values.get("load")) else None,
        skip_samples_error=_unreadable_samples(typed.values.get("skip_samples")),
        unread=typed.unread | (_of_the_model(typed) if "huggingface_problems" in found else frozenset()),
        **found,
    )


def _of_the_model(typed: Typed) -> frozenset[str]:
    """Return the fields of the model that nobody typed, and that a file was to give."""
    return frozenset(name for name in shapes_and_function() if name not in typed.values)


def _not_given_by_the_checkpoint(typed: Typed, saved: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the fields that --use-checkpoint-args was to give, where there is no checkpoint that could."""
    if saved is not None or not typed.values.get("use_checkpoint_args") or "num_layers" in typed.values:
        return frozenset()
    return _of_the_model(typed) | frozenset(name for name in names_by_resume("tokenizer") if name not in typed.values)


def _unreadable_samples(words: Sequence[str] | None) -> str | None:
    try:
        skipped_samples(words or ())
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


def _missing_compiler() -> str | None:
    """Return the C++ compiler that torch's compiler would call, if it is not installed; None if it is."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return compiler if shutil.which(compiler) is None else None


def _vocabulary(values: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return the size of the vocabulary of the tokenizer that the flags name, and why it could not be read."""
    if values.get("tokenizer_type") is None:
        return None, None
    flags = DataConfig(**{field.name: values[field.name] for field in fields(DataConfig) if field.name in values})
    try:
        return tokenizer_from_flags(flags).vocab_size, None
    except ConfigurationError as error:
        return None, str(error)
