"""Reads what a Hugging Face `config.json` says as values of our flags, and writes it back. The file is data: nothing
that it names is run.

What is peculiar to a family stands in its file in `families/`. A value that our model cannot have (another kind of rope
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
        ConfigurationError: there is no readable `config.json`, or our model cannot be what it describes; with every
            problem.
    """
    family, reading, prefix, problems = _opened(path := Path(folder) / "config.json")
    if (quantized := reading.get("quantization_config")) is not None:
        is_mxfp4 = isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"
        how = f"; {_FROM_MXFP4}" if is_mxfp4 else "; use the unquantized model"
        reading.problems.append(f"quantization_config: quantized weights are not supported{how}")
    reading.refuse_unless("is_encoder_decoder", False, False, "only false is supported")
    values = family.read(reading)
    values = {**_training(reading, values), **values}
    reading.refuse_the_rest(
        f"a key that is not known for {family.model_type}; if the model is the same without it, leave it out of a copy "
        "of config.json",
        but=frozenset(key for keys in WITHOUT_BEARING.values() for key in keys),
    )
    problems += [f"{prefix}{problem}" for problem in reading.found()]
    problems = problems or list(_out_of_bounds(values, reading))
    if problems:
        raise ConfigurationError([f"{path}: {problem}" for problem in problems])
    return family, {**family.fixed, **values}


def of_the_training(folder: str | Path, values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said next to the training numbers of a folder that can be read: flags that contradict them.

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


def _opened(path: Path) -> tuple[Family, Reading, str, list[str]]:
    """Return the family that a `config.json` names, its keys, the words before what is wrong with them, and what is
    wrong around them."""
    try:
        content = load_json(read_file(path, _LARGEST))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    kind, prefix, problems = str(content.get("model_type")), "", []
    family = next((one for one in FAMILIES.values() if kind in (one.model_type, *one.other_names)), None)
    for inner in FAMILIES.values():
        if inner.inside is not None and kind == inner.inside[0]:
            tied = bool(inner.defaults.get("tie_word_embeddings", False))
            family, prefix, (content, problems) = inner, "text_config: ", _inside(content, tied)
    if family is None:
        raise ConfigurationError(
            f"{path}: model_type {json.dumps(content.get('model_type'))} is not supported{_nearest(kind)}; use one of "
            f"{', '.join(_types())}. docs/huggingface.md says what each of them is, and how a family is added"
        )
    return family, Reading(content, family.defaults, family.aliases), prefix, problems


def _types() -> list[str]:
    """Return every `model_type` that is read."""
    families = FAMILIES.values()
    others = (name for one in families for name in (*one.other_names, *(one.inside or ())[:1]))
    return sorted({*FAMILIES, *others})


def _nearest(kind: str) -> str:
    close = difflib.get_close_matches(kind, _types(), 1)
    return f" (the nearest is {close[0]})" if close else ""


_FROM_MXFP4 = (
    "transformers writes another folder in bf16: AutoModelForCausalLM.from_pretrained(folder, dtype='bfloat16', "
    "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(another, save_original_format=False)"
)

_OF_OTHER_PARTS = (
    *("text_config", "vision_config", "mm_tokens_per_image", "eoi_token_index", "boi_token_index", "image_token_index"),
    *("eoi_token_id", "boi_token_id", "image_token_id"),
)


def _inside(content: dict[str, Any], usually_tied: bool) -> tuple[dict[str, Any], list[str]]:
    """Return what the `config.json` of a model of text and images says of its text model, and what is wrong with the
    rest; `usually_tied`: `tie_word_embeddings` where nothing is said."""
    outer, text = Reading(content, {}), content.get("text_config")
    outer.understand(*_OF_OTHER_PARTS)
    if not isinstance(text, dict):
        return {}, [f"text_config is {json.dumps(text)[:60]}, and not an object"]
    tied = text.get("tie_word_embeddings", usually_tied)
    outer.refuse_unless("tie_word_embeddings", tied, tied, f"but by text_config it is {json.dumps(tied)}")
    known = frozenset(key for keys in WITHOUT_BEARING.values() for key in keys)
    outer.refuse_the_rest("a key that is not known next to text_config", but=known)
    return text, outer.problems


def _out_of_bounds(values: Mapping[str, Any], reading: Reading) -> Iterator[str]:
    """Yield what is wrong with values that a command line would not take either: sizes that nothing can count up to.
    They are named by the keys of the file that have them, and by the flag."""
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
        # They add nothing to the biases that are there.
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
    there = dataclasses.replace(config, model=dataclasses.replace(config.model, **patterns))
    return layers(there) == layers(config)


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
    return {**shared, **family.write(config), **dropout_json(family.dropouts, config.model)}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return json.dumps(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
