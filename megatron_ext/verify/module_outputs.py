"""Gathers what the modules of a model put out in the first step, whole, from the parts that the ranks of any layout
hold.

On the ranks, `Taps(run)` copies the outputs of the modules named below while the first step runs; in the parent,
`assemble_outputs` puts the parts of all ranks together by global module name, so that two layouts can be compared
output by output, in the order of a forward pass.

Shapes: S sequence (of this rank), B samples of a microbatch, W width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.config.schema import Config
from megatron_ext.model.names import unwrapped
from megatron_ext.train.run import Run
from megatron_ext.verify.gather import copied, joined

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
    return {name: _whole(config, name, by_module[name]) for name in forward_order(config) if name in by_module}


def _whole(config: Config, name: str, parts: dict[tuple[int, int, int, int], np.ndarray]) -> list[np.ndarray]:
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
