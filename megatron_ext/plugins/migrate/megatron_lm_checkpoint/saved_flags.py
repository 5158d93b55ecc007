"""Reads the flags of the run that wrote a checkpoint of Megatron-LM, without torch and without running anything of it.

They are an argparse.Namespace in a pickle: `args` of the common state, which is an object in a shard (since 0.19) or
the file common.pt. Other objects that the pickle asks for (enums, tensors, whatever a stranger has put into it) are not
made, and flags with such values are left out.
"""

import io
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.native import torch_dist
from megatron_ext.config.derived import layer_patterns
from megatron_ext.config.derived.attention_flags import STRETCH_FLAGS
from megatron_ext.config.parse.options import options_by_name, read_yaml_value
from megatron_ext.config.parse.saved import shapes_and_function
from megatron_ext.untrusted import inert_pickle
from megatron_ext.untrusted.inert_pickle import Global
from megatron_ext.untrusted.untrusted_folder import file_inside, read_inside

_COMMON = "common_state/shard_0_1"
_LARGEST = 1 << 26  # bytes; a real one has some 30,000
_ARGUMENT_NAMES = {"norm_epsilon": "layernorm_epsilon"}


def read_args(checkpoint: Path) -> dict[str, Any] | None:
    """Return the flags by Megatron-LM's names; None where there are none that can be read, which loading will find
    out."""
    try:
        with zipfile.ZipFile(io.BytesIO(_common_state(checkpoint))) as archive:
            [entry] = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            if entry.file_size > _LARGEST:
                return None
            common = inert_pickle.read(archive.read(entry), None, stored=True)
            args = (common[0] if isinstance(common, list) else common)["args"]  # an object in a shard is a list of one
            return _plain(args.state) if args.kind == Global("argparse", "Namespace") else None
    except Exception:  # a damaged archive or pickle can fail in any way
        return None


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that are numbers and texts, or lists of them."""
    return {name: value for name, value in state.items() if _is_scalar(value) or _is_list(value)}


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_scalar, value))


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def model_flags(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the model under our names, where they are given and had an effect."""
    was = {name: args.get(_ARGUMENT_NAMES.get(name, name)) for name in args.keys() | _ARGUMENT_NAMES.keys()}
    was["disable_bias_linear"] = not args["add_bias_linear"] if "add_bias_linear" in args else None
    if "rotary_seq_len_interpolation_factor" in args:  # None stretches nothing
        was["rotary_seq_len_interpolation_factor"] = was["rotary_seq_len_interpolation_factor"] or 1.0
    was |= {name: args[f"yarn_{name}"] for name in STRETCH_FLAGS if args.get(f"yarn_{name}") is not None}
    if was.get("position_embedding_type") == "yarn":
        was |= {"position_embedding_type": "rope", "rope_type": "yarn"}
    elif was.get("rope_type") == "rope" and not was.get("multi_latent_attention"):
        was["rope_type"] = None
    if was.get("multi_latent_attention"):
        # Its heads have sizes of their own, and its configuration a kind of rotation.
        was |= {"kv_channels": None, "rope_type": was.get("rope_type") or "yarn"}
    for name in layer_patterns.FIELDS:
        if was.get(name) is not None:
            was[name] = _as_typed(name, was[name])
    return was


def _as_typed(name: str, value: object) -> str | None:
    """Return a pattern over the layers, or a window, as flags take it; None for experts in every layer."""
    numbers = value if isinstance(value, list | tuple) else [value]
    text = ",".join(map(str, numbers))
    if name == "moe_layer_freq" and {*numbers} == {1}:
        return None
    return f"[{text}]" if isinstance(value, list) and name != "window_size" else text


def saved_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's flags for --use-checkpoint-args, as `config.parse.saved.read_saved` returns them for a
    checkpoint of ours."""
    was = model_flags(args)
    without_effect = {"vocab_size"}  # its tokenizer may have more; loading compares the padded sizes
    if not was.get("group_query_attention"):
        without_effect.add("num_query_groups")
    if not was.get("disable_bias_linear"):
        without_effect.add("add_qkv_bias")
    names = shapes_and_function()
    if not was.get("use_rope_scaling"):
        without_effect |= {name for name in names if name.startswith("rope_scaling")}
    if was.get("num_experts") is None:
        without_effect |= {name for name in names if name.startswith("moe_")}
    values = {}
    for name in names:
        if was.get(name) is not None and name not in without_effect:
            with suppress(ValueError):  # it has no counterpart here: loading names it
                values[name] = read_yaml_value(options_by_name()[name], was[name])
    return values


def _common_state(checkpoint: Path) -> bytes:
    legacy = checkpoint / "common.pt"
    if legacy.exists():
        return read_inside(checkpoint, legacy.name, _LARGEST)
    with file_inside(checkpoint, ".metadata").open("rb") as file:
        entry = torch_dist.read_objects(file)[_COMMON]
    with file_inside(checkpoint, entry.file).open("rb") as file:
        file.seek(entry.offset)
        return file.read(min(entry.length, _LARGEST))


def read_saved_model(checkpoint: Path) -> dict[str, Any] | None:
    """Return the flags of the model of a checkpoint of Megatron-LM; None where there are none that can be read."""
    args = read_args(checkpoint)
    return None if args is None else saved_model(args)


READERS = (read_saved_model,)
