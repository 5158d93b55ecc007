"""Reads a Hugging Face folder as a source of our parameters: `config.json` next to one or several safetensors files.

    folder = HFFolder("Llama-3.2-1B")
    folder.check(config)             # every missing or misshapen tensor at once
    folder.entries["lm_head.weight"] # where it lies

Nothing in the folder is executed, and no file outside of it is opened, whatever its index says. This needs no torch.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.dtypes import WIDTH
from megatron_ext.checkpoint.huggingface.safetensors import Entry, read_header
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, DataError, TrainingError
from megatron_ext.families import state_dict_mapping
from megatron_ext.families.family import EXPERT_BIAS, Family
from megatron_ext.families.hf_config import read_hf_config
from megatron_ext.families.state_dict_mapping import copies
from megatron_ext.untrusted.text import load_json, read_file
from megatron_ext.untrusted.untrusted_folder import file_inside

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 1 << 26  # bytes; 200,000 tensors have some 20 million


def read_model(folder: str | Path) -> tuple[Family, dict[str, Any]]:
    """Return what `read_hf_config` does, without depths of multi-token prediction where the files hold none.

    transformers writes `num_nextn_predict_layers` 1 into every file of some families, and leaves their weights out.
    """
    family, values = read_hf_config(folder)
    if values.get("mtp_num_layers"):
        first = family.ahead.format(0) or family.layers.format(values["num_layers"])
        with contextlib.suppress(TrainingError):  # which loading names
            if not any(name.startswith(first) for name in _entries(Path(folder))):
                return family, {**values, "mtp_num_layers": None}
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
        self.entries = _entries(self.path)
        prefix = self.family.headless_prefix
        if prefix and f"{self.family.names[_TABLE][0].removeprefix(prefix)}.weight" in self.entries:
            # The oldest files were written from the model without its head, whose names have no prefix.
            self.entries = {f"{prefix}{name}": entry for name, entry in self.entries.items()}
        self.left_out: str | None = None
        """What is said of tensors that belong to other parts of a larger model, if there are any."""
        if self.family.inside is not None:
            kind, prefix = self.family.inside
            own = {name.removeprefix(prefix): one for name, one in self.entries.items() if name.startswith(prefix)}
            if own:
                others = len(self.entries) - len(own)
                self.left_out = f"{folder} holds a {kind}: {others} tensors that are not of its text model are left out"
                self.entries = own

        self.entries = vectors_as_rows(self.entries, self.family)

    def check(self, config: Config) -> None:
        """Check that the files hold the model that `config` (made from `values`) describes.

        Raises:
            DataError: a tensor is missing or has another shape or dtype than it should have; all of them are named.
        """
        problems = []
        for mapping in state_dict_mapping(config, self.family):
            for name, shape in mapping.tensor_shapes().items():
                entry = self.entries.get(name)
                if entry is None:
                    problems.append(f"{name} is missing; it should have shape {list(shape)}")
                elif entry.shape != shape:
                    problems.append(f"{name} has shape {list(entry.shape)}; by config.json it should be {list(shape)}")
                elif entry.dtype not in WIDTH:
                    problems.append(f"{name} has dtype {entry.dtype}; supported are {', '.join(WIDTH)}")
        for name, value in self.family.constants_of(config).items():
            entry = self.entries.get(name)
            if entry is not None and not (
                math.prod(entry.shape) == 1 and math.isclose(entry.number(), value, rel_tol=0.01)
            ):
                problems.append(f"{name} is another number than {value:g}, which all models of this family have")
        head, table = (f"{self.family.names[module][0]}.weight" for module in ("output_layer", _TABLE))
        if config.model.untie_embeddings_and_output_weights is False and self._differ(head, table):
            problems.append(f"{head} differs from the embeddings, but config.json has tie_word_embeddings")
        for copy, original in copies(config, self.family).items():
            if self._differ(copy, original):
                problems.append(f"{copy} differs from {original}, which every depth shares here")
        if problems and config.model.mtp_num_layers:
            problems.append("with --mtp-num-layers 0 the depths of multi-token prediction are left out")
        if problems:
            raise DataError(
                f"{self.path}: config.json does not match the tensors: "
                + "; ".join(problems)
                + ". Take both from the same model."
            )

    def dtype(self) -> str:
        """Return the dtype of the weights; where they differ, one that holds all of them. Biases of experts are fp32
        next to weights of 16 bits."""
        apart = tuple(self.family.names.get(EXPERT_BIAS, ()))
        weights = (entry.dtype for name, entry in self.entries.items() if not (apart and name.endswith(apart)))
        dtypes = {dtype for dtype in weights if dtype in WIDTH}
        return "F32" if dtypes == {"F16", "BF16"} else max(dtypes, key=WIDTH.__getitem__, default="F16")

    def _differ(self, one: str, other: str) -> bool:
        """Return whether two tensors, which are to be one, are there and differ: files may hold a shared matrix twice;
        two different ones would be another model."""
        head, table = self.entries.get(one), self.entries.get(other)
        if head is None or table is None:
            return False
        if head.shape != table.shape or head.dtype != table.dtype:
            return True
        step = max(1, (1 << 24) // max(1, head.row_bytes))
        starts = range(0, head.shape[0], step)
        pairs = ([entry.rows(at, min(step, entry.shape[0] - at)) for entry in (head, table)] for at in starts)
        return any(one.tobytes() != other.tobytes() for one, other in pairs)


def vectors_as_rows(entries: Mapping[str, Entry], family: Family) -> dict[str, Entry]:
    """Return the tensors, with those vectors as a row each that the family has for rows of a matrix of ours."""
    part = family.vectors
    return {
        name: replace(entry, shape=(1, *entry.shape)) if part and part in name else entry
        for name, entry in entries.items()
    }


_TABLE = "embedding.word_embeddings"


def _entries(folder: Path) -> dict[str, Entry]:
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
    if (folder / SINGLE).exists():
        return read_header(safe_file(folder, SINGLE))
    raise ConfigurationError(
        f"{folder} holds neither {SINGLE} nor {INDEX}; weights in another format (.bin) are pickles and are not read: "
        "convert them with transformers' save_pretrained"
    )


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
