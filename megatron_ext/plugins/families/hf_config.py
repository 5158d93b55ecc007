"""Reads what a Hugging Face `config.json` says as values of our flags, and writes it back. The file is data: nothing
that it names is run.

Code peculiar to a family stands in its file in `families/`. A value that our model cannot have (another kind of rope
scaling) and a key that nobody knows are refused by name: a model that trains as something slightly else is worse than
none.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.derived import layer_patterns
from megatron_ext.config.parse.options import check_size, flag_of, options_by_name
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import WITHOUT_BEARING, Reading
from megatron_ext.plugins.families.refused import REFUSED
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.families.training_numbers import (
    DROPOUTS,
    TRAINING_FLAGS,
    dropout_json,
    one_number_for_two,
    training_values,
)
from megatron_ext.untrusted.text import load_json, read_file

_LARGEST = 1 << 24  # bytes; one has some 1,000


def read_hf_config(folder: str | Path) -> tuple[Family, dict[str, Any]]:
    """Return the family of the model in `folder`, and the values of our flags by field name.

    Raises:
        ConfigurationError: there is no readable `config.json`, or our model cannot compute the model that it describes;
            with every problem.
    """
    family, reading, prefix, problems = _opened(path := Path(folder) / "config.json")
    reading.understand(_QUANTIZED)
    problems += (f"{_QUANTIZED}: {problem}" for problem in _not_exact(quantization(folder)))
    reading.refuse_unless("is_encoder_decoder", False, False, "only false is supported")
    values = family.read(reading)
    values = {**_training(reading, values), **values}
    reading.refuse_the_rest(
        f"a key that is not known for {family.model_type}; if the model is the same without it, leave it out of a copy "
        "of config.json",
        but=frozenset(key for keys in WITHOUT_BEARING.values() for key in keys),
    )
    problems += _outer_conflicts(outer_config(folder) or {}, reading)
    problems += [f"{prefix}{problem}" for problem in reading.found()]
    problems = problems or list(_out_of_bounds(values, reading))
    if problems:
        raise ConfigurationError([f"{path}: {problem}" for problem in problems])
    return family, {**family.fixed, **values}


def of_the_training(folder: str | Path, values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on flags that contradict the training numbers of a folder that can be read.

    Args:
        values: what `read_hf_config` says of the folder.
        given: values of flags that the user gave.
    """
    for name in TRAINING_FLAGS:
        if name in given and name in values and given[name] != values[name]:
            yield f"{flag_of(name)} {_shown(given[name])}, where {folder} has {_shown(values[name])}: the flag holds"
    if "hidden_dropout" not in given:
        yield from (f"{folder}: {words}" for words in one_number_for_two(_opened(Path(folder) / "config.json")[1]))


def unsaid_dropouts(folder: str | Path, model: ModelConfig) -> Iterator[tuple[str, float]]:
    """Yield the rates of dropout, by field, that a run from the folder would not have as the model had them."""
    values = read_hf_config(folder)[1]
    for name in DROPOUTS:
        if values[name] != getattr(model, name):
            yield name, getattr(model, name)


def _training(reading: Reading, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers about training of a file; without experts none of their losses."""
    found = training_values(reading)
    return {name: one for name, one in found.items() if not name.startswith("moe_") or values.get("num_experts")}


def outer_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the content of a `config.json` whose model has a model of text inside of it, which its `text_config`
    describes; None where the whole model is one of text.

    Raises:
        ConfigurationError: there is no readable `config.json`.
    """
    content = _content(Path(folder) / "config.json")
    kind, text = str(content.get("model_type")), content.get("text_config")
    return content if isinstance(text, dict) and _family(kind) is None else None


def _content(path: Path) -> dict[str, Any]:
    try:
        content = load_json(read_file(path, _LARGEST))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return content


def _family(kind: str) -> Family | None:
    return next((one for one in FAMILIES.values() if kind in (one.model_type, *one.other_names)), None)


def _opened(path: Path) -> tuple[Family, Reading, str, list[str]]:
    """Return the family that a `config.json` names, its keys, the prefix for problems of these keys, and the problems
    of the keys around them."""
    content, prefix, problems = _content(path), "", []
    kind = content.get("model_type")
    _require_no_reason(path, kind)
    if outer_config(path.parent) is not None:
        text, prefix = content["text_config"], "text_config: "
        kind = text.get("model_type", f"{kind}_text")
        _require_no_reason(path, kind)
        problems = _around(content)
        content = _tied_as_a_whole(content, text)
    if (family := _family(str(kind))) is None:
        raise ConfigurationError(
            f"{path}: {prefix}model_type {json.dumps(kind)} is not supported{_nearest(str(kind))}; use one of "
            f"{', '.join(model_types())}. docs/huggingface.md says what each of them is, and how a family is added"
        )
    defaults = {**family.defaults, **family.other_names.get(str(kind), {})}
    reading = Reading(_without_axes(content), defaults, family.aliases, family.renamed)
    return family, reading, prefix, problems


def _require_no_reason(path: Path, kind: Any) -> None:
    if (why := REFUSED.get(str(kind))) is not None:
        raise ConfigurationError(f"{path}: model_type {kind} is not read: {why}")


def _tied_as_a_whole(outer: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's keys with `tie_word_embeddings` of the whole, which alone counts in transformers 5.23."""
    tied = outer.get("tie_word_embeddings")
    return {**text} if tied is None else {**text, "tie_word_embeddings": tied}


def _without_axes(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content without the keys that divide the rotary positions of images into three axes (`mrope_*`):
    positions of text have one axis."""
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(scaling := content.get(key), dict):
            content = {**content, key: {name: one for name, one in scaling.items() if not name.startswith("mrope_")}}
    return content


def _around(outer: Mapping[str, Any]) -> list[str]:
    """Return the problems of the keys around `text_config` that its text model depends on. The other keys belong to
    other parts: transformers makes the text model from `text_config` alone."""
    reading = Reading(outer, {})
    reading.refuse_unless("is_encoder_decoder", False, False, "only false is supported")
    tied = reading.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        reading.problems.append(f"tie_word_embeddings is {json.dumps(tied)[:60]}, and neither true nor false")
    return reading.problems


def _outer_conflicts(outer: Mapping[str, Any], reading: Reading) -> Iterator[str]:
    """Yield a problem for each key next to `text_config` that the text model knows and whose value inside differs or is
    missing: transformers reads the inner value, or its default."""
    understood, own = reading.understood, reading.content
    for key, value in outer.items():
        if key in understood and key not in _READ_AROUND and value is not None and own.get(key) != value:
            yield (
                f"{key} is {json.dumps(value)[:60]} next to text_config, where transformers does not read it, and "
                f"{json.dumps(own.get(key))[:60]} inside; leave it out of a copy of config.json, or say the same inside"
            )


def unread_around(folder: str | Path) -> list[str]:
    """Return the keys next to `text_config` that nothing is read of: they belong to other parts than the text model.
    Configurations of these parts, and keys without bearing, are not among them.

    Raises:
        ConfigurationError: there is no readable `config.json`.
    """
    known = {*_READ_AROUND, *(key for keys in WITHOUT_BEARING.values() for key in keys)}
    outer = outer_config(folder) or {}
    return [key for key, value in outer.items() if key not in known and value is not None and not _is_part(key, value)]


def _is_part(key: str, value: Any) -> bool:
    return key.endswith("_config") and isinstance(value, dict)


def model_types() -> list[str]:
    """Return every `model_type` that is read, of a whole model or of the text model inside of one."""
    return sorted({*FAMILIES, *(name for one in FAMILIES.values() for name in one.other_names)})


def _nearest(kind: str) -> str:
    close = difflib.get_close_matches(kind, model_types(), 1)
    return f" (the nearest is {close[0]})" if close else ""


_QUANTIZED = "quantization_config"
_READ_AROUND = ("model_type", "text_config", "tie_word_embeddings", "is_encoder_decoder", _QUANTIZED)
"""Keys next to `text_config` that are read."""


def quantization(folder: str | Path) -> dict[str, Any] | None:
    """Return how the weights of a folder are quantized, by `quantization_config`; None where they are not.

    Raises:
        ConfigurationError: there is no readable `config.json`.
    """
    content = _content(Path(folder) / "config.json")
    text = content.get("text_config")
    found = next(
        (one for at in (content, text) if isinstance(at, dict) and (one := at.get(_QUANTIZED)) is not None), None
    )
    return found if isinstance(found, dict) or found is None else {"quant_method": found}


def _not_exact(quantized: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield why quantized weights cannot be had exactly as 16 bits."""
    method = "none" if quantized is None else quantized.get("quant_method")
    if quantized is None or method in ("fp8", "mxfp4"):
        return
    groups = quantized.get("config_groups")
    weights = [one.get("weights") for one in groups.values()] if isinstance(groups, dict) else []
    exact = ({"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"})
    if (
        method != "compressed-tensors"
        or not weights
        or not all(
            isinstance(one, dict)
            and one.get("symmetric", True)
            and not one.get("actorder")
            and any(one.items() >= known.items() for known in exact)
            for one in weights
        )
    ):
        yield (
            f"quant_method {json.dumps(method)} with these settings is not read; read are fp8, mxfp4, and of "
            "compressed-tensors symmetric 8-bit floats and 4-bit integers without reordering. transformers makes a "
            "folder in bf16 of what it can unquantize: AutoModelForCausalLM.from_pretrained(folder, dtype='bfloat16')"
            ".dequantize().save_pretrained(another)"
        )


def _out_of_bounds(values: Mapping[str, Any], reading: Reading) -> Iterator[str]:
    """Yield the problems of values that a command line would refuse, too: sizes that nothing can count up to. A problem
    names the keys of the file with that value, and the flag."""
    for name, value in values.items():
        option = options_by_name()[name]
        try:
            if option.type is int and type(value) is int:
                check_size(option, value)
        except ValueError as error:
            keys = [key for key, one in reading.content.items() if type(one) is int and one == value]
            yield f"{' or '.join(keys)} ({option.flag}): {error}" if keys else f"{option.flag}: {error}"


def differences(config: Config, values: Mapping[str, Any]) -> list[str]:
    """Return where the configuration is not the model of `values` (from `read_hf_config`), each as a flag with both
    values."""
    given = {**vars(config.model), "vocab_size": config.data.vocab_size}
    given["group_query_attention"] = config.model.num_key_value_heads != config.model.num_attention_heads
    given["num_query_groups"] = config.model.num_key_value_heads
    if not config.model.disable_bias_linear:
        # With biases everywhere these flags add nothing.
        given |= dict.fromkeys(("add_qkv_bias", "add_output_bias", "add_mlp_bias"), False)
    if config.model.position_embedding_type != "learned_absolute":
        given.pop("max_position_embeddings")  # a promise about lengths, with no parameter behind it
    if not config.model.mtp_num_layers:
        given.pop("mtp_num_layers")  # the model is the same without them
    if _same_layers(config, values):
        given = {name: value for name, value in given.items() if name not in layer_patterns.FIELDS}
    return [
        f"{flag_of(name)} is {_shown(given[name])} and there {_shown(value)}"
        for name, value in values.items()
        if name in given and name not in TRAINING_FLAGS and given[name] != value
    ]


def _same_layers(config: Config, values: Mapping[str, Any]) -> bool:
    """Return whether the layers are the same by the patterns of `values`, which may be written in another way."""
    if values.get("num_layers") != config.model.num_layers:
        return False
    patterns = {name: value for name, value in values.items() if name in layer_patterns.FIELDS}
    changed = dataclasses.replace(config, model=dataclasses.replace(config.model, **patterns))
    return layers(changed) == layers(config)


def hf_config(config: Config, family: Family, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json`. `dtype` is torch's name of the weights' dtype, such as "bfloat16".

    Rotary settings are written as transformers 4 knows them; transformers 5 reads those too.
    """
    shared = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.data.vocab_size,
        "initializer_range": config.model.init_method_std,
        "tie_word_embeddings": not config.model.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    content = {**shared, **family.write(config), **dropout_json(family.dropouts, config.model)}
    return {family.renamed.get(key, key): value for key, value in content.items()}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return json.dumps(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
