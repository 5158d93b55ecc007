"""Rules about data, checkpoints, logs, and single values."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.derived.optimizer_traits import AVERAGE
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.parse.blend import DATA_PATH_NAMES, LIST_NAMES, read_blend
from megatron_ext.config.parse.options import Option, counted, flag_of, names_by_resume, options, options_by_name
from megatron_ext.config.parse.saved import model_names
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.registry import brought
from megatron_ext.rules.reads import reads


def nothing_needed_is_missing(config: Config, facts: Facts) -> Iterator[str]:
    """Require the values that no run can do without."""
    missing = [option for option in _of("required") if _value(config, option) is None]
    missing = [option for option in missing if option.name not in facts.unread]
    if missing:
        flags = ", ".join(option.flag for option in missing)
        example = " ".join(f"{option.flag} {option.required}" for option in missing)
        yield f"missing: {flags}; for example {example}"


def values_are_in_range(config: Config, facts: Facts) -> Iterator[str]:
    """Require that each value is within its field's bounds."""
    for option in _of("at_least", "at_most", "positive", "share"):
        value = _value(config, option)
        for one in value if isinstance(value, tuple) else () if value is None else (value,):
            yield from _out_of_range(option, one)


def _out_of_range(option: Option, value: Any) -> Iterator[str]:
    least = option.at_least
    if least is not None and value < least:
        shown = f"{value:g}" if isinstance(value, float) else value
        yield f"{option.flag} {shown} is below {least}; use {least} or more"
    if option.at_most is not None and option.type is float and value > option.at_most:
        yield f"{option.flag} {value:g} is above {option.at_most}; use {option.at_most} or less"
    if option.positive and value <= 0:
        example = option.default if isinstance(option.default, float) and option.default > 0 else option.required or 1
        yield f"{option.flag} {value:g} is not above 0; use {example}, or another positive number"
    if option.share and not 0 <= value < 1:
        yield f"{option.flag} {value:g} is not at least 0 and below 1; use {option.default:g}"


def values_have_what_they_need(config: Config, facts: Facts) -> Iterator[str]:
    """Require the values of other fields that a value needs, as its field declares them
    (`config.schema.option.Need`)."""
    asked = [(option, _value(config, option)) for option in _of("needs")]
    needed = [(option, value, need) for option, value in asked for one, need in option.needs if one == value]
    seen = counted(vars(config.model)) if needed else {}
    for option, value, need in needed:
        other = options_by_name()[need.field]
        actual = seen.get(need.field, _value(config, other))
        setting = option.typed(value)
        if actual != need.value and (other.is_switch or need.value is None):
            yield f"{setting} needs {need.words}; {'add' if need.value else 'leave out'} {other.flag}"
        elif actual != need.value:
            yield f"{setting} needs {need.words}, but {other.flag} is {actual}; use {other.flag} {need.value}"


def there_is_one_source_of_data(config: Config, facts: Facts) -> Iterator[str]:
    """Require exactly one source of data."""
    data = config.data
    if lists := [name for name in LIST_NAMES if getattr(data, name)]:
        # A missing file, which `named_files_exist` reports, or which --dry-run assumes.
        if data.mock_data:
            yield f"--mock-data and {flag_of(lists[0])} exclude each other; keep one of them"
        return
    sources = [name for name in DATA_PATH_NAMES if getattr(data, name)]
    own_splits = [name for name in sources if name != "data_path"]
    if not data.mock_data and not sources:
        yield "no data: give --data-path, or --train-data-path and --valid-data-path, or --mock-data"
    elif data.mock_data and sources:
        yield f"--mock-data and {flag_of(sources[0])} exclude each other; keep one of them"
    elif data.data_path and own_splits:
        yield (
            f"--data-path, which --split divides, and {flag_of(own_splits[0])} exclude each other; use --data-path "
            "alone, or --train-data-path with --valid-data-path instead of --data-path"
        )
    elif own_splits and not data.train_data_path:
        yield f"{flag_of(own_splits[0])} without training data; add --train-data-path"


def blends_are_well_formed(config: Config, facts: Facts) -> Iterator[str]:
    """Require that each blend can be read."""
    for name in DATA_PATH_NAMES:
        try:
            read_blend(getattr(config.data, name) or ())
        except ValueError as error:
            yield f"{flag_of(name)}: {error}"


def validation_sets_are_named_once_each(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a validation source that is named twice."""
    names = config.training.validation_set_names
    if names is None:
        return
    flag = f"--validation-set-names {' '.join(names)}"
    if not config.training.multiple_validation_sets:
        yield f"{flag} without --multiple-validation-sets; add that switch, or leave the names out"
        return
    try:
        sets = len(read_blend(config.data.valid_data_path or config.data.data_path or ()).prefixes)
    except ValueError:
        return
    if len(set(names)) != len(names) or len(names) != sets:
        must = f"must be {sets} different names, one for each validation source"
        yield f"{flag} {must}; name them so, or leave the names out"


def named_files_exist(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the files which the flags name exist."""
    for named in facts.missing_paths:
        flag, _, path = named.partition(" ")
        hint = "check the path"
        if flag.endswith("data-path"):
            hint = "give the prefix without .bin or .idx, of files that megatron-ext preprocess wrote"
        elif flag == "--sample-prompts":
            hint = "it takes a file with a prompt on each line: check the path, or write the prompts into one"
        yield f"{flag}: {path} does not exist; {hint}"


def samples_to_skip_can_be_read(config: Config, facts: Facts) -> Iterator[str]:
    """Require that --skip-samples names samples."""
    if facts.skip_samples_error is not None:
        yield (
            f"--skip-samples: {facts.skip_samples_error}; give numbers, ranges as 4096-4159, or files of them, as "
            "SAVE/spike-31/samples.jsonl"
        )


def split_is_shares(config: Config, facts: Facts) -> Iterator[str]:
    """Require that --split is made of shares."""
    split = config.data.split
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < float("inf") for share in shares) or not shares[0]:
        yield f"--split {split} is not up to three shares (training, validation, test); use --split 969,30,1"


def tokenizer_is_given(config: Config, facts: Facts) -> Iterator[str]:
    """Require a tokenizer, which can be read."""
    data = config.data
    if facts.tokenizer_error is not None:
        yield facts.tokenizer_error
    elif data.tokenizer_type is None:
        has_files = any(getattr(data, name) for name in (*DATA_PATH_NAMES, *LIST_NAMES))
        if not (data.mock_data and data.vocab_size is not None):
            yield (
                "the vocabulary is unknown: give --tokenizer-type (and --tokenizer-model)"
                + (", or --vocab-size together with --mock-data" if data.mock_data or not has_files else "")
            )
    elif data.tokenizer_type == "NullTokenizer":
        if data.vocab_size is None:
            yield "--tokenizer-type NullTokenizer needs --vocab-size; for example --vocab-size 50257"
    elif data.tokenizer_type not in ("ByteTokenizer", "GPT2BPETokenizer") and data.tokenizer_model is None:
        yield f"--tokenizer-type {data.tokenizer_type} needs its files; add --tokenizer-model, their file or folder"


def rates_of_rearranged_documents_are_shares(config: Config, facts: Facts) -> Iterator[str]:
    """Require rates of --fim-data from 0 to 1."""
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        rate = getattr(config.data, name)
        if rate is not None and not 0 <= rate <= 1:
            yield f"{flag_of(name)} {rate:g} is no share, which is from 0 to 1; use {flag_of(name)} 0.5"


def vocabulary_covers_the_tokenizer(config: Config, facts: Facts) -> Iterator[str]:
    """Require a vocabulary that holds every id of the tokenizer."""
    size, known = config.data.vocab_size, facts.vocab_size
    if size is not None and known is not None and size < known:
        yield (
            f"--vocab-size {size} is below the tokenizer's {known} entries; use --vocab-size {known}, or leave it out"
        )


def saving_has_a_folder(config: Config, facts: Facts) -> Iterator[str]:
    """Require --save for the flags that save."""
    checkpoint = config.checkpoint
    if checkpoint.keep_last_checkpoints is not None and checkpoint.save is None:
        yield f"--keep-last-checkpoints {checkpoint.keep_last_checkpoints} needs a folder; add --save checkpoints"
    retain, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if retain and interval and retain > 0 and interval > 0 and retain % interval:
        yield (
            f"--save-retain-interval {retain} is not a multiple of --save-interval {interval}, so that most of its "
            f"steps are never saved; use --save-retain-interval {-(-retain // interval) * interval}"
        )
    if checkpoint.ckpt_step is not None and checkpoint.load is None:
        yield f"--ckpt-step {checkpoint.ckpt_step} needs --load, the folder to load from; add it, or leave the step out"
    if checkpoint.exit_on_missing_checkpoint and checkpoint.load is None:
        yield "--exit-on-missing-checkpoint needs --load, the folder to resume from; add it, or leave the switch out"
    if facts.missing_checkpoint is not None:
        yield (
            f"--load {checkpoint.load}: {facts.missing_checkpoint}; name a folder that holds a checkpoint, or leave "
            "--exit-on-missing-checkpoint out to start afresh where there is none"
        )


def stages_go_on_from_what_is_saved(config: Config, facts: Facts) -> Iterator[str]:
    """Require whole checkpoints, from which each stage of --stages continues."""
    flags, training = config.checkpoint, config.training
    if training.stages is None:
        return
    if flags.save is None:
        yield (
            f"--stages {training.stages} needs --save, since each stage goes on from a checkpoint; add --save "
            "checkpoints"
        )
    for name in ("no_save_optim", "no_save_rng"):
        if getattr(flags, name):
            flag = flag_of(name)
            yield f"--stages {training.stages} with {flag}: no stage could go on from another; leave {flag} out"
    if training.step_batch_size_schedule is not None:
        yield (
            f"--stages {training.stages} with --step-batch-size-schedule, whose thresholds in tokens move with the "
            "sequence length; leave --step-batch-size-schedule out (--rampup-batch-size counts samples)"
        )
    if not facts.global_batch_is_given:
        yield (
            f"--stages {training.stages} needs --global-batch-size, which would otherwise follow --micro-batch-size; "
            f"add --global-batch-size {training.global_batch_size}"
        )


def elastic_runs_go_on(config: Config, facts: Facts) -> Iterator[str]:
    """Require for --elastic the folder and the global batch with which each world size continues."""
    if not config.layout.elastic:
        return
    flags = config.checkpoint
    if flags.save is None or flags.load != flags.save:
        folder = flags.save or flags.load or "checkpoints"
        yield (
            "--elastic needs one folder to save to and to go on from, since each number of ranks is a new start; add "
            f"--save {folder} --load {folder}"
        )
    if not facts.global_batch_is_given:
        yield (
            "--elastic needs --global-batch-size, which would otherwise change with the number of ranks; add "
            f"--global-batch-size {config.training.global_batch_size}"
        )


def load_names_checkpoints(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a --load that cannot be what the user means."""
    if facts.load_problem is not None:
        yield facts.load_problem


def model_is_that_of_the_checkpoint(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the model's flags agree with the checkpoint to load."""
    if facts.saved is None:
        return
    model = vars(config.model) | {"vocab_size": config.data.vocab_size}
    # Weights that only experts have are new where experts come from an MLP.
    new = "moe_" if config.checkpoint.moe_use_upcycling and facts.saved.get("num_experts") is None else None
    for name in model_names(facts.saved, finetune=config.checkpoint.finetune):
        was = facts.saved.get(name, options_by_name()[name].default)
        if model[name] == was or (new is not None and name.startswith(new)):
            continue
        flag = flag_of(name)
        if isinstance(was, bool):
            now, fix = ("not given", f"add {flag}") if was else ("given", f"leave {flag} out")
            yield f"{flag} is {now}, but the checkpoint in --load was saved {'with' if was else 'without'} it; {fix}"
        elif was is not None:
            yield f"{flag} {model[name]}, but the checkpoint in --load was saved with {was}; use {flag} {was}"
        elif name in names_by_resume("function"):  # a shape that was left out is derived, and the weights tell it
            yield f"{flag} {model[name]}, but the checkpoint in --load was saved without it; leave {flag} out"
    yield from _assignment_is_that_of_the_checkpoint(config, facts.saved)


def _assignment_is_that_of_the_checkpoint(config: Config, saved: Mapping[str, Any]) -> Iterator[str]:
    """Require Sinkhorn's assignment where the checkpoint has it, and not elsewhere: it weighs experts otherwise. The
    auxiliary losses may change."""
    was = (saved.get("moe_router_load_balancing_type") or ("aux_loss",))[0]
    now = config.model.load_balancing[0]
    if config.checkpoint.finetune or (was == "sinkhorn") == (now == "sinkhorn"):
        return
    flag = "--moe-router-load-balancing-type"
    yield f"{flag} {now}, but the checkpoint in --load was saved with {was}; use {flag} {was}"


def moments_are_kept_as_in_the_checkpoint(config: Config, facts: Facts) -> Iterator[str]:
    """Require moments in fp16 where the checkpoint has them, and not elsewhere: they are kept as roots. The other types
    may change."""
    checkpoint = config.checkpoint
    if facts.saved is None or checkpoint.finetune or checkpoint.no_load_optim:
        return
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        was, now = facts.saved.get(name, "fp32"), getattr(config.optimizer, name)
        if was != now and "fp16" in (was, now):
            flag = flag_of(name)
            yield (
                f"{flag} {now}, but the checkpoint in --load was saved with {was}, and fp16 holds the root of a "
                f"moment; use {flag} {was}, or add --no-load-optim to begin Adam's moments anew"
            )


def states_are_in_the_checkpoint(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the checkpoint was saved with each state that the optimizer keeps. Averages of the weights can begin
    later, as these."""
    checkpoint, settings = config.checkpoint, config.optimizer
    saved = facts.saved
    if saved is None or checkpoint.finetune or checkpoint.no_load_optim or saved.get("optimizer") != settings.optimizer:
        return
    for state in (state for traits in traits_of(settings).each for state in traits.kept(settings)):
        name = state.unless_zero
        if name is None or state.name == AVERAGE or saved.get(name, options_by_name()[name].default):
            continue
        flag = flag_of(name)
        yield (
            f"{flag} {getattr(settings, name):g}, but the checkpoint in --load was saved with 0, without the state "
            f"that it needs; use {flag} 0, or add --no-load-optim to begin the optimizer's state anew"
        )


def checkpoint_options_have_a_checkpoint(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse options about a checkpoint to load without --load. Where the folder is still empty, the first start of a
    script that goes on from it, flags may describe the model."""
    checkpoint = config.checkpoint
    if checkpoint.use_checkpoint_args and checkpoint.load is None:
        yield (
            "--use-checkpoint-args takes the model from a checkpoint, but --load is missing; add --load, a folder that "
            "has one, or leave --use-checkpoint-args out"
        )
    elif checkpoint.use_checkpoint_args and facts.saved is None and config.model.num_layers is None:
        yield (
            f"--use-checkpoint-args takes the model from a checkpoint, but --load {checkpoint.load} holds none that is "
            "whole; give a folder that has one, or the flags of the model"
        )
    if checkpoint.override_opt_param_scheduler and checkpoint.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; keep one "
            "of them"
        )


def metrics_services_are_installed(config: Config, facts: Facts) -> Iterator[str]:
    """Require the package of each metrics service that is asked for."""
    services = {
        "wandb_project": "wandb",
        "mlflow_experiment": "mlflow",
        "comet_project": "comet_ml",
        "trackio_project": "trackio",
    }
    for name, package in services.items():
        value = getattr(config.logging, name)
        if value is not None and package not in facts.packages:
            yield (
                f"{flag_of(name)} {value}: the package {package} is not installed; pip install {package}, or leave the "
                "flag out"
            )


@reads()
def compiling_is_possible(config: Config, facts: Facts) -> Iterator[str]:
    """Require for --torch-compile a C++ compiler and flags that compiled code can run with."""
    if not config.training.torch_compile:
        return
    if facts.missing_compiler is not None:
        yield (
            f"--torch-compile needs the C++ compiler {facts.missing_compiler} ($CXX); install it, or leave the switch "
            "out"
        )
    size, model = config.layout.tensor_model_parallel_size, config.model
    if size > 1 and max(model.hidden_dropout, model.attention_dropout) > 0.0:
        yield (
            f"--torch-compile cannot keep the dropout masks of --tensor-model-parallel-size {size} apart "
            f"(--hidden-dropout {model.hidden_dropout:g}, --attention-dropout {model.attention_dropout:g}); "
            "use --hidden-dropout 0 --attention-dropout 0, or leave the switch out"
        )


@functools.cache
def _of(*marks: str) -> tuple[Option, ...]:
    """Return the options that have one of these, looked for once: a planner asks some thousand times."""
    absent = (None, False, ())  # by identity, for a bound of 0 is a bound
    return tuple(
        option
        for option in options()
        if any(all(getattr(option, mark) is not none for none in absent) for mark in marks)
    )


def _value(config: Config, option: Option) -> Any:
    return getattr(getattr(config, option.group), option.name)


def plugins_are_installed(config: Config, facts: Facts) -> Iterator[str]:
    """Require the plugin of every flag that has an effect only with a plugin."""
    for option in options():
        value = getattr(getattr(config, option.group), option.name) if option.turns_on_a_plugin else None
        if value in (None, False) or any(
            field == option.name and (values is None or value in values) for field, values in brought("switches")
        ):
            continue
        yield f"{option.typed(value)} needs a plugin that is not installed; install it, or leave the flag out"


RULES = (
    plugins_are_installed,
    nothing_needed_is_missing,
    values_are_in_range,
    values_have_what_they_need,
    there_is_one_source_of_data,
    blends_are_well_formed,
    validation_sets_are_named_once_each,
    named_files_exist,
    samples_to_skip_can_be_read,
    split_is_shares,
    tokenizer_is_given,
    rates_of_rearranged_documents_are_shares,
    vocabulary_covers_the_tokenizer,
    saving_has_a_folder,
    stages_go_on_from_what_is_saved,
    elastic_runs_go_on,
    load_names_checkpoints,
    model_is_that_of_the_checkpoint,
    moments_are_kept_as_in_the_checkpoint,
    states_are_in_the_checkpoint,
    checkpoint_options_have_a_checkpoint,
    metrics_services_are_installed,
    compiling_is_possible,
)
