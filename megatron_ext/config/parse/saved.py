"""Compares the configuration that a checkpoint was saved with to the one that is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.derived import lr_scale
from megatron_ext.config.parse.options import Option, names_by_resume, options_by_name, read_yaml_value
from megatron_ext.errors import ConfigurationError


def model_names(saved: Mapping[str, Any], *, finetune: bool) -> tuple[str, ...]:
    """Return the fields in which a run must agree with the checkpoint that it loads."""
    names = names_by_resume("shape") if finetune else shapes_and_function()
    learned = saved.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    return tuple(name for name in names if learned or name != "max_position_embeddings")


def shapes_and_function() -> tuple[str, ...]:
    """Return the fields that say which model it is, those on which the weights' shapes depend first."""
    return (*names_by_resume("shape"), *names_by_resume("function"))


def read_saved(path: Path) -> dict[str, Any] | None:
    """Return the values of a checkpoint's config.yaml; None where it cannot be read, which loading will find out.

    Unknown names, such as fields of another version, are left out. A run with a growing batch that does not say how it
    counted the iterations of its curves counted them in full batches.

    Raises:
        ConfigurationError: the file is larger or deeper than any configuration.
    """
    from megatron_ext.config.parse.config_file import (  # with PyYAML, for which --dry-run does not wait
        ExcessiveFile,
        read_yaml,
    )

    try:
        content = read_yaml(str(path), "the checkpoint's")
        known = {name: options_by_name()[name] for name in content if name in options_by_name()}
        saved = {name: _read(option, content[name]) for name, option in known.items()}
    except ExcessiveFile:
        raise
    except (ConfigurationError, ValueError):
        return None
    grows = saved.get("rampup_batch_size") or saved.get("step_batch_size_schedule")
    return {"curves_in_full_batches": True, **saved} if grows and saved.get("train_iters") else saved


def _read(option: Option, value: Any) -> Any:
    # A user's own optimizer has a name that no flag takes.
    own = option.name == "optimizer" and isinstance(value, str)
    return value if own else read_yaml_value(option, value)


def adopt(values: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed values, with the checkpoint's values that --use-checkpoint-args and similar flags ask for.

    A flag of the model that was typed stays, so that a rule can name it where the checkpoint has another value.
    """
    adopted = dict(values)
    if values.get("moe_use_upcycling") and saved.get("num_experts") is None:
        adopted["finetune"] = True  # the checkpoint has only weights for experts
    if values.get("use_checkpoint_args"):
        names = model_names(saved, finetune=False)
        own = "tokenizer_type" in values or values.get("no_use_tokenizer_model_from_checkpoint_args")
        names += () if own else names_by_resume("tokenizer")
        adopted = {name: saved[name] for name in names if name in saved} | adopted
    if values.get("use_checkpoint_opt_param_scheduler"):
        curves = names_by_resume("curve")
        adopted = {name: value for name, value in adopted.items() if name not in curves}
        # The rates of a checkpoint are the scaled ones.
        adopted |= {name: saved[name] for name in curves if name in saved and name not in lr_scale.FLAGS}
        unit = "samples" if "train_samples" in saved else "iters"
        adopted.setdefault(f"lr_decay_{unit}", saved.get(f"train_{unit}"))
    return adopted
