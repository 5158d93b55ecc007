"""Reads masters in fp32 and Adam's states: those that ZeRO divides between ranks, and those that have no names.

    read_zero_shards(Path("global_step95000"), stages=1)["exp_avg"][0]["3.mlp.dense_h_to_4h.weight"].rows(0, 64)

Of ZeRO's stages 1 and 2, a rank's file (`zero_pp_rank_1_mp_rank_00_optim_states.pt`, or `bf16_zero_...`) has one flat
tensor for each group of parameters and each state, and says which range of it belongs to which parameter
(`param_slice_mappings` of deepspeed's runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py). The shapes are in
the model-parallel rank's own file. In that file experts have the numbers that they have on their expert-parallel rank;
neighbouring data-parallel ranks form an expert-parallel group.

The optimizers of 16-bit runs without ZeRO keep vectors without names. Such a vector has all parameters of a group one
after another (`fp32_groups_flat` of deepspeed's runtime/fp16/fused_optimizer.py), or one parameter (`fp32_groups` of
unfused_optimizer.py). Its next parameter is the first one of the model whose weights the masters are, once rounded to
its 16 bits: one that no file had before, if any.
"""

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.checkpoint.dtypes import converted
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.checkpoint_tools.copying import BLOCK
from megatron_ext.plugins.huggingface.safetensors import Entry
from megatron_ext.plugins.migrate.deepspeed_checkpoint import torch_file
from megatron_ext.untrusted.untrusted_folder import file_inside

SHARD_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
_MASTERS = "single_partition_of_fp32_groups"


@dataclass(frozen=True)
class Pieces:
    """A tensor whose elements lie one after another in ranges of several files; it is read as an `Entry` is."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Entry, ...]
    """Vectors, in order."""

    def rows(self, start: int, count: int) -> npt.NDArray:
        """Return a copy of `count` rows."""
        width, before = math.prod(self.shape[1:]), 0
        low, high, parts = start * width, (start + count) * width, []
        for piece in self.pieces:
            first, last = max(low - before, 0), min(high - before, piece.shape[0])
            parts += [piece.rows(first, last - first)] if first < last else []
            before += piece.shape[0]
        return np.concatenate(parts).reshape(count, *self.shape[1:])


def read_zero_shards(folder: Path, stages: int, experts: int = 1) -> dict[str, list[dict[str, Pieces]]]:
    """Return of each state (param, exp_avg, exp_avg_sq) the tensors of each tensor-parallel rank, by DeepSpeed's names.

    Args:
        stages: pipeline stages of the run; a parameter that several have, as tied embeddings, is taken of the first.
        experts: experts of a layer; 1 of a dense model.
    Raises:
        ConfigurationError: the files do not say where parameters lie.
        DataError: files are missing or damaged.
    """
    names = [path.name for path in folder.iterdir()]
    found = {(int(match[2]), int(match[1])): match[0] for name in names if (match := SHARD_FILE.fullmatch(name))}
    ranks, replicas = (1 + max(places) for places in zip(*found, strict=True))
    if len(found) < ranks * replicas or ranks % stages:
        raise DataError(
            f"{folder} has {len(found)} optim_states.pt of {ranks} model-parallel x {replicas} data-parallel ranks in "
            f"{stages} pipeline stages; copy the files of all ranks into one folder"
        )
    result: dict[str, list[dict[str, Pieces]]] = {
        state: [{} for _ in range(ranks // stages)] for state in ("param", "exp_avg", "exp_avg_sq")
    }
    for rank in range(ranks):
        shapes = _shapes(folder, f"mp_rank_{rank:02d}_model_states.pt")
        own = 1 + max((int(match[2]) for match in map(_EXPERT.fullmatch, shapes) if match), default=experts - 1)
        if experts % own or replicas % (experts // own):
            raise DataError(f"{folder}: {replicas} data-parallel ranks of {own} experts each do not have {experts}")
        shapes = {_of_all(name, first): shape for first in range(0, experts, own) for name, shape in shapes.items()}
        pieces: dict[str, dict[str, list[Entry]]] = {state: {} for state in result}
        for replica in range(replicas):
            _collect(file_inside(folder, found[rank, replica]), pieces, replica % (experts // own) * own)
        for state, parameters in pieces.items():
            for name, parts in parameters.items():
                sizes = math.prod(shapes.get(name, (0,))), sum(part.shape[0] for part in parts)
                kinds = sorted({part.dtype for part in parts})
                if name not in shapes or sizes[0] != sizes[1] or len(kinds) > 1:
                    raise DataError(
                        f"{folder}: shards of {name} have {sizes[1]} elements of its {sizes[0]}, in "
                        f"{' and '.join(kinds)}; take the files of all ranks of one checkpoint"
                    )
                whole = Pieces(parts[0].dtype, shapes[name], tuple(parts))
                result[state][rank % (ranks // stages)].setdefault(name, whole)
    return result


def _shapes(folder: Path, file: str) -> dict[str, tuple[int, ...]]:
    try:
        groups = torch_file.read(file_inside(folder, file))["param_shapes"]
        groups = groups if isinstance(groups, list) else [groups]
        return {name: tuple(map(int, shape)) for group in groups for name, shape in group.items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{folder / file} has no param_shapes; take another checkpoint") from error


def _of_all(name: str, first: int) -> str:
    """Return the name with the number that an expert has in the model, where `first` is the first one of its rank."""
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first}{match[3]}", name)


def _collect(path: Path, pieces: dict[str, dict[str, list[Entry]]], first: int) -> None:
    """Add the ranges that a rank's file has of each state of each parameter; `first`: its first expert."""
    saved = torch_file.read(path)
    saved = saved.get("optimizer_state_dict") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not isinstance(saved.get("param_slice_mappings"), list):
        raise ConfigurationError(
            f"{path} does not say where parameters lie, as deepspeed below 0.7 and ZeRO-3; make a universal checkpoint "
            "with ds_to_universal there, and give its folder"
        )
    try:
        states = saved["base_optimizer_state"]
        states = states["state"] if isinstance(states, dict) else states
        for group, places in enumerate(saved["param_slice_mappings"]):
            flat = {
                "param": saved[_MASTERS][group],
                **{name: states[group][name] for name in ("exp_avg", "exp_avg_sq")},
            }
            for local, place in places.items():
                name = _of_all(local, first)
                start, size = index(place["start"]), index(place["numel"])
                if start and name in pieces["param"]:
                    raise ValueError(f"{name} does not go on where the rank before it ends")
                for state, entry in flat.items():
                    if min(start, size) < 0 or start + size > math.prod(entry.shape):
                        raise ValueError(f"{name} reaches beyond its group")
                    pieces[state].setdefault(name, []).append(part_of(entry, start, size))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path} holds no state of Adam in ZeRO's form ({error}); take another checkpoint") from error


def part_of(entry: Entry, start: int, size: int) -> Entry:
    """Return the vector of `size` elements that begins at an element of a tensor."""
    vector = Entry(entry.path, entry.dtype, (size,), entry.offset)
    return Entry(entry.path, entry.dtype, (size,), vector.offset_of(start))


def find_states(files: Iterable[Any], weights: Mapping[str, Any]) -> dict[str, dict[str, Pieces]]:
    """Return, for each state (param, exp_avg, exp_avg_sq), the tensors found for a tensor-parallel rank, by DeepSpeed's
    names.

    Args:
        files: contents that its pipeline stages or expert-parallel ranks have saved.
        weights: its tensors, in the model's order.
    """
    found: dict[str, dict[str, Pieces]] = {"param": {}, "exp_avg": {}, "exp_avg_sq": {}}
    usable = {name: one for name, one in weights.items() if isinstance(one, Entry) and one.dtype in ("BF16", "F16")}
    for content in files:
        left = sorted(usable, key=found["param"].__contains__)
        with suppress(KeyError, IndexError, TypeError, AttributeError):  # another optimizer's
            saved = content["optimizer"]
            masters = saved.get("fp32_groups_flat") or [one for group in saved["fp32_groups"] for one in group]
            for number, master in enumerate(masters):
                vectors = {**saved["optimizer_state_dict"]["state"][number], "param": master}
                if len({(vectors[state].dtype, math.prod(vectors[state].shape)) for state in found}) == 1:
                    at = 0
                    while name := next((name for name in left if _rounds(master, at, usable[name])), None):
                        left.remove(name)
                        size = math.prod(usable[name].shape)
                        for state, of_state in found.items():
                            piece = part_of(vectors[state], at, size)
                            of_state[name] = Pieces(master.dtype, usable[name].shape, (piece,))
                        at += size
    return found


def _rounds(masters: Entry, start: int, weight: Entry) -> bool:
    """Return whether the masters from `start` on are these weights, once rounded."""
    size = math.prod(weight.shape)
    blocks = ((at, min(BLOCK, size - at)) for at in range(0, size, BLOCK))
    return start + size <= math.prod(masters.shape) and all(
        np.array_equal(converted(part_of(masters, start + at, n).whole(), masters.dtype, weight.dtype), own.whole())
        for at, n in blocks
        for own in [part_of(weight, at, n)]
    )
