"""Computes the L2 norm of all parameters of the model, the same in every layout."""

import torch

from megatron_ext.model.names import catalogued, global_named_parameters, is_of_an_expert
from megatron_ext.parallel.groups import tensor_group
from megatron_ext.parallel.rows import local_part
from megatron_ext.train.run import Run


def parameters_norm(run: Run) -> float:
    """Return the L2 norm of all parameters, each counted once: replicas and tied copies do not count again.
    Collective."""
    totals = torch.zeros(2, dtype=torch.float64, device=run.device.torch_device)
    with run.gathered_parameters(), torch.no_grad():
        known = catalogued(run.chunks, run.config)
        for name, weight in global_named_parameters(run.chunks):
            of_expert = is_of_an_expert(name)
            is_divided = known[id(weight)].tp_dim is not None
            is_tied_copy = getattr(weight, "shared", False)
            if not is_tied_copy and (is_divided or tensor_group(run.groups, expert=of_expert).rank() == 0):
                totals[int(of_expert)] += _computed_with(run, weight).float().square().sum(dtype=torch.float64)
    holders = run.sharding.holders_of_one_copy(run.optimizer, run.groups)
    for total, group in zip(totals, holders, strict=True):
        torch.distributed.all_reduce(total, group=group)
    return float(totals.sum().sqrt())


def _computed_with(run: Run, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's part as the forward pass uses it: rows are kept in fp32, whatever is computed with."""
    return local_part(parameter).to(run.transformer_config.params_dtype)
