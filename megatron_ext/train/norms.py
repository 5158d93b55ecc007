"""Norms over the whole model, whatever the layout."""

import torch

from megatron_ext.config.parameters import parameters
from megatron_ext.model.names import global_named_parameters
from megatron_ext.train.run import Run


def parameters_norm(run: Run) -> float:
    """L2 norm of all parameters, each counted once: replicas and tied copies do not count again. Collective."""
    replicated = {parameter.name for parameter in parameters(run.config) if parameter.tp_dim is None}
    total = torch.zeros((), dtype=torch.float64, device=run.device.torch_device)
    with run.gathered_parameters(), torch.no_grad():
        for name, parameter in global_named_parameters(run.chunks):
            is_tied_copy = getattr(parameter, "shared", False)
            if not is_tied_copy and (run.groups.tp.rank() == 0 or name not in replicated):
                total += parameter.float().square().sum(dtype=torch.float64)
    torch.distributed.all_reduce(total, group=run.groups.mp)
    return float(total.sqrt())
