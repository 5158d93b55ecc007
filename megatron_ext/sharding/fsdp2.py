"""`--use-torch-fsdp2` keeps weights, gradients and optimizer state in shards, by torch's `fully_shard`.

Each rank keeps its rows of every weight in fp32: at once the master copy, and the source that is gathered (in bf16
under --bf16) for the forward and backward pass of a layer and freed after it. Gradients are summed in fp32 over the
data-parallel ranks after the backward pass of every microbatch, so that they are never whole either, and divided once,
by the tokens of the global batch. The optimizer updates the rows as plain tensors.

Where a pipeline's schedule splits backward passes, products of weights come after the pass in which torch reduces. Then
gradients stay whole, in fp32, until the step's last product, and are summed over the ranks once. The products need no
weights, which are freed after the pass as ever.

With `--torch-fsdp2-cpu-offload` the rows, their gradients and the optimizer's state are in host memory: rows are copied
to the device before they are gathered, reduced gradients to the host, which updates.

megatron-core's own wrapper is for CUDA alone and averages gradients over the ranks, whatever
`calculate_per_token_loss` says; what is around it (the schedule, the gradients of sequence-parallel norms) is used.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from megatron_ext.config.derived.pipeline_split import splits_backward
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.device.many_tensors import scale_
from megatron_ext.model.initialize import initialize
from megatron_ext.model.names import global_named_parameters
from megatron_ext.optim.settings import optimizer_config
from megatron_ext.parallel.narrow import Held, Narrow, agree, narrow_of
from megatron_ext.parallel.rows import RowShard, local_part, mark
from megatron_ext.sharding.engine import build_optimizer, ddp_config
from megatron_ext.sharding.row_shards import HostRowOptimizer, RowSharding, RowShardOptimizer, local_gradient
from megatron_ext.sharding.scheme import Watcher

# Nothing writes into the losses that the model returns, whether they are a view or not.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")


class FSDP2(RowSharding):
    """torch's `fully_shard`, on the device or in host memory."""

    builds_on_meta = True

    def __init__(self, config: Config):
        super().__init__(config)
        self.lives_on_host = config.layout.torch_fsdp2_cpu_offload

    @property
    def host_memory_flags(self) -> tuple[str, ...]:
        return ("--torch-fsdp2-cpu-offload",) if self.lives_on_host else ()

    def shard(
        self,
        chunks: Sequence[torch.nn.Module],
        core: TransformerConfig,
        groups: ProcessGroupCollection,
        device: Device,
    ) -> list["TorchFSDP"]:
        settings = ddp_config(self.config)
        wrapped = [TorchFSDP(self.config, core, settings, chunk, groups, device.torch_device) for chunk in chunks]
        initialize(wrapped, self.config, groups)
        return wrapped

    def optimizer(
        self, chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection, device: Device
    ) -> ChainedOptimizer:
        settings = optimizer_config(self.config, distributed=False, overlaps=self.config.layout.overlap_param_gather)
        settings.bf16 = False  # the shards are fp32, whatever is computed with
        built = build_optimizer(chunks, settings, self.config, groups)
        over_rows = self._over_rows(groups, device)
        return ChainedOptimizer([over_rows(inner) for inner in built.chained_optimizers])

    def gathered(self, chunks: Sequence[_BaseDataParallel]) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def averaged(self, optimizer: ChainedOptimizer, chunks: Sequence[_BaseDataParallel]) -> Iterator[None]:
        """Exchange weights and averages inside, and gather either anew: without resharding a forward pass alone leaves
        gathered weights in the modules, and the next pass would compute with these."""
        with super().averaged(optimizer, chunks):
            _reshard(chunks)
            yield
        _reshard(chunks)

    def watch(self, chunk: Any, watcher: Watcher) -> None:
        """Watch each gradient as it is made: a whole gradient lives only until its layer's reduction."""
        watcher.register(chunk)
        names = {id(parameter): name for name, parameter in global_named_parameters([chunk])}
        chunk.when_gathered(lambda parameter, weight: watcher.watch(names[id(parameter)], weight))

    def held_weights(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        return (local_part(parameter) for parameter in chunk.parameters())

    def held_gradients(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        """Yield nothing: the gradients hang on the rows that the optimizer updates."""
        return iter(())

    def _over_rows(self, groups: ProcessGroupCollection, device: Device) -> Callable[[Any], RowShardOptimizer]:
        """Return the optimizer over this rank's rows, made from one of megatron-core's."""
        dtype = getattr(torch, self.config.training.params_dtype)
        if not self.lives_on_host:
            return partial(RowShardOptimizer, compute_dtype=dtype, groups=groups)
        return partial(
            HostRowOptimizer,
            compute_dtype=dtype,
            groups=groups,
            device=device.torch_device,
            config=self.config.optimizer,
        )


class TorchFSDP(TorchFullyShardedDataParallel):
    """A model chunk in shards. Its weights have no values yet: `model.initialize` fills the rows of each rank.

    Args:
        module: module on the meta device, so that no rank ever holds a whole weight.
        device: device of the forward and backward passes, and of the shards unless they are offloaded.
    """

    def __init__(
        self,
        config: Config,
        transformer_config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        groups: ProcessGroupCollection,
        device: torch.device,
    ):
        _BaseDataParallel.__init__(self, config=transformer_config, module=module)
        self.ddp_config = ddp_config
        self.compute_dtype = transformer_config.params_dtype
        attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
        module.float()
        self.units = _units(module, shared=config.model.shares_word_embeddings)
        mesh = _mesh(groups, device.type)
        offloaded = config.layout.torch_fsdp2_cpu_offload
        pinned = device.type == "cuda" and not config.optimizer.no_pin_cpu_params
        previous = None
        for unit in self.units:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=not config.layout.torch_fsdp2_no_reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=self.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
                ),
                offload_policy=CPUOffloadPolicy(pin_memory=pinned) if offloaded else OffloadPolicy(),
            )
            assert isinstance(unit, FSDPModule)
            # The sum over the ranks; `scale_gradients` divides by the tokens of the global batch.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if transformer_config.recompute_granularity is not None and unit is not module:
                # torch learns the order of the backward pass from the forward pass, which recomputation repeats.
                unit.set_modules_to_backward_prefetch([previous] if previous is not None else [])
                previous = unit
        module.to_empty(device="cpu" if offloaded else device)
        self._device = device
        self._added_over_tensor_ranks: list[torch.nn.Parameter] = []
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            for attribute, value in attributes[name].items():
                setattr(parameter, attribute, value)
            mark(parameter, _rows(parameter, groups))
            if offloaded and groups.tp.size() > 1 and not getattr(parameter, "tensor_model_parallel", False):
                self._added_over_tensor_ranks.append(parameter)
        self._narrow = self._gather_in_eight_bits(groups.intra_dp_cp)
        self.reduces_once = splits_backward(config.layout)
        if self.reduces_once:
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(False)
            module.set_manual_backward_finalization(True)
            self.when_gathered(lambda parameter, weight: setattr(weight, "divided", parameter))

    def when_gathered(self, action: Callable[[torch.nn.Parameter, torch.nn.Parameter], object]) -> None:
        """Call `action` with each weight, divided and gathered, when it is first gathered: it stays the same tensor."""
        for unit in self.units:
            divided = dict(unit.named_parameters())
            _at_first_forward(
                unit,
                lambda unit, divided=divided: [
                    action(divided[name], weight) for name, weight in unsharded_parameters(unit)
                ],
            )

    def zero_grad_buffer(self) -> None:
        """Forget the gradients of the last step. Where weights are gathered in eight bits, find the scales of those
        that this step computes with; collective."""
        for parameter in self.parameters():
            parameter.grad = None
        if self._narrow:
            agree([each.held() for each in self._narrow], self._narrow[0].ranks)

    def _gather_in_eight_bits(self, ranks: ProcessGroup) -> list["NarrowRows"]:
        """Have torch gather the weights in eight bits that have a `Narrow`."""
        states: Any = [unit._get_fsdp_state() for unit in self.units if isinstance(unit, FSDPModule)]
        return [
            NarrowRows(narrow, one, ranks, self.compute_dtype)
            for state in states
            for group in state._fsdp_param_groups
            for one in group.fsdp_params
            if (narrow := narrow_of(one.sharded_param)) is not None and ranks.size() > 1
        ]

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce the gradients of a step whose backward passes were split. Gradients that megatron-core is to add up
        over tensor-parallel ranks wait on the device in `main_grad`, where megatron-core puts their sum, until
        `scale_gradients`."""
        if self.reduces_once:
            module: Any = self.module
            module.set_requires_gradient_sync(True)
            module.finalize_backward()
            module.set_requires_gradient_sync(False)
        for parameter in self._added_over_tensor_ranks:
            if parameter.grad is not None:
                waiting: Any = parameter
                waiting.main_grad = parameter.grad.to(self._device)

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiply the gradients by `scaling_factor`."""
        scaled = []
        for parameter in self.parameters():
            if parameter.grad is not None:
                rows = local_gradient(parameter)
                waiting: Any = parameter
                if hasattr(parameter, "main_grad"):
                    rows.copy_(waiting.main_grad._local_tensor)
                    del waiting.main_grad
                scaled.append(rows)
        scale_(scaled, scaling_factor)


class NarrowRows:
    """A weight of which each rank has equally many rows, gathered in eight bits by a layer that is trained, and as it
    is by one that is not. torch calls the methods of the rows, before and after a gather of a unit's weights.

    The gathered weight has no memory while there are its bytes.

    Args:
        weight: torch's `FSDPParam`.
        ranks: the ranks that have the other rows.
        dtype: the type that a layer computes in, from which numbers are rounded.
    """

    def __init__(self, narrow: Narrow, weight: Any, ranks: ProcessGroup, dtype: torch.dtype):
        self.narrow, self.ranks, self._weight, self._dtype = narrow, ranks, weight, dtype
        self._sends_bytes: bool | None = None
        rows = weight.sharded_param._local_tensor
        rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = self.before, self.after

    def held(self) -> Held:
        """Return this rank's rows as they are computed with."""
        rows = self._weight.sharded_param._local_tensor
        own = rows.detach().to(self._dtype).view(-1)
        return Held(self.narrow, own, self.ranks.rank() * own.numel())

    def before(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        """Return what is sent of this rank's rows, and nothing for `after` to know."""
        _, own, start = self.held()
        sends_bytes = module.training and self.narrow.largest is not None
        if self._sends_bytes not in (None, sends_bytes):
            self._weight.all_gather_outputs = []  # of another size
        self._sends_bytes = sends_bytes
        return (self.narrow.narrowed(own, start) if sends_bytes else own,), None

    def after(
        self, gathered: tuple[torch.Tensor], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]] | None:
        """Take the gathered bytes, or fill the weight.

        Returns:
            The weight, and the memory that torch frees with it, at the first gather (without `out`).
        """
        shape = self._weight.sharded_param.shape
        weight = torch.empty(shape, dtype=dtype, device=gathered[0].device) if out is None else out
        self.narrow.values = gathered[0] if self._sends_bytes else None
        if not self._sends_bytes:
            weight.detach().copy_(gathered[0].view(weight.shape))
        elif out is not None:
            weight.untyped_storage().resize_(0)
        return (weight, (weight,)) if out is None else None


def _reshard(chunks: Sequence[Any]) -> None:
    """Free the gathered weights of all units."""
    for chunk in chunks:
        for unit in chunk.units:
            unit.reshard()


def _units(module: torch.nn.Module, *, shared: bool) -> list[torch.nn.Module]:
    """Return the modules whose weights are gathered together, inner modules first.

    The output layer's weight is read outside of its own forward pass, and belongs to the model itself; so do shared
    word embeddings, which are needed at both ends.
    """
    kinds = (TransformerLayer,) if shared else (TransformerLayer, LanguageModelEmbedding)
    return [*(part for part in module.modules() if isinstance(part, kinds)), module]


def _mesh(groups: ProcessGroupCollection, device_type: str) -> DeviceMesh:
    """Return the data-parallel ranks; with several optimizer instances, replicas of shards."""
    if groups.dp_cp.size() == groups.intra_dp_cp.size():
        return DeviceMesh.from_group(groups.dp_cp, device_type)
    ranks = torch.tensor(torch.distributed.get_process_group_ranks(groups.dp_cp))
    return DeviceMesh.from_group(
        [groups.inter_dist_opt, groups.intra_dp_cp],
        device_type,
        mesh=ranks.view(groups.inter_dist_opt.size(), groups.intra_dp_cp.size()),
        mesh_dim_names=("replicate", "shard"),
    )


def _rows(parameter: DTensor, groups: ProcessGroupCollection) -> RowShard:
    """Return this rank's rows as torch cuts, which is as torch.chunk does: equal parts, rounded up, until nothing is
    left."""
    group, rows = groups.intra_dp_cp, parameter.size(0)
    first = min(group.rank() * -(-rows // group.size()), rows)
    replica = groups.dp_cp.rank() // group.size()
    return RowShard(parameter._local_tensor, first, tuple(parameter.shape), group, replica)


def unsharded_parameters(unit: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the unit's own weights, gathered, inside of its forward pass; weights of units within it are left out."""
    for name, parameter in unit.named_parameters():
        if not isinstance(parameter, DTensor):
            yield name, parameter


def _at_first_forward(module: torch.nn.Module, action: Callable[[torch.nn.Module], object]) -> None:
    def run(module: torch.nn.Module, _inputs: object) -> None:
        handle.remove()
        action(module)

    handle = module.register_forward_pre_hook(run)
