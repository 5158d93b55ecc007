"""Finds the weights of a checkpoint of Megatron-DeepSpeed or GPT-NeoX, by our names, in the files of its ranks.

    folder = DeepSpeedFolder("checkpoints")
    folder.weights["decoder.layers.0.mlp.linear_fc1.weight"]     # an Entry for each tensor-parallel rank

Four forms are known, and their names in deepspeed 0.19 (runtime/pipe/module.py, runtime/engine.py,
checkpoint/ds_to_universal.py):

    layer_03-model_00-model_states.pt     with pipelines: a module of the pipeline, on one tensor-parallel rank
    mp_rank_00_model_states.pt            the run's flags; its weights without pipelines, its optimizer without ZeRO
    zero_pp_rank_0_mp_rank_00_optim_states.pt   what ZeRO divides: masters and Adam's states (`optimizer_files.py`)
    zero/<parameter>/fp32.pt              a universal checkpoint: whole parameters, with exp_avg.pt and exp_avg_sq.pt
    layer_1_expert_3_mp_rank_00_model_states.pt   an expert of the second layer that has some, next to the second form
    expp_rank_0_mp_rank_00_optim_states.pt        a rank's optimizer with experts, without ZeRO (`optimizer_files.py`)

Nothing in the files is executed (`torch_file.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.checkpoint.dtypes import ARRAYS
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parts.catalogue import EMBEDDING_NORM, OUTPUT_LAYER, POSITION_EMBEDDINGS, WORD_EMBEDDINGS
from megatron_ext.plugins.huggingface.safetensors import Entry
from megatron_ext.plugins.migrate.deepspeed_checkpoint import torch_file
from megatron_ext.plugins.migrate.deepspeed_checkpoint.optimizer_files import (
    SHARD_FILE,
    Pieces,
    find_states,
    read_zero_shards,
)
from megatron_ext.plugins.migrate.deepspeed_checkpoint.saved_flags import flags_of, has_gate_last, is_neox
from megatron_ext.untrusted.untrusted_folder import file_inside, is_plain, read_inside


@dataclass(frozen=True)
class Reordered:
    """The rows of a shard in another order; it is read as an `Entry` is."""

    shard: "Entry | Pieces | Zeros"
    blocks: tuple[range, ...]
    """Rows of the shard, each once."""

    @property
    def dtype(self) -> str:
        """The dtype of its elements, by the name that safetensors has for it."""
        return self.shard.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return self.shard.shape

    def rows(self, start: int, count: int) -> npt.NDArray:
        """Return a copy of `count` rows."""
        before, parts = 0, []
        for block in self.blocks:
            own = block[max(start - before, 0) : max(start + count - before, 0)]
            parts += [self.shard.rows(own.start, len(own))] if own else []
            before += len(block)
        return np.concatenate(parts)


@dataclass(frozen=True)
class Zeros:
    """A parameter of ours that the checkpoint does not have, filled with zeros, which add nothing; it is read as an
    `Entry` is."""

    dtype: str
    shape: tuple[int, ...]

    def rows(self, start: int, count: int) -> npt.NDArray:
        """Return `count` rows."""
        return np.zeros((count, *self.shape[1:]), ARRAYS[self.dtype])


Shard = Entry | Pieces | Reordered | Zeros
Weights = dict[str, list[Shard]]
"""Parameter -> its shards, in the order of the tensor-parallel ranks."""

STATES = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""State of Adam's -> the file of a universal checkpoint that has it."""

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_STATES = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODULES = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    **{f"{name}.query_key_value": "self_attention.linear_qkv" for name in ("attention", "self_attention")},
    **{f"{name}.dense": "self_attention.linear_proj" for name in ("attention", "self_attention")},
    **{f"mlp.{name}": "mlp.linear_fc1" for name in ("dense_h_to_4h", "linear1")},
    **{f"mlp.{name}": "mlp.linear_fc2" for name in ("dense_4h_to_h", "linear2")},
}
"""Module of a layer in the DeepSpeed checkpoint -> ours."""
_OTHERS = {
    "word_embeddings.weight": WORD_EMBEDDINGS,
    "position_embeddings.weight": POSITION_EMBEDDINGS,
    **{f"word_embeddings.norm.{kind}": f"{EMBEDDING_NORM}.{kind}" for kind in ("weight", "bias")},
    **{f"{name}.weight": OUTPUT_LAYER for name in ("lm_head", "final_linear", "output_layer")},
    **{
        f"{name}{kind}": f"decoder.final_layernorm.{kind}"
        for name in ("", "norm.", "final_layernorm.")
        for kind in ("weight", "bias")
    },
}
_CONSTANTS = re.compile(r".*(inv_freq|masked_bias|_extra_state|attention\.bias)")
"""Names of tensors that are saved next to the parameters and follow from the flags."""


class DeepSpeedFolder:
    """The weights and flags of a checkpoint, and the states of its optimizer where it is a universal one.

    Args:
        folder: the folder that was saved into, whose `latest` names the checkpoint, or a checkpoint in it.
    Raises:
        ConfigurationError: it is no such checkpoint, or its model is not computed here.
        DataError: a file is damaged, or a tensor is unknown.
    """

    def __init__(self, folder: str | Path):
        self.path = _checkpoint(Path(folder))
        names = [path.name for path in self.path.iterdir()]
        ranks = _numbered(_RANK_FILE, names)
        if not ranks:
            raise ConfigurationError(
                f"{self.path} has no mp_rank_00_model_states.pt, which holds the flags of its model; of ZeRO-3 make a "
                "universal checkpoint with deepspeed's ds_to_universal, and give its folder"
            )
        content = torch_file.read(file_inside(self.path, ranks[0][1]))
        args = content.get("args") if isinstance(content, dict) else None
        if not isinstance(args, dict):
            raise ConfigurationError(f"{self.path / ranks[0][1]} has no args, by which its model is known")
        self.values = flags_of(args)
        self.iteration = _whole(content.get("iteration", content.get("global_steps")))
        self.samples = _whole(args.get("consumed_train_samples", content.get("global_samples")))
        self.states: dict[str, Weights] = {}
        divided = bool(args.get("enable_expert_tensor_parallelism"))
        if (self.path / "zero").is_dir():
            self.states = {state: self._universal(file, args) for state, file in STATES.items()}
            self.weights = self.states["param"]
        elif any(map(SHARD_FILE.fullmatch, names)):
            stages = args.get("pipeline_model_parallel_size") or args.get("pipe_parallel_size") or 1
            shards = read_zero_shards(self.path, _whole(stages) or 1, self.values.get("num_experts") or 1)
            self.states = {state: self._with_experts(ranks, divided) for state, ranks in shards.items()}
            self.weights = self.states["param"]
        else:
            others = [torch_file.read(file_inside(self.path, name)) for _, name in ranks[1:]]
            files = [one if isinstance(one, dict) else {} for one in (content, *others)]
            states_of: dict[int, list[Any]] = {}
            tensors = self._of_layers(names) or [dict(_flat(one.get("module"))) for one in files]
            for rank, *_, name in _numbered(_EXPERT_FILE, names):
                if rank < len(tensors):
                    tensors[rank] |= _flat(torch_file.read(file_inside(self.path, name)))
            self.weights = self._with_experts(tensors, divided)
            for rank, _, name in _numbered(_EXPERT_STATES, names):
                states_of.setdefault(rank, []).append(torch_file.read(file_inside(self.path, name)))
            found = [find_states(states_of.get(n) or files[n :: len(tensors)], one) for n, one in enumerate(tensors)]
            states = {state: [of_rank[state] for of_rank in found] for state in STATES}
            if all(of_rank.keys() == states["param"][0].keys() for of_rank in states["param"]):
                named = {state: self._with_experts(of_ranks, divided) for state, of_ranks in states.items()}
                if named["param"].keys() == self.weights.keys():
                    self.states, self.weights = named, named["param"]
        for weights in {id(one): one for one in (self.weights, *self.states.values())}.values():
            self._reorder(weights, args)
        if is_neox(args):
            for shards in [shards for name, shards in self.weights.items() if name.endswith(".linear_fc2.weight")][:1]:
                self.values["ffn_hidden_size"] = sum(shard.shape[-1] for shard in shards)

    def _with_experts(self, ranks: Sequence[Mapping[str, Any]], divided: bool) -> Weights:
        """Return the shards by our names; each rank has experts whole where they are not `divided`."""
        experts = [{name: one for name, one in rank.items() if ".deepspeed_experts." in name} for rank in ranks]
        others = [{name: one for name, one in rank.items() if ".deepspeed_experts." not in name} for rank in ranks]
        weights = self._by_our_names(others) | self._by_our_names(experts if divided else experts[:1])
        for name in [name for name in weights if name.endswith(".router.weight")]:
            router = weights[name][0]
            if not self.values.get("disable_bias_linear"):  # there a router has none
                weights[name.replace("weight", "bias")] = [Zeros(router.dtype, router.shape[:1])]
        return weights

    def _reorder(self, weights: Weights, args: Mapping[str, Any]) -> None:
        """Put the rows of fused matrices, and their biases, in our order: the gate first, and a group's queries before
        its key and its value, where GPT-NeoX has all queries, all keys and all values of a rank."""
        heads, groups = (int(self.values.get(name) or 0) for name in ("num_attention_heads", "num_query_groups"))
        for name, shards in weights.items():
            own, each = groups // len(shards), heads // max(groups, 1)
            if ".linear_fc1." in name and has_gate_last(args):
                parts, blocks = 2, [(1, 2), (0, 1)]
            elif ".linear_qkv." in name and is_neox(args) and own:
                keys, values, parts = own * each, own * (each + 1), own * (each + 2)
                firsts = ((group * each, keys + group, values + group) for group in range(own))
                blocks = [(q, q + each) if q < keys else (q, q + 1) for of_group in firsts for q in of_group]
            else:
                continue
            for place, shard in enumerate(shards):
                size = shard.shape[0] // parts
                ranges = tuple(range(low * size, high * size) for low, high in blocks)
                if not isinstance(shard, Reordered) and size * parts == shard.shape[0]:
                    shards[place] = Reordered(shard, ranges)

    def _of_layers(self, names: list[str]) -> list[dict[str, Entry]]:
        by_rank: dict[int, dict[str, Entry]] = {}
        for rank, layer, name in _numbered(_LAYER_FILE, names):
            for key, entry in _flat(torch_file.read(file_inside(self.path, name))):
                by_rank.setdefault(rank, {})[f"{layer}.{key}"] = entry
        return list(by_rank.values())

    def _universal(self, file: str, args: Mapping[str, Any]) -> Weights:
        """Return whole parameters, and of those that were put one below the other the shards of the ranks: their gates,
        or keys and values, lie between the others, unless the file says that it has them together."""
        ranks = _whole(args.get("model_parallel_size") or args.get("tensor_model_parallel_size")) or 1
        whole: dict[str, Any] = {}
        divided: list[dict[str, Any]] = [{} for _ in range(ranks)]
        for folder in sorted((self.path / "zero").iterdir()):
            if folder.is_dir() and (folder / f"{file}.pt").exists():
                content = torch_file.read(file_inside(self.path, f"zero/{folder.name}/{file}.pt", nested=True))
                content = content if isinstance(content, dict) else {"param": content}
                whole[folder.name] = one = content["param"]
                if isinstance(one, Entry) and {**content, "param": 0} == {"param": 0, "cat_dim": 0}:
                    size, left = divmod(one.shape[0], ranks)
                    for rank, part in enumerate([] if left else divided):
                        part[folder.name] = replace(
                            one, shape=(size, *one.shape[1:]), offset=one.offset_of(rank * size)
                        )
        return self._with_experts([whole], False) | (self._by_our_names(divided) if ranks > 1 else {})

    def _by_our_names(self, ranks: Sequence[Mapping[str, Any]]) -> Weights:
        """Return the shards of each parameter under our names."""
        layers = {
            name.partition(".")[0] for name in ranks[0] if re.match(r"\d+\.(self_attention|attention|mlp)\.", name)
        }
        number = {layer: place for place, layer in enumerate(sorted(layers, key=int))}
        found: Weights = {}
        unknown = []
        for name in ranks[0]:
            ours = _our_name(name, number)
            if ours is not None:
                shards = [one[name] for one in ranks if isinstance(one.get(name), Entry | Pieces)]
                if len(shards) < len(ranks):
                    raise DataError(f"{self.path}: {name} is no tensor of weights in order on every rank")
                found.setdefault(ours, shards)  # tied embeddings are saved twice
            elif not _CONSTANTS.fullmatch(name):
                unknown.append(name)
        if unknown:
            raise DataError(f"{self.path} holds {', '.join(sorted(unknown)[:5])}, which no model here has")
        return found


def _numbered(pattern: re.Pattern[str], names: list[str]) -> list[Any]:
    """Return the numbers in the names of such files, the last one first, and the name; in this order."""
    return sorted((*map(int, match.groups()[::-1]), name) for name in names if (match := pattern.fullmatch(name)))


def _our_name(name: str, number: Mapping[str, int]) -> str | None:
    """Return our name of a parameter; None for another tensor. `number`: module of a pipeline -> layer."""
    match = re.fullmatch(r"(?:(\d+)|tied_modules\.\w+|language_model\.\w+(?:\.layers\.(\d+))?)\.(.*)", name)
    if match is None:
        return _OTHERS.get(name.removeprefix("language_model."))
    module, layer, rest = match.groups()
    layer = number.get(module) if layer is None else int(layer)
    rest = re.sub(r"(^|\.)scale$", r"\1weight", rest)
    if layer is None:
        return _OTHERS.get(rest) if rest not in ("weight", "bias") or module else OUTPUT_LAYER
    inner, _, kind = rest.rpartition(".")
    if expert := re.fullmatch(r"mlp\.deepspeed_moe\.(?:gate\.wg|experts\.deepspeed_experts\.(\d+)\.(.*))", inner):
        module = "router" if expert[1] is None else f"experts.{expert[1]}.{_MODULES.get(f'mlp.{expert[2]}', '')[4:]}"
        return f"decoder.layers.{layer}.mlp.{module}.{kind}"
    return (
        f"decoder.layers.{layer}.{_MODULES[inner]}.{kind}" if inner in _MODULES and kind in ("weight", "bias") else None
    )


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no dictionary, with its dotted key."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _checkpoint(folder: Path) -> Path:
    """Return the folder of the checkpoint that a folder names as its latest, or the folder itself."""
    for file in ("latest_universal", "latest"):
        if (folder / file).is_file():
            name = read_inside(folder, file, 1000).decode(errors="replace").strip()
            if not is_plain(name) or not (folder / name).is_dir():
                raise DataError(f"{folder / file} names {ascii(name)[:100]}, which is no folder next to it")
            return folder / name
    if not folder.is_dir():
        raise ConfigurationError(f"--load {folder} does not exist; give a folder that DeepSpeed saved into")
    return folder


def _whole(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
