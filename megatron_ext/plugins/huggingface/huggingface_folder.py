"""Reads a Hugging Face folder as a source of our parameters: `config.json` next to one or several safetensors files.

    folder = HFFolder("Llama-3.2-1B")
    folder.check(config)             # every missing, misshapen or unknown tensor at once
    folder.entries["lm_head.weight"] # where it lies

Nothing in the folder is executed, and no file outside of it is opened, whatever its index says. This needs no torch.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.dtypes import WIDTH
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, DataError, TrainingError
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.hf_config import outer_config, quantization, read_hf_config, unread_around
from megatron_ext.plugins.families.state_dict_mapping import ParameterMapping, copies, state_dict_mapping
from megatron_ext.plugins.families.unread import OTHER_PARTS, listed, tied_head, unread
from megatron_ext.plugins.huggingface.forms import dequantized, equal_thirds, experts_apart
from megatron_ext.plugins.huggingface.safetensors import Entry, read_header
from megatron_ext.untrusted.text import load_json, read_file
from megatron_ext.untrusted.untrusted_folder import file_inside

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 1 << 26  # bytes; 200,000 tensors have some 20 million


def read_model(folder: str | Path) -> tuple[Family, dict[str, Any]]:
    """Return the family and the values of `read_hf_config`, with the model type for a later export, corrected by the
    weight files: no depths of multi-token prediction where the files hold none, and for a text model inside of another
    one, tied or untied embeddings by the output layer that the files hold.

    transformers writes `num_nextn_predict_layers` 1 into every file of some families, and leaves their weights out.
    Around a text model it takes `tie_word_embeddings` from next to `text_config`, for some types also from inside, or
    the default of their class; and it ties no output layer that differs from the embeddings.
    """
    family, values = read_hf_config(folder)
    values["hf_model_type"] = family.model_type
    outer = outer_config(folder)
    if outer is None and not values.get("mtp_num_layers"):
        return family, values
    try:
        own = text_model(_unquantized(Path(folder))[0], family)[0]
    except TrainingError:  # which loading names
        return family, values
    if values.get("mtp_num_layers"):
        first = family.ahead.format(0) or family.layers.format(values["num_layers"])
        if not any(name.startswith(first) for name in own):
            values = {**values, "mtp_num_layers": None}
    if outer is not None:
        head = head_of(family)
        said = outer.get("tie_word_embeddings") or outer["text_config"].get("tie_word_embeddings")
        if head in own:
            is_apart = values["untie_embeddings_and_output_weights"] or differ(own, head, table_of(family))
            values = {**values, "untie_embeddings_and_output_weights": is_apart}
        elif said is not False:
            values = {**values, "untie_embeddings_and_output_weights": False}
    return family, values


class HFFolder:
    """The tensors of a Hugging Face model.

    Raises:
        ConfigurationError: the folder has no usable `config.json`, or no safetensors.
        DataError: an index or a file is damaged, or leads out of the folder.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self.family, self.values = read_model(folder)
        entries, unquantized = _unquantized(self.path)
        own, others = text_model(entries, self.family)
        self.others = others if outer_config(folder) is not None else {}
        """Tensors of other parts than the text model that is inside of a model."""
        own = experts_apart(own if self.others else {**own, **others}, self.family)
        self.entries = vectors_as_rows(own, self.family)
        self.remarks = [*_unread_index(self.path)]
        if around := unread_around(self.path):
            self.remarks.append(f"{self.path}: keys next to text_config that are not read: {listed(around)}")
        if unquantized:
            self.remarks.append(f"{self.path}: {unquantized} quantized tensors are read as bf16")
        """Sentences on contents of the folder that are not read; `check` adds one that counts and names the tensors
        that are left out, if there are any."""

    def check(self, config: Config) -> None:
        """Check that the files hold the model that `config` (made from `values`) describes, and nothing else that
        counts; from now on `entries` are the tensors that it reads, and `remarks` say which others there are.

        Raises:
            DataError: a tensor is missing, has another shape or dtype than it should have, or no place in the model;
                they are named.
        """
        mappings = state_dict_mapping(config, self.family)
        self.entries |= equal_thirds(self.entries, mappings)
        problems = [*self._of_parameters(mappings, config), *self._of_others(config)]
        left_out, without_place = unread(self.entries, mappings, config, self.family)
        if without_place:
            problems.append(f"it has no place for {len(without_place)} of them: {listed(without_place)}")
        if problems and config.model.mtp_num_layers:
            problems.append("with --mtp-num-layers 0 the depths of multi-token prediction are left out")
        if problems:
            raise DataError(
                f"{self.path}: config.json does not match the tensors: "
                + "; ".join(problems)
                + ". Take both from the same model."
            )
        if self.others:
            left_out.setdefault(OTHER_PARTS, []).extend(sorted(self.others))
        if left_out:
            kinds = (f"{len(names)} {reason} ({listed(names, 5)})" for reason, names in left_out.items())
            self.remarks.append(f"{self.path}: tensors that are left out: {'; '.join(kinds)}")
            if OTHER_PARTS in left_out:
                self.remarks.append("only text is trained: what reads images, video or sound is no part of the model")
            others = {name for names in left_out.values() for name in names}
            self.entries = {name: entry for name, entry in self.entries.items() if name not in others}

    def _of_parameters(self, mappings: Iterable[ParameterMapping], config: Config) -> Iterator[str]:
        """Yield the problems of the tensors that hold our parameters: missing, or of another shape or dtype."""
        for mapping in mappings:
            for name, shape in mapping.tensor_shapes().items():
                entry = self.entries.get(name)
                if entry is None:
                    yield f"{name} is missing; it should have shape {list(shape)}{self._instead(name, config)}"
                elif entry.shape != shape:
                    yield f"{name} has shape {list(entry.shape)}; by config.json it should be {list(shape)}"
                elif entry.dtype not in WIDTH:
                    yield f"{name} has dtype {entry.dtype}; supported are {', '.join(WIDTH)}"

    def _instead(self, name: str, config: Config) -> str:
        """Return how a model without its output layer, such as one of embeddings, can be read after all."""
        fixed = {**self.family.flags, **self.family.dependent_flags(config.model)}
        is_tied = not fixed.get("untie_embeddings_and_output_weights", False) and not config.model.lm_head_bias
        if not is_tied or name != f"{self.family.names['output_layer'][0]}.weight":
            return ""
        return ', or be the embeddings, by "tie_word_embeddings": true in a copy of config.json'

    def _of_others(self, config: Config) -> Iterator[str]:
        """Yield the problems of tensors that are constants or repeat others: their values differ."""
        for name, value in self.family.constants_of(config).items():
            entry = self.entries.get(name)
            if entry is not None and not (
                math.prod(entry.shape) == 1 and math.isclose(entry.number(), value, rel_tol=0.01)
            ):
                yield f"{name} is another number than {value:g}, which all models of this family have"
        head, table = tied_head(config, self.family), table_of(self.family)
        if head is not None and differ(self.entries, head, table):
            yield f"{head} differs from the embeddings, but config.json has tie_word_embeddings"
        for copy, original in copies(config, self.family).items():
            if differ(self.entries, copy, original):
                yield f"{copy} differs from {original}, which every depth shares here"

    def dtype(self) -> str:
        """Return the dtype of the weights that are read, after `check`; where they differ, one that holds all of them.
        Biases of experts are fp32 next to weights of 16 bits."""
        apart = tuple(self.family.names.get(EXPERT_BIAS, ()))
        weights = (entry.dtype for name, entry in self.entries.items() if not (apart and name.endswith(apart)))
        dtypes = {dtype for dtype in weights if dtype in WIDTH}
        return "F32" if dtypes == {"F16", "BF16"} else max(dtypes, key=WIDTH.__getitem__, default="F16")


def differ(entries: Mapping[str, Entry], one: str, other: str) -> bool:
    """Return whether the files hold both of two tensors that should be one, and the two differ: files may hold a shared
    matrix twice, but two different ones would be another model."""
    head, table = entries.get(one), entries.get(other)
    if head is None or table is None:
        return False
    if head.shape != table.shape or head.dtype != table.dtype:
        return True
    step = max(1, (1 << 24) // max(1, head.row_bytes))
    starts = range(0, head.shape[0], step)
    pairs = ([entry.rows(at, min(step, entry.shape[0] - at)) for entry in (head, table)] for at in starts)
    return any(one.tobytes() != other.tobytes() for one, other in pairs)


def table_of(family: Family) -> str:
    """Return the name of the embeddings."""
    return f"{family.names['embedding.word_embeddings'][0]}.weight"


def head_of(family: Family) -> str:
    """Return the name of the output layer."""
    return f"{family.names['output_layer'][0]}.weight"


def text_model(entries: Mapping[str, Entry], family: Family) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return the tensors of the family's model by its names, and all others.

    The embeddings show where the model is: `model.language_model.` in a model of text and images,
    `language_model.model.` in published ones, at the beginning in files that were written from the model without its
    head, as the oldest files and the files of embedding models.
    """
    for pattern, usual in family.respelled.items():
        entries = {re.sub(pattern, usual, name): entry for name, entry in entries.items()}
    first, _, rest = table_of(family).partition(".")
    places = [name.removesuffix(rest) for name in entries if f".{name}".endswith(f".{rest}")]
    places = [place for place in places if not any(place != one and place.startswith(one) for one in places)]
    place = places[0] if len(places) == 1 and table_of(family) not in entries else f"{first}."
    head = head_of(family).removesuffix("weight")
    ahead = (family.ahead or "mtp.").partition(".")[0]
    own, others = {}, {}
    for name, entry in entries.items():
        above, found, kind = name.rpartition(head)
        if found and place.startswith(above):
            own[f"{head}{kind}"] = entry
        elif name.startswith(f"{ahead}."):
            own[name] = entry
        elif name.startswith(place):
            own[f"{first}.{name.removeprefix(place)}"] = entry
        else:
            others[name] = entry
    return own, others


def vectors_as_rows(entries: Mapping[str, Entry], family: Family) -> dict[str, Entry]:
    """Return the tensors, with those vectors as a row each that the family has for rows of a matrix of ours."""
    part = family.vectors
    return {
        name: replace(entry, shape=(1, *entry.shape)) if part and part in name else entry
        for name, entry in entries.items()
    }


def _entries(folder: Path) -> dict[str, Entry]:
    """Return the tensors of the single file where it exists, as transformers does, else the tensors that the index
    names."""
    if (folder / SINGLE).exists():
        return read_header(safe_file(folder, SINGLE))
    if (folder / INDEX).exists():
        names = _index(safe_file(folder, INDEX))
        entries = {}
        for file in sorted(set(names.values())):
            entries |= {
                name: entry for name, entry in read_header(safe_file(folder, file)).items() if names.get(name) == file
            }
        lost = sorted(names.keys() - entries.keys())
        if lost:
            raise DataError(f"{folder / INDEX} places {', '.join(lost[:5])} in a file that does not hold it")
        return entries
    raise ConfigurationError(
        f"{folder} holds neither {SINGLE} nor {INDEX}; weights in another format (.bin) are pickles and are not read: "
        "convert them with transformers' save_pretrained"
    )


def _unquantized(folder: Path) -> tuple[dict[str, Entry], int]:
    """Return the tensors with those in bf16 that are quantized, by `quantization_config`, and how many these are."""
    entries, quantized = _entries(folder), quantization(folder)
    if quantized is None:
        return entries, 0
    block = quantized.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block):
        return dequantized(entries, (block[0], block[1]))
    return dequantized(entries, None)


def _unread_index(folder: Path) -> Iterator[str]:
    """Yield that an index next to the single file names other files, which a model that was saved twice leaves."""
    if not ((folder / SINGLE).exists() and (folder / INDEX).exists()):
        return
    try:
        files = {*_index(safe_file(folder, INDEX)).values()} - {SINGLE}
    except DataError:
        return  # which nothing is read from
    if files:
        yield f"{folder}: {SINGLE} is read, as by transformers, and not {listed(sorted(files), 3)}, which {INDEX} names"


def _index(path: Path) -> dict[str, str]:
    try:
        names = load_json(read_file(path, _LARGEST_INDEX))["weight_map"]
        if all(isinstance(file, str) for file in names.values()):
            return names
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise DataError(f"{path} is not the index of a sharded model: it has no weight_map of names")


def safe_file(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder, which its own content (an index) names.

    The links of a Hugging Face cache, from `snapshots/<revision>/` to `blobs/` next to it, are followed; no others are.

    Raises:
        DataError: the name or a link leads out of the folder, or there is no such file.
    """
    home = folder.resolve()
    cached = home.parent.name == "snapshots"
    return file_inside(folder, name, also=[home.parent.parent / "blobs"] if cached else [])
