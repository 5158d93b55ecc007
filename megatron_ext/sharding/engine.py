"""Wraps model chunks and builds optimizers with megatron-core, from our configuration, for all sharding schemes."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import ParamKey, ParamPredicate, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.model.initialize import initialize
from megatron_ext.model.names import catalogued, global_named_parameters
from megatron_ext.optim.gradient_norm import replace_loops
from megatron_ext.optim.torch_optimizer import as_registered
from megatron_ext.parallel.matrices import Matrix
from megatron_ext.parallel.rows import row_shard
from megatron_ext.parts.catalogue import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.update_factors import factors
from megatron_ext.sharding.parts import OptimizerPart

# The package has a function of this name, too.
_FINALIZE: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
_reset_of_routers = _FINALIZE.reset_model_temporary_tensors


def ddp_config(config: Config, **scheme: Any) -> DistributedDataParallelConfig:
    """Return megatron-core's settings of the reduction of gradients over the data-parallel ranks.

    Args:
        scheme: settings of one scheme, added to or in place of the settings that all schemes share.
    """
    training, layout = config.training, config.layout
    common = {
        "grad_reduce_in_fp32": training.accumulate_allreduce_grads_in_fp32,
        "overlap_param_gather": layout.overlap_param_gather,
        "use_distributed_optimizer": layout.use_distributed_optimizer,
        "num_distributed_optimizer_instances": layout.num_distributed_optimizer_instances,
        "bucket_size": layout.ddp_bucket_size,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
    }
    return DistributedDataParallelConfig(**(common | scheme))


def initialized(
    chunks: Sequence[torch.nn.Module],
    config: Config,
    core: TransformerConfig,
    groups: ProcessGroupCollection,
    device: Device,
) -> list[torch.nn.Module]:
    """Return the chunks on the device, with initial weights, in the wrapper of 16-bit training where there is one."""
    for chunk in chunks:
        chunk.to(device.torch_device)
    if config.training.mixed_precision:
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    initialize(chunks, config, groups)
    return list(chunks)


def build_optimizer(
    chunks: Sequence[torch.nn.Module], settings: CoreOptimizerConfig, config: Config, groups: ProcessGroupCollection
) -> Any:
    """Build megatron-core's optimizer over wrapped chunks whose weights are already initialized.

    The torch optimizer inside of it is the one that `config` chooses, as config/derived/optimizers.py registers it. Its
    parameter groups follow the catalogue: whether a parameter decays, its learning rate, and which of two optimizers
    updates it.
    """
    replace_loops()
    if traits_of(config.optimizer).needs_whole_matrices:
        _mark_matrices(chunks, config, groups)
    _FINALIZE.reset_model_temporary_tensors = reset_routers
    modules: Any = list(chunks)
    built = get_megatron_optimizer(
        settings, modules, _of_groups(chunks, config), use_gloo_process_groups=False, pg_collection=groups
    )
    for part in getattr(built, "chained_optimizers", [built]):
        if part.optimizer is not None:
            part.optimizer = as_registered(part.optimizer, config.optimizer)
    return built


def _mark_matrices(chunks: Sequence[torch.nn.Module], config: Config, groups: ProcessGroupCollection) -> None:
    """Mark every matrix of which this rank has a part with the place of the part in the whole matrix."""
    known = catalogued(chunks, config)
    for _, weight in global_named_parameters(chunks):
        one, rows = known[id(weight)], row_shard(weight)
        group = groups.tp if one.expert is None else groups.expt_tp
        divided = None if one.tp_dim is None or group.size() == 1 else one.tp_dim - 2
        if one.update == "matrix":
            shape = tuple(weight.shape if rows is None else rows.shape)
            vars(weight)["matrix"] = Matrix(shape, one.sections, divided, group, rows)


def _of_groups(chunks: Sequence[torch.nn.Module], config: Config) -> dict[Any, Any]:
    """Return megatron-core's overrides of parameter groups: a predicate of parameters -> the values of their group that
    are not the default."""
    own = {key: _group(parameter, config) for key, parameter in catalogued(chunks, config).items()}
    distinct = {str(values): values for values in own.values() if values}
    return {
        ParamKey(predicate=ParamPredicate(name, lambda weight, values=values: own[id(weight)] == values)): values
        for name, values in distinct.items()
    }


def _group(parameter: Parameter, config: Config) -> dict[str, Any]:
    """Return the values of a parameter's group that are not the default."""
    found = factors(config, parameter)
    values: dict[str, Any] = {"wd_mult": found.weight_decay, "lr_mult": found.rate, "eps_mult": found.epsilon}
    values = {name: factor for name, factor in values.items() if factor != 1.0}
    if config.optimizer.decoupled_lr is not None and parameter.name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        values["is_decoupled_lr"] = True
    if traits_of(config.optimizer).of_elements is not None:
        values["update"] = parameter.update
    return values


def reset_routers(config: TransformerConfig, model: Sequence[torch.nn.Module]) -> None:
    """Reset the counts that the routers of experts made in a step: megatron-core walks over all modules for it, experts
    or none."""
    if config.num_moe_experts is not None:
        _reset_of_routers(config, model)


def updating(optimizer: ChainedOptimizer, kind: type[OptimizerPart]) -> list[OptimizerPart]:
    """Return the parts of `optimizer` as `kind`, but for those that have nothing to update on this rank."""
    return [kind(core) for core in optimizer.chained_optimizers if core.optimizer is not None]


def for_chunks(functions: list) -> Any:
    """Return the form that megatron-core wants: a function for one model chunk, a list for several."""
    return functions[0] if len(functions) == 1 else functions
