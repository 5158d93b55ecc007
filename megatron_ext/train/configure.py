"""Makes a checked configuration from the command line. This needs no torch: `--dry-run` and `--help` come through here
too."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_ext import environment
from megatron_ext.checkpoint.native.checkpoint_folder import load_problem
from megatron_ext.checkpoint.native.extra_files import kept_tokenizer
from megatron_ext.checkpoint.native.resume import Resume, Search, look
from megatron_ext.config.derived import attention_flags as attention_kernels
from megatron_ext.config.derived import newton_schulz, overlapped_products
from megatron_ext.config.derived.batch_size import samples_at_iteration, training_steps
from megatron_ext.config.derived.cuda_graphs import FULL_ITERATION, graphs_warning, makes_graphs
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.parse.blend import missing_paths
from megatron_ext.config.parse.command_line import read
from megatron_ext.config.parse.options import flag_of, names_by_resume, options, options_by_name
from megatron_ext.config.parse.paths import path_problems
from megatron_ext.config.parse.saved import adopt, shapes_and_function
from megatron_ext.config.parse.stages import Stage, at_iteration, largest, read_stages
from megatron_ext.config.resolve import Facts, graph_obstacles, resolve
from megatron_ext.config.schema import Config
from megatron_ext.config.schema.data_flags import DataConfig
from megatron_ext.data.skipped import skipped_samples
from megatron_ext.device.graph_support import uncapturing_torch
from megatron_ext.device.hardware_queues import shows_gpu
from megatron_ext.errors import ConfigurationError, DataError, listed
from megatron_ext.optim.curves import (
    LearningRateCurve,
    WeightDecayCurve,
    goes_on,
    learning_rate,
    run_samples,
    weight_decay,
)
from megatron_ext.parts.experts.describe import GROUPED_ALIGNMENT
from megatron_ext.parts.stack import layers
from megatron_ext.registry import brought
from megatron_ext.rules.validate import problems
from megatron_ext.tokenizer.from_flags import tokenizer_from_flags
from megatron_ext.train.dry_run_assumptions import assumed_facts

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
            *(problems(config, of_stage) or _other_curves(config, of_stage, max(begun, stage.first))),
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
        *typed.as_typed(warnings_of_flags(typed, config, facts)),
        *_other_seed(config, facts),
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


def warnings_of_flags(typed: Typed, config: Config, facts: Facts) -> list[str]:
    """Return a warning for each flag that, together with the other flags, has no effect or has a side effect."""
    warnings = []
    layout = config.layout
    if layout.context_parallel_size > 1 and "cp_comm_type" not in typed.values and layout.cp_comm_type == ("a2a",):
        warnings.append(
            f"--attention-dropout {config.model.attention_dropout:g} with context parallelism: ranks exchange heads "
            "(--cp-comm-type a2a), for the blocks of a ring have no dropout; --attention-dropout 0 keeps the ring"
        )
    if config.checkpoint.use_checkpoint_args and facts.saved is None:
        warnings.append(
            f"--use-checkpoint-args changes nothing here: --load {config.checkpoint.load} holds no flags of a "
            "checkpoint, and the model is that of the command line"
        )
    if config.model.no_position_embedding:
        warnings.append(
            "--no-position-embedding changes nothing with --position-embedding-type rope: the rotary positions stay, "
            "and there is no learned table in any case"
        )
    divide = max(layout.tensor_model_parallel_size, layout.expert_tensor_size) > 1
    optimizer = config.optimizer
    if divide and optimizer.muon_tp_mode == "blockwise":
        warnings.append(
            "--muon-tp-mode blockwise updates the part of a matrix that a rank has as a matrix of its own: the curve "
            "is another than on one rank; --muon-tp-mode duplicated keeps it"
        )
    by_muon = "muon_scale_mode" in traits_of(optimizer).flags
    steps, kind = optimizer.muon_num_ns_steps, optimizer.muon_coefficient_type
    if by_muon and (reason := newton_schulz.mismatch(kind, steps)) is not None:
        made_for = newton_schulz.made_for(kind)
        warnings.append(
            f"--muon-coefficient-type {kind} with --muon-num-ns-steps {steps}: its list is {reason}; "
            f"--muon-num-ns-steps {made_for} takes all of it"
        )
    if config.model.use_mup and by_muon and optimizer.muon_scale_mode == "spectral":
        warnings.append(
            "--muon-scale-mode spectral makes Muon's updates larger as matrices get wider, so that the best learning "
            "rate falls despite --use-mup; --muon-scale-mode unit_rms_norm keeps it"
        )
    if config.model.moe_router_force_load_balancing:
        warnings.append(
            "--moe-router-force-load-balancing is for benchmarks: experts are chosen at random, and no layout chooses "
            "as another does"
        )
    if config.layout.device == "cpu":
        warnings += [
            f"{option.flag} changes nothing here: with --device cpu {option.unread_on_cpu}"
            for option in options()
            if option.unread_on_cpu and typed.values.get(option.name)
        ]
    if config.layout.tp_comm_overlap and (reason := overlapped_products.in_the_way(config)) is not None:
        warnings.append(f"--tp-comm-overlap changes nothing here: {reason}")
    if config.model.moe_grouped_gemm and (reason := _not_grouped(config)) is not None:
        warnings.append(f"--moe-grouped-gemm changes nothing here: {reason}")
    backend = typed.values.get("attention_backend", config.training.attention_backend)
    reason = attention_kernels.chooses_nothing(config, backend)
    if reason is not None:
        warnings += [
            f"{flag_of(name)} changes nothing here: {reason}" for name in attention_kernels.asked_for(typed.values)
        ]
    warnings += (text for warnings_of in brought("warnings") for text in warnings_of(typed.values, config, facts))
    warnings += _without_graphs(typed, config, facts)
    asked, resolved = typed.values.get("transformer_impl", "local"), config.model.transformer_impl
    if asked != resolved:
        warnings.append(
            f"--transformer-impl {asked} changes nothing here: experts, FSDP's layers, documents that are kept apart "
            f"and products in FP8 are computed as with --transformer-impl {resolved}"
        )
    return warnings


def _not_grouped(config: Config) -> str | None:
    """Return why no products of experts are grouped (`parts/experts/compute.py`); None where some are."""
    if not config.training.bf16:
        return "grouped products are in bf16, and without --bf16 experts are multiplied one after another"
    ranks = config.layout.expert_tensor_parallel_size or 1
    widths = {layer.experts.mlp.width // ranks for layer in layers(config) if layer.experts is not None}
    shapes = [(config.model.hidden_size, width) for width in sorted(widths)]
    if any(all(size % GROUPED_ALIGNMENT == 0 for size in shape) for shape in shapes):
        return None
    each = listed([" x ".join(map(str, shape)) for shape in shapes])
    return f"grouped products need multiples of {GROUPED_ALIGNMENT}, and experts of a rank have {each}"


def _without_graphs(typed: Typed, config: Config, facts: Facts) -> Iterator[str]:
    """Yield warnings of a run that asks for CUDA graphs and has none, or others than the flags say."""
    if typed.values.get("cuda_graph_impl") != FULL_ITERATION:
        return  # config/parse/ineffective_flags.py knows the others
    steps = typed.values.get("cuda_graph_warmup_steps")
    if not makes_graphs(config):
        yield graphs_warning(graph_obstacles(config, facts))
        if steps not in (None, options_by_name()["cuda_graph_warmup_steps"].default):
            yield f"--cuda-graph-warmup-steps {steps} changes nothing here: steps run without CUDA graphs"
    elif steps == 0:
        yield (
            "--cuda-graph-warmup-steps 0 is taken for 1: kernels are compiled and chosen, and connections made, in a "
            "step without a graph"
        )


def _other_seed(config: Config, facts: Facts) -> list[str]:
    """Return a warning where the run goes on with another seed than it began with."""
    seed, flags = config.training.seed, config.checkpoint
    was = seed if facts.saved is None else facts.saved.get("seed", seed)
    if was == seed or flags.finetune:
        return []
    return [
        f"--seed {seed}, but the checkpoint in --load {flags.load} was saved with {was}: samples still to come "
        f"are in another order, and the run is not the one that was begun; use --seed {was} to go on with that one"
    ]


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


def _other_curves(config: Config, facts: Facts, iteration: int = 0) -> list[str]:
    """Return the reasons why the run would go on with other learning-rate or weight-decay curves than it began with;
    empty where it does not, or is meant to.

    Args:
        iteration: after which it goes on. A step that the loss scale skips counts here, and not for the curves.
    """
    flags, saved = config.checkpoint, facts.saved
    chosen = flags.override_opt_param_scheduler or flags.use_checkpoint_opt_param_scheduler
    if saved is None or flags.finetune or flags.no_load_optim or chosen:
        return []
    if not {"lr", "global_batch_size"} <= saved.keys() or not {"train_iters", "train_samples"} & saved.keys():
        return []  # not the configuration of a run
    before = resolve(saved, Facts(world_size=config.layout.world_size))
    different = _differences_of_curves(config, before, samples_at_iteration(before, iteration))
    different += [
        f"{flag_of(name)} {_listed(now)} instead of {_listed(was)}"
        for name in ("lr_group", "weight_decay_group")
        if (now := getattr(config.optimizer, name)) != (was := getattr(before.optimizer, name))
    ]
    if not different:
        return []
    return [
        f"the curves of learning rate and weight decay are not those of the checkpoint in --load {flags.load}: "
        f"{', '.join(different)}; add --override-opt-param-scheduler to follow the flags, or "
        f"--use-checkpoint-opt-param-scheduler to follow the checkpoint"
    ]


def _differences_of_curves(config: Config, before: Config, position: int) -> list[str]:
    """Return how the curves that make the values of the steps from `position` on (in samples) other than `before`.

    A curve whose length is the run's says nothing of steps after the run's last one. That step is always compared: a
    rate that has decayed does not rise again unnoticed.
    """
    ended, end = run_samples(before), run_samples(config)
    first = min(position, max(ended - before.training.global_batch_size, 0))
    own = before.optimizer.lr_decay_iters or before.optimizer.lr_decay_samples
    end_of_rates = end if own else min(end, ended)
    different = []
    now, then = LearningRateCurve.from_config(config), LearningRateCurve.from_config(before)
    if not goes_on(now, then, learning_rate, first, end_of_rates):
        names = {"peak": "--lr", "lowest": "--min-lr", "decay": "decay in samples", "warmup": "warmup in samples"}
        pairs = {name: (value, vars(then)[name]) for name, value in vars(now).items()}
        different += [
            f"{names.get(name, name)} {new} instead of {old}" for name, (new, old) in pairs.items() if new != old
        ]
    own_now, own_then = LearningRateCurve.decoupled(config), LearningRateCurve.decoupled(before)
    if own_now != own_then and (
        own_now is None or own_then is None or not goes_on(own_now, own_then, learning_rate, first, end_of_rates)
    ):
        different += [
            f"{flag_of(name)} {getattr(config.optimizer, name)} instead of {getattr(before.optimizer, name)}"
            for name in ("decoupled_lr", "decoupled_min_lr")
            if getattr(config.optimizer, name) != getattr(before.optimizer, name)
        ]
    decay, was = WeightDecayCurve.from_config(config), WeightDecayCurve.from_config(before)
    if not goes_on(decay, was, weight_decay, first, min(end, ended)):
        different.append(
            f"weight decay {decay.start} to {decay.end} in {decay.length} samples instead of {was.start} "
            f"to {was.end} in {was.length}"
        )
    return different


def _listed(groups: Sequence[str] | None) -> str:
    return " ".join(groups or ("none",))


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
