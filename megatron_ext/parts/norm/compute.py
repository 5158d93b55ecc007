"""RMSNorm and LayerNorm on plain torch work under sequence parallelism.

Under it each tensor-parallel rank normalizes its own slice of the sequence, so that its gradient covers only those
tokens. The mark `sequence_parallel` on the parameters tells megatron-core to sum it over the ranks. The norms of
queries and keys see all tokens but only this rank's heads; megatron-core knows them by their names, and sums their
gradients under tensor parallelism in any case.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from torch.distributed import ProcessGroup

from megatron_ext.device.kernels import rms_norm
from megatron_ext.device.triton import kernel_choice
from megatron_ext.parts.attention.describe import Attention
from megatron_ext.parts.norm.describe import Norm

NormBuilder = Callable[..., torch.nn.Module]
"""Builds a norm from `config` (megatron-core's), `hidden_size` (channels that are normalized together) and `eps`."""


class RMSNorm(torch.nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, equation 4).

    The statistics of 16-bit inputs are computed in fp32, and the result is rounded once.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = uninitialized(config, hidden_size)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the normalized x, of its shape and dtype, [..., hidden_size]; with a residual, by one kernel
        (`kernel_choice.take_rows`), the norm of x + residual, and that sum."""
        if residual is not None:
            from megatron_ext.device.triton.norm import norm_of_sum

            return norm_of_sum(x, residual, self.weight, None, self.eps)
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(torch.nn.Module):
    """Computes (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (Ba et al. 2016,
    equation 4)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.shape = (hidden_size,)
        self.eps = eps
        self.weight = uninitialized(config, hidden_size)
        self.bias = uninitialized(config, hidden_size)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return the same as `RMSNorm.forward`, with LayerNorm in place of RMSNorm."""
        if residual is not None:
            from megatron_ext.device.triton.norm import norm_of_sum

            return norm_of_sum(x, residual, self.weight, self.bias, self.eps)
        if kernel_choice.take_rows(x):
            from megatron_ext.device.triton.norm import layer_norm

            return layer_norm(x, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class PlainLayerNorm(torch.nn.Module):
    """LayerNorm without a bias, and without a weight where `weighted` is false (OLMo, arXiv:2402.00838)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, weighted: bool) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.weight = uninitialized(config, hidden_size) if weighted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x, of its shape and dtype. x: [..., hidden_size]."""
        return F.layer_norm(x, self.shape, self.weight, None, self.eps)


class PlainRMSNorm(torch.nn.Module):
    """RMSNorm without a weight: the L2 norm of Llama 4's queries and keys."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x, of its shape and dtype. x: [..., hidden_size]."""
        return F.rms_norm(x, self.shape, None, self.eps)


class _AfterRotation:
    """Leaves queries or keys alone where megatron-core normalizes them, which is before they are rotated."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        assert residual is None, "heads have none"
        return x

    def of_rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x."""
        norm: Any = super()
        return norm.forward(x)


class RMSNormAfterRotation(_AfterRotation, RMSNorm):
    """RMSNorm of rotated queries or keys."""


class LayerNormAfterRotation(_AfterRotation, LayerNorm):
    """LayerNorm of rotated queries or keys."""


class ProjectionNorm(torch.nn.Module):
    """RMSNorm of all heads of a token at once, which tensor-parallel ranks have divided (OLMo 2, arXiv:2501.00656).

    The mean square is over the heads of all ranks. Every rank has the weights of all heads and uses the weights of its
    own heads, so that gradients are zero elsewhere and sum up to the whole, as the gradients of norms of single heads
    do.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, tp_group: ProcessGroup
    ) -> None:
        """hidden_size: channels of a head; heads: number of heads of all ranks."""
        super().__init__()
        self.eps, self.heads, self.tp_group = eps, heads, tp_group
        self.weight = uninitialized(config, heads * hidden_size)

    def forward(self, x_SBHD: torch.Tensor) -> torch.Tensor:
        """x_SBHD: this rank's heads, [sequence, batch, heads, channels]; the result has its shape and dtype.

        Where there are more ranks than heads, consecutive ranks hold the same head.
        """
        if self.tp_group.size() == 1:
            return rms_norm(x_SBHD.flatten(2), self.weight, self.eps).view(x_SBHD.shape)
        divided: Any = self._divided
        return divided(x_SBHD)

    @torch.compiler.disable
    def _divided(self, x_SBHD: torch.Tensor) -> torch.Tensor:
        heads, channels = x_SBHD.shape[2:]
        first = self.tp_group.rank() * self.heads // self.tp_group.size() * channels
        weight = self.weight[first : first + heads * channels]
        copies = self.tp_group.size() * heads // self.heads
        normed: Any = _DividedRMSNorm.apply(x_SBHD.flatten(2), weight, self.eps, copies, self.tp_group)
        return normed.view(x_SBHD.shape)


class HeadNorms(torch.nn.Module):
    """A norm of each head with weights of its own and no bias (Command R+). Every rank has the weights of all heads, as
    in `ProjectionNorm`, and uses the weights of its own heads."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, kind: str, heads: int, tp_group: ProcessGroup
    ) -> None:
        """hidden_size: channels of a head; kind: LayerNorm or RMSNorm; heads: number of heads of all ranks."""
        super().__init__()
        self.eps, self.heads, self.tp_group = eps, heads, tp_group
        self.normalize: Any = F.layer_norm if kind == "LayerNorm" else F.rms_norm
        self.weight = uninitialized(config, heads, hidden_size)

    def forward(self, x_SBHD: torch.Tensor) -> torch.Tensor:
        """x_SBHD: this rank's heads, [sequence, batch, heads, channels]; the result has its shape and dtype. It is
        computed in fp32 and rounded once."""
        first = self.tp_group.rank() * self.heads // self.tp_group.size()
        own = self.weight[first : first + x_SBHD.size(2)]
        wide = torch.promote_types(x_SBHD.dtype, torch.float32)
        return (self.normalize(x_SBHD.to(wide), x_SBHD.shape[-1:], eps=self.eps) * own).to(x_SBHD.dtype)


class _DividedRMSNorm(torch.autograd.Function):
    """RMSNorm of vectors whose channels the ranks of a group hold, each of them on `copies` ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, copies: int, group: ProcessGroup
    ) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.width = x.size(-1) * group.size() // copies
        total = wide.square().sum(-1, keepdim=True)
        torch.distributed.all_reduce(total, group=group)
        inverse = total.div_(ctx.width * copies).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse, weight)
        ctx.copies, ctx.group = copies, group
        return (wide * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        x, inverse, weight = ctx.saved_tensors
        normalized, weighted = x * inverse, grad * weight.to(inverse.dtype)
        # The part that would change the norm of the whole vector has no effect: it is taken out.
        radial = (weighted * normalized).sum(-1, keepdim=True)
        torch.distributed.all_reduce(radial, group=ctx.group)
        for_x = (weighted - normalized * (radial / (ctx.width * ctx.copies))) * inverse
        for_weight = (grad * normalized).flatten(0, -2).sum(0)
        return for_x.to(x.dtype), for_weight.to(weight.dtype), None, None, None


def norm_class(normalization: str) -> type[RMSNorm] | type[LayerNorm]:
    """Return the class that `--normalization` names."""
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[normalization]


def norm_builder(norm: Norm) -> NormBuilder:
    """Return the builder of a norm."""
    if norm.owns == "all":
        return norm_class(norm.kind)
    return PlainRMSNorm if norm.kind == "RMSNorm" else partial(PlainLayerNorm, weighted=norm.has_weight)


def query_key_norms(attention: Attention, tp_group: ProcessGroup) -> tuple[NormBuilder, NormBuilder]:
    """Return the builders of the query norm and the key norm; without these norms megatron-core's IdentityOp, whatever
    other layers have.

    Both are called by megatron-core's attention with the size of a head, and take this rank's heads, [sequence, batch,
    heads, channels].

    Args:
        attention: its description.
        tp_group: the ranks that have divided the heads among themselves.
    """
    if attention.qk_norm is None:
        return IdentityOp, IdentityOp
    if attention.qk_norm_after_rotation:
        late = {"RMSNorm": RMSNormAfterRotation, "LayerNorm": LayerNormAfterRotation}[attention.norm.kind]
        return late, late
    if attention.qk_norm == "head":
        return norm_builder(attention.norm), norm_builder(attention.norm)
    counts = attention.query_heads, attention.groups
    if attention.qk_norm == "each-head":
        each = partial(HeadNorms, kind=attention.norm.kind, tp_group=tp_group)
        return partial(each, heads=counts[0]), partial(each, heads=counts[1])
    assert attention.norm.kind == "RMSNorm", f"no {attention.norm.kind} here is over the whole projection"
    builder = partial(ProjectionNorm, tp_group=tp_group)
    return partial(builder, heads=counts[0]), partial(builder, heads=counts[1])


def uninitialized(config: TransformerConfig, *size: int) -> torch.nn.Parameter:
    """Return a parameter without values, which every tensor-parallel rank has whole."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
    parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return parameter
