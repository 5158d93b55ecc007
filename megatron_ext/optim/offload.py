"""`--optimizer-cpu-offload`: optimizer state and update in host memory.

megatron-core's HybridDeviceOptimizer takes the place of the torch optimizer inside of each of its optimizers. Of the
tensors that are updated (fp32 weights, the fp32 masters of 16-bit weights, or this rank's shards of either) it copies
the first ones to host memory, until `--optimizer-offload-fraction` of their elements is there, and updates them there:
gradients travel to the host, updated values back. On CPU processes "host" and "device" are the same memory; who
updates what, and every copy, are as on a GPU.

A master is in host memory alone. On the device it has storage only during the update, between the copy back and the
rounding to the 16-bit weight: 8 bytes of moments and 4 of the master leave the device for each parameter.

megatron-core's own wiring is not used: it decides by `Tensor.is_cuda`, loses the state of torch's optimizers on the
device (hybrid_optimizer.py, _move_new_state_to_right_device), fails in Float16OptimizerWithFloat16Params and on fp32
shards, and has the masters leave the device under the precision-aware optimizer alone.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.row_shards import RowShards

Group = dict[str, Any]
"""A parameter group of torch."""


class HostOptimizer(HybridDeviceOptimizer):
    """Updates part of the tensors of `part` in host memory, the rest as before.

    Args:
        part: one of megatron-core's optimizers, before its first update.
        pin: whether there is a device to pin host memory for.
    """

    def __init__(self, part: MegatronOptimizer, config: OptimizerConfig, *, pin: bool):
        self._pin_masters = pin and not config.no_pin_cpu_params
        self._masters = {id(main) for weight, main in main_parameters(part) if main.dtype != weight.dtype}
        super().__init__(
            part.optimizer.param_groups,
            offload_fraction=config.optimizer_offload_fraction,
            cpu_optimizer_cls=torch_rule(config),
            gpu_optimizer_cls=partial(_device_rule, part.optimizer, config),
            pin_cpu_grads=pin and not config.no_pin_cpu_grads,
            pin_cpu_params=self._pin_masters,
            overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
        )
        self.release()

    def add_param_group(self, param_group: Group) -> None:
        """As it is: torch would refuse shards of fp32 weights, which are views."""
        self.param_groups.append(param_group)

    def updated_by(self, main: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        """Who updates `main`, and which tensor: itself, or its copy in host memory."""
        return self._rules[id(main)], self.param_to_inner_param[main]

    def master_of(self, main: torch.Tensor) -> torch.Tensor:
        """`main`, or its copy in host memory where that alone has storage."""
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
        """Copy the weights that are updated in host memory there, after they were changed on the device."""
        for main, copy in self.gpu_params_map_cpu_copy.items():
            if id(main) not in self._masters:
                copy.copy_(main)

    def update_fp32_param_by_new_param(self) -> None:
        """For the engine, which does not know the masters of this class: see `reload_model_params`."""

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
            id(inner): rule for rule in self.sub_optimizers for group in rule.param_groups for inner in group["params"]
        }
        self._rules = {id(main): by_inner[id(inner)] for main, inner in self.param_to_inner_param.items()}
        self._away = [main for main in self.gpu_params_map_cpu_copy if id(main) in self._masters]


def offload(optimizer: ChainedOptimizer, config: OptimizerConfig, *, pin: bool) -> None:
    """Let every part of `optimizer` update in host memory what the flags say."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            part.optimizer = HostOptimizer(part, config, pin=pin)


def finish_update(optimizer: ChainedOptimizer) -> None:
    """Free what only the update needed. Call it after every update."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HostOptimizer):
            part.optimizer.release()


@torch.no_grad()
def reload_model_params(optimizer: MegatronOptimizer) -> None:
    """Make every master, wherever it is, from the weights of the model."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(part.optimizer, HostOptimizer):
            part.reload_model_params()
            continue
        for weight, main in main_parameters(part):
            if main.dtype != weight.dtype:
                master = part.optimizer.master_of(main)
                master.copy_(_shard(part, weight).view_as(master))
        refresh(part)


def refresh(part: MegatronOptimizer) -> None:
    """Call it after weights of the model that `part` updates were changed by another."""
    if isinstance(part.optimizer, HostOptimizer):
        part.optimizer.refresh()


def rules_of(part: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers that update the tensors of `part`."""
    rules: Any = part.optimizer
    return list(rules.sub_optimizers) if isinstance(rules, HostOptimizer) else [rules]


def host_rules_of(part: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Those of them that do it in host memory."""
    rules: Any = part.optimizer
    return list(rules.cpu_optimizers) if isinstance(rules, HostOptimizer) else []


def updated_by(part: MegatronOptimizer, main: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """Which of them updates `main`, and the tensor by which it knows it: its state's key and its newest value."""
    rules: Any = part.optimizer
    return rules.updated_by(main) if isinstance(rules, HostOptimizer) else (rules, main)


def master_of(part: MegatronOptimizer, main: torch.Tensor) -> torch.Tensor:
    """Where the values of `main` are between updates."""
    rules: Any = part.optimizer
    return rules.master_of(main) if isinstance(rules, HostOptimizer) else main


def main_parameters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """(weight of the model, what the optimizer updates: itself, its fp32 copy, or a flat shard of either)."""
    if isinstance(part, RowShards):
        yield from part.weights
    elif isinstance(part, DistributedOptimizer):
        for parameter, (group, index) in part.model_param_group_index_map.items():
            yield parameter, part.optimizer.param_groups[group]["params"][index]
    elif isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)
    else:
        for weights, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(weights, copies, strict=True)
        for weights in part.fp32_from_fp32_groups:
            yield from zip(weights, weights, strict=True)


def _shard(part: Any, weight: torch.nn.Parameter) -> torch.Tensor:
    """What `part` updates of `weight`, in the model's own memory."""
    if not isinstance(part, DistributedOptimizer):
        return weight
    own = part._get_model_param_range_map(weight)["param"]
    return weight.view(-1)[own.start : own.end]


def _host_copy(main: torch.Tensor, *, pin: bool) -> torch.Tensor:
    return torch.empty(main.shape, dtype=main.dtype, device="cpu", pin_memory=pin).copy_(main.detach())


def torch_rule(config: OptimizerConfig) -> Any:
    """What makes torch's own optimizer of parameters or groups of them."""
    return partial(torch.optim.AdamW, fused=True) if config.optimizer == "adam" else torch.optim.SGD


def _device_rule(built: torch.optim.Optimizer, config: OptimizerConfig, groups: list[Group]) -> torch.optim.Optimizer:
    """The engine's own (torch's, Transformer Engine's or apex's), or torch's where that is asked for, over `groups`."""
    if config.use_torch_optimizer_for_cpu_offload and not isinstance(built, torch.optim.AdamW | torch.optim.SGD):
        built = torch_rule(config)([{**group, "params": [torch.empty(0)]} for group in groups])
    built.param_groups = groups
    return built
