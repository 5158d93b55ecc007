"""Computes norms over the whole model, whatever the layout."""

import torch

from megatron_ext.model.names import global_named_parameters, is_of_an_expert
from megatron_ext.parallel.rows import local_part
from megatron_ext.parts.catalogue import parameters
from megatron_ext.train.run import Run


def parameters_norm(run: Run) -> float:
    """Return the L2 norm of all parameters, each counted once: replicas and tied copies do not count again.
    Collective."""
    replicated = {parameter.name for parameter in parameters(run.config) if parameter.tp_dim is None}
    totals = torch.zeros(2, dtype=torch.float64, device=run.device.torch_device)
    with run.gathered_parameters(), torch.no_grad():
        for name, parameter in global_named_parameters(run.chunks):
            is_tied_copy = getattr(parameter, "shared", False)
            if not is_tied_copy and (run.groups.tp.rank() == 0 or name not in replicated):
                totals[int(is_of_an_expert(name))] += (
                    _computed_with(run, parameter).float().square().sum(dtype=torch.float64)
                )
    holders = run.sharding.holders_of_one_copy(run.optimizer, run.groups)
    for total, group in zip(totals, holders, strict=True):
        torch.distributed.all_reduce(total, group=group)
    return float(totals.sum().sqrt())


def _computed_with(run: Run, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's part as the forward pass uses it: rows are kept in fp32, whatever is computed with."""
    return local_part(parameter).to(run.transformer_config.params_dtype)
