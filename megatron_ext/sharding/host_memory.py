"""`--optimizer-cpu-offload`: optimizer state and update in host memory.

megatron-core's HybridDeviceOptimizer takes the place of the torch optimizer inside of each of its optimizers. Of the
tensors that are updated (fp32 weights, the fp32 masters of 16-bit weights, or this rank's shards of either) it copies
the first ones to host memory, until host memory has `--optimizer-offload-fraction` of their elements, and updates the
copies: gradients travel to the host, updated values back. On CPU processes "host" and "device" are the same memory; who
updates what, and every copy, are as on a GPU.

A master is in host memory alone. On the device it has storage only during the update, between the copy back and the
rounding to the 16-bit weight: for each parameter 4 bytes of the master and the states (Adam's 8) leave the device.

megatron-core's own wiring is not used: it decides by `Tensor.is_cuda`, loses the state of torch's optimizers on the
device (hybrid_optimizer.py, _move_new_state_to_right_device), fails in Float16OptimizerWithFloat16Params and on fp32
shards, and has the masters leave the device under the precision-aware optimizer alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.device.device_protocol import Device
from megatron_ext.optim.torch_optimizer import Group, is_torchs, over, torch_optimizer
from megatron_ext.sharding.parts import OptimizerPart
from megatron_ext.sharding.scheme import Reduced, Sharding, Watcher


class InHostMemory(Sharding):
    """Wraps a scheme; the optimizer state chosen by flags lives and updates in host memory."""

    def __init__(self, scheme: Sharding):
        super().__init__(scheme.config)
        self._scheme = scheme
        self.builds_on_meta = scheme.builds_on_meta
        self.lives_on_host = scheme.lives_on_host

    @property
    def host_memory_flags(self) -> tuple[str, ...]:
        return ("--optimizer-cpu-offload", *self._scheme.host_memory_flags)

    def shard(
        self,
        chunks: Sequence[torch.nn.Module],
        core: TransformerConfig,
        groups: ProcessGroupCollection,
        device: Device,
    ) -> Sequence[_BaseDataParallel]:
        return self._scheme.shard(chunks, core, groups, device)

    def optimizer(
        self, chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection, device: Device
    ) -> ChainedOptimizer:
        optimizer = self._scheme.optimizer(chunks, groups, device)
        for part in self._scheme.parts(optimizer):
            part.core.optimizer = HostOptimizer(part, self.config.optimizer, pin=device.kind == "cuda")
        return optimizer

    def parts(self, optimizer: ChainedOptimizer) -> list[OptimizerPart]:
        parts = self._scheme.parts(optimizer)
        for part in parts:
            part.updater = part.core.optimizer
        return parts

    def gathered(self, chunks: Sequence[_BaseDataParallel]) -> AbstractContextManager[None]:
        return self._scheme.gathered(chunks)

    def gathered_before_update(self, chunks: Sequence[_BaseDataParallel]) -> AbstractContextManager[None]:
        return self._scheme.gathered_before_update(chunks)

    def weights_in_place(self, chunks: Sequence[_BaseDataParallel]) -> AbstractContextManager[None]:
        return self._scheme.weights_in_place(chunks)

    def reduced_gradients(self, chunk: _BaseDataParallel) -> Reduced:
        return self._scheme.reduced_gradients(chunk)

    def watch(self, chunk: _BaseDataParallel, watcher: Watcher) -> None:
        self._scheme.watch(chunk, watcher)

    def holders_of_one_copy(
        self, optimizer: ChainedOptimizer, groups: ProcessGroupCollection
    ) -> tuple[ProcessGroup, ProcessGroup]:
        return self._scheme.holders_of_one_copy(optimizer, groups)

    def held_weights(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        return self._scheme.held_weights(chunk)

    def held_gradients(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        return self._scheme.held_gradients(chunk)

    def finish_update(self, optimizer: ChainedOptimizer) -> None:
        self._scheme.finish_update(optimizer)
        for part in self.parts(optimizer):
            part.core.optimizer.release()

    @torch.no_grad()
    def reload_masters(self, optimizer: ChainedOptimizer) -> None:
        for part in self.parts(optimizer):
            for weight, main in part.main_parameters():
                if main.dtype != weight.dtype:
                    master = part.updater.master_of(main)
                    master.copy_(part.own(weight, weight).view_as(master))
            part.updater.refresh()


class HostOptimizer(HybridDeviceOptimizer):
    """Updates some of the tensors of `part` in host memory, the rest as before. It is the part's `Updater`.

    Args:
        part: before its first update.
        pin: whether there is a device to pin host memory for.
    """

    def __init__(self, part: OptimizerPart, config: OptimizerConfig, *, pin: bool):
        self._pin_masters = pin and not config.no_pin_cpu_params
        self._masters = {id(main) for weight, main in part.main_parameters() if main.dtype != weight.dtype}
        super().__init__(
            part.core.optimizer.param_groups,
            offload_fraction=config.optimizer_offload_fraction,
            cpu_optimizer_cls=torch_optimizer(config),
            gpu_optimizer_cls=partial(_device_optimizer, part.core.optimizer, config),
            pin_cpu_grads=pin and not config.no_pin_cpu_grads,
            pin_cpu_params=self._pin_masters,
            overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
        )
        self.release()

    def add_param_group(self, param_group: Group) -> None:
        """Add the group as it is: torch would refuse shards of fp32 weights, which are views."""
        self.param_groups.append(param_group)

    @property
    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch optimizers that update, on the device or in host memory."""
        return list(self.sub_optimizers)

    @property
    def host_optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch optimizers that update in host memory."""
        return list(self.cpu_optimizers)

    def updated_by(self, main: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        """Return the torch optimizer that updates `main`, and the tensor that it updates: `main` itself, or its copy in
        host memory."""
        return self._updates[id(main)], self.param_to_inner_param[main]

    def master_of(self, main: torch.Tensor) -> torch.Tensor:
        """Return `main`, or its copy in host memory where that alone has storage."""
        return self.param_to_inner_param[main] if id(main) in self._masters else main

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for main in self._away:
            main.untyped_storage().resize_(main.numel() * main.element_size())
        super().step(closure)

    def release(self) -> None:
        """Free the masters on the device. Call it once the weights have been made from them."""
        for main in self._away:
            main.untyped_storage().resize_(0)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy weights that were changed on the device to host memory, where they are updated."""
        for main, copy in self.gpu_params_map_cpu_copy.items():
            if id(main) not in self._masters:
                copy.copy_(main)

    def update_fp32_param_by_new_param(self) -> None:
        """Do nothing for the engine, which does not know the masters of this class: see `reload_model_params`."""

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple:
        threshold = offload_fraction * sum(main.numel() for group in self.param_groups for main in group["params"])
        on_host: list[Group] = []
        on_device: list[Group] = []
        copies: dict[torch.Tensor, torch.Tensor] = {}
        moved = 0
        for group in self.param_groups:
            moving, staying = [], []
            for main in group["params"]:
                if moved < threshold:
                    moved += main.numel()
                    copies[main] = _host_copy(main, pin=self._pin_masters)
                    moving.append(copies[main])
                else:
                    staying.append(main)
            on_host += [{**group, "params": moving}] if moving else []
            on_device += [{**group, "params": staying}] if staying else []
        return on_host, on_device, copies, {copy: main for main, copy in copies.items()}, {}

    def _init_sub_optimizers(self) -> None:
        super()._init_sub_optimizers()
        by_inner = {
            id(inner): torch_optimizer
            for torch_optimizer in self.sub_optimizers
            for group in torch_optimizer.param_groups
            for inner in group["params"]
        }
        self._updates = {id(main): by_inner[id(inner)] for main, inner in self.param_to_inner_param.items()}
        self._away = [main for main in self.gpu_params_map_cpu_copy if id(main) in self._masters]


def _host_copy(main: torch.Tensor, *, pin: bool) -> torch.Tensor:
    return torch.empty(main.shape, dtype=main.dtype, device="cpu", pin_memory=pin).copy_(main.detach())


def _device_optimizer(
    built: torch.optim.Optimizer, config: OptimizerConfig, groups: list[Group]
) -> torch.optim.Optimizer:
    """Return the engine's own (torch's, Transformer Engine's or apex's), or torch's where asked for, over `groups`."""
    if config.use_torch_optimizer_for_cpu_offload and not is_torchs(built, config):
        return over(groups, config)
    built.param_groups = groups
    return built
