"""RMSNorm and LayerNorm on plain torch, that work under sequence parallelism.

There each tensor-parallel rank normalizes its own slice of the sequence, so that its gradient covers only those
tokens. The mark `sequence_parallel` on the parameters tells megatron-core to sum it over the ranks. The norms of
queries and keys see all tokens but only this rank's heads; megatron-core knows them by their names, and sums their
gradients under tensor parallelism in any case.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.config.layers import Layer
from megatron_ext.device.kernels import rms_norm

NormBuilder = Callable[..., torch.nn.Module]
"""Builds a norm from `config` (megatron-core's), `hidden_size` (channels that are normalized together) and `eps`."""


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, equation 4).

    The statistics of 16-bit inputs are computed in fp32, and the result is rounded once.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]; the result has its shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(torch.nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (Ba et al. 2016, equation 4)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.shape = (hidden_size,)
        self.eps = eps
        self.weight = _parameter(config, hidden_size)
        self.bias = _parameter(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]; the result has its shape and dtype."""
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def norm_class(normalization: str) -> type[RMSNorm] | type[LayerNorm]:
    """The class that `--normalization` names."""
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[normalization]


def query_key_norms(layer: Layer, tp_group: ProcessGroup) -> tuple[NormBuilder | None, NormBuilder | None]:
    """What builds the norm of a layer's queries, and that of its keys; None where there is none.

    Both are called by megatron-core's attention with the size of a head, and take this rank's heads, [sequence, batch,
    heads, channels].

    Args:
        layer: its description.
        tp_group: the ranks that have divided the heads among themselves.
    """
    over = layer.attention.qk_norm
    if over is None:
        return None, None
    assert over == "head", f"no norm here is over the {over} of queries and keys"
    return norm_class(layer.norm.kind), norm_class(layer.norm.kind)


def _parameter(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
    parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return parameter
