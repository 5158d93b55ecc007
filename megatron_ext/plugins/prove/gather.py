"""Gathers whole tensors by global parameter name, from the shards that the ranks of any layout hold.

On the ranks, `weights(run)` and `gradients(run)` return this rank's shards; in the parent, `assemble` puts the shards
of all ranks together, so that two layouts can be compared tensor by tensor.

`Taps(run)` copies the outputs of the modules named below while the first step runs; in the parent, `assemble_outputs`
puts the parts of all ranks together by global module name, in the order of a forward pass.

Shapes of outputs: S sequence (of this rank), B samples of a microbatch, W width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.config.schema import Config
from megatron_ext.model.names import by_expert, global_named_parameters, is_of_an_expert, unwrapped
from megatron_ext.parallel.groups import tensor_group
from megatron_ext.parallel.rows import row_shard
from megatron_ext.parts.catalogue import Parameter, parameters
from megatron_ext.parts.slices import pieces
from megatron_ext.train.run import Run


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel rank's part of a named tensor, in fp32."""

    name: str
    tp_rank: int
    """Rank in the group that divides the tensor: tensor parallel, or expert tensor parallel for a routed expert."""
    values: np.ndarray


def weights(run: Run) -> list[Shard]:
    """Return this rank's shards of the weights."""
    with run.gathered_parameters():
        return [
            _shard(run, inner, tensor)
            for name, parameter in global_named_parameters(run.chunks)
            for inner, tensor in by_expert(name, _whole(run, parameter))
        ]


def gradients(run: Run) -> list[Shard]:
    """Return this rank's shards of the reduced gradients, before clipping. All data-parallel ranks must call it."""
    names = {id(parameter): name for name, parameter in global_named_parameters(run.chunks)}
    return [
        _shard(run, name, tensor)
        for chunk in run.chunks
        for parameter, gradient in run.sharding.reduced_gradients(chunk)
        for name, tensor in by_expert(names[id(parameter)], gradient)
    ]


def _whole(run: Run, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the weight as the forward pass computes with it: in the model's dtype, gathered where it is sharded."""
    shard = row_shard(parameter)
    return parameter.data if shard is None else shard.gather().to(run.transformer_config.params_dtype)


def _shard(run: Run, name: str, tensor: torch.Tensor) -> Shard:
    group = tensor_group(run.groups, expert=is_of_an_expert(name))
    return Shard(name, group.rank(), copied(tensor))


def copied(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor in fp32, copied. numpy must never see the tensor's own memory: that could not be freed by
    resizing it afterwards, as recomputation does."""
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()


def assemble(
    config: Config, shards: Iterable[Shard], *, lacks_some: bool = False
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Put the shards of all ranks together.

    Args:
        config: the configuration of the run, whose catalogue lists the tensors.
        shards: the shards of all ranks.
        lacks_some: whether tensors of the catalogue may be missing, because the layers have other ones instead.
    Returns:
        Whole tensors by name, in the order of a forward pass, without vocabulary padding, so that any two layouts
        have the same shapes; and what is wrong with them: a tensor that several ranks hold and disagree on (the
        lowest rank's is returned), or padding that is not zero.
    """
    by_name: dict[str, dict[int, np.ndarray]] = {}
    problems = []
    for shard in shards:
        seen = by_name.setdefault(shard.name, {}).setdefault(shard.tp_rank, shard.values)
        if not np.array_equal(seen, shard.values, equal_nan=True):
            problems.append(f"{shard.name}: ranks disagree")
    tensors = {}
    for parameter in parameters(config):
        if lacks_some and parameter.name not in by_name:
            continue
        parts = by_name.pop(parameter.name)
        whole = _join(parameter, [parts[rank] for rank in sorted(parts)])
        if parameter.tp_dim is None and not all(np.array_equal(whole, part, equal_nan=True) for part in parts.values()):
            problems.append(f"{parameter.name}: tensor-parallel ranks disagree")
        if parameter.true_rows is not None and np.any(whole[parameter.true_rows :]):
            problems.append(f"{parameter.name}: vocabulary padding is not zero")
        tensors[parameter.name] = whole[: parameter.true_rows] if parameter.true_rows is not None else whole
    assert not by_name, f"not in the catalogue: {sorted(by_name)}"
    return tensors, list(dict.fromkeys(problems))


def _join(parameter: Parameter, parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if parameter.tp_dim is None else joined(parts, parameter.tp_dim, parameter.tp_stride)


def joined(shards: Sequence[np.ndarray], axis: int, stride: int) -> np.ndarray:
    """Return the whole tensor whose shards along `axis` these are, in the order of the tensor-parallel ranks."""
    shape = list(shards[0].shape)
    shape[axis] *= len(shards)
    whole = np.empty(shape, shards[0].dtype)
    for rank, shard in enumerate(shards):
        for start, in_shard, size in pieces(shape[axis], stride, rank, len(shards)):
            whole[_along(axis, start, size)] = shard[_along(axis, in_shard, size)]
    return whole


def _along(axis: int, start: int, size: int) -> tuple[slice, ...]:
    """Return the index of some places of one axis, and of all of the others."""
    return (*(slice(None),) * axis, slice(start, start + size))


LOSS = "loss of every token"

# In the order of a forward pass: the module's name in its layer, and whether tensor parallelism divides its width.
_IN_A_LAYER = {
    "input_layernorm": False,
    "self_attention.linear_qkv": True,
    "self_attention.linear_q_proj": True,
    "self_attention.linear_q_down_proj": False,
    "self_attention.linear_q_up_proj": True,
    "self_attention.linear_kv_down_proj": False,
    "self_attention.linear_kv_up_proj": True,
    "self_attention.core_attention": True,
    "self_attention.linear_proj": False,
    "post_self_attn_layernorm": False,
    "pre_mlp_layernorm": False,
    "mlp.linear_fc1": True,
    "mlp.linear_fc2": False,
    "mlp": False,
    "post_mlp_layernorm": False,
    "": False,
}
_BEFORE, _AFTER = ("embedding",), ("decoder.final_layernorm",)


@dataclass(frozen=True)
class ModuleOutput:
    """One rank's output of one module for one microbatch, in fp32."""

    name: str
    microbatch: int
    position: tuple[int, int, int]
    """Tensor-, context- and data-parallel rank."""
    values_SBW: np.ndarray


class Taps:
    """Copies outputs from its construction until `close`: of each microbatch the first that a module puts out, since
    recomputation runs it again, and depths of multi-token prediction embed words with the same module."""

    def __init__(self, run: Run):
        self.parts: list[ModuleOutput] = []
        groups = run.groups
        self._place = (groups.tp.rank(), groups.cp.rank(), groups.dp.rank())
        self._calls: dict[str, int] = {}
        self._put_out: set[str] = set()
        """Names of modules that have put out something for the microbatch under way in their chunk."""
        self._handles = [module.register_forward_hook(self._copy(name)) for name, module in named_modules(run.chunks)]
        for chunk in unwrapped(run.chunks):
            names = {name for name, _ in named_modules([chunk])}
            self._handles.append(chunk.register_forward_pre_hook(self._forget(names)))

    def close(self) -> None:
        """Stop copying."""
        for handle in self._handles:
            handle.remove()

    def _forget(self, names: set[str]) -> Any:
        def hook(_module: torch.nn.Module, _inputs: object) -> None:
            self._put_out -= names

        return hook

    def _copy(self, name: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
            # Inside a backward pass, a module runs to recompute what it put out before.
            if torch._C._current_graph_task_id() != -1 or name in self._put_out:
                return
            self._put_out.add(name)
            call = self._calls[name] = self._calls.get(name, -1) + 1
            tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
            tensor = tensor[0] if name == LOSS and tensor.dim() == 3 else tensor  # without the depths
            tensor = tensor.t().unsqueeze(2) if name == LOSS else tensor.flatten(2)
            self.parts.append(ModuleOutput(name, call, self._place, copied(tensor)))

        return hook


def named_modules(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (global name, module) of the modules of this rank whose outputs are compared."""
    for chunk in unwrapped(chunks):
        modules = dict(chunk.named_modules())
        for name in (*_BEFORE, *_AFTER):
            if modules.get(name) is not None and (chunk.pre_process or name not in _BEFORE):
                yield name, modules[name]
        for local, layer in enumerate(chunk.decoder.layers):
            for inner in _IN_A_LAYER:
                module = modules.get(f"decoder.layers.{local}.{inner}".rstrip("."))
                if module is not None and not _is_summed_later(module):
                    yield f"decoder.layers.{layer.layer_number - 1}.{inner}".rstrip("."), module
        if chunk.post_process:
            yield LOSS, chunk


def _is_summed_later(module: Any) -> bool:
    """Return whether it puts out a part of a sum over the tensor-parallel ranks (`parts/linear/compute.py`)."""
    return any(getattr(one, "explicit_expert_comm", False) for one in (module, getattr(module, "linear_fc2", None)))


def forward_order(config: Config) -> list[str]:
    """Return the names of all modules that may have outputs, in the order of a forward pass."""
    layers = [
        f"decoder.layers.{layer}.{inner}".rstrip(".")
        for layer in range(config.model.num_layers)
        for inner in _IN_A_LAYER
    ]
    return [*_BEFORE, *layers, *_AFTER, LOSS]


def assemble_outputs(config: Config, parts: Iterable[ModuleOutput]) -> dict[str, list[np.ndarray]]:
    """Return whole outputs by name, [samples of the global batch, sequence, width], in the order of a forward pass.

    The value of every name is a list: one output, or one of each tensor-parallel rank where these hold the same by
    design.
    """
    by_module: dict[str, dict[tuple[int, int, int, int], np.ndarray]] = {}
    for part in parts:
        by_module.setdefault(part.name, {})[(part.microbatch, *part.position)] = part.values_SBW
    return {name: _whole_output(config, name, by_module[name]) for name in forward_order(config) if name in by_module}


def _whole_output(config: Config, name: str, parts: dict[tuple[int, int, int, int], np.ndarray]) -> list[np.ndarray]:
    microbatches, tensor, context, data = (1 + max(position[axis] for position in parts) for axis in range(4))
    inner = name.split(".", 3)[3] if name.count(".") > 2 else ""
    divides_width = name.startswith("decoder.layers.") and _IN_A_LAYER[inner]
    divides_sequence = config.layout.sequence_parallel and not divides_width and name != LOSS
    # A gated MLP's first matrix holds a part of the gate and a part of the other half on each rank.
    stride = 2 if inner == "mlp.linear_fc1" and config.model.gated_linear_unit else 1

    def over_context(microbatch: int, dp: int, tensor_ranks: Sequence[int]) -> np.ndarray:
        pieces = []
        for cp in range(context):
            shards = [parts[microbatch, tp, cp, dp] for tp in tensor_ranks]
            if divides_width:
                pieces.append(joined(shards, 2, stride))
            else:
                pieces.append(np.concatenate(shards, axis=0))
        return _in_order(pieces)

    divided = divides_width or divides_sequence
    replicas = [range(tensor)] if divided else [[tp] for tp in range(tensor)]
    # Microbatch m of data-parallel rank r holds the samples from (m x DP + r) x micro batch on: data/loader.py.
    return [
        np.concatenate(
            [over_context(microbatch, dp, ranks) for microbatch in range(microbatches) for dp in range(data)], axis=1
        ).swapaxes(0, 1)
        for ranks in replicas
    ]


def _in_order(pieces: list[np.ndarray]) -> np.ndarray:
    """Return the sequence from what context-parallel ranks hold of it: of 2n chunks, rank r has number r and 2n - 1 -
    r."""
    if len(pieces) == 1:
        return pieces[0]
    chunks: dict[int, np.ndarray] = {}
    for rank, piece in enumerate(pieces):
        chunks |= zip(context_chunks(rank, len(pieces)), np.split(piece, 2), strict=True)
    return np.concatenate([chunks[index] for index in range(2 * len(pieces))])
