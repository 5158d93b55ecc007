"""Computes the loss, in the form that lets megatron-core average it over the tokens of the whole global batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.data.microbatch import Ahead
from megatron_ext.device import split_backward
from megatron_ext.device.kernels import cross_entropy, linear
from megatron_ext.errors import ConfigurationError
from megatron_ext.model.linear_cross_entropy import Vocabulary, linear_cross_entropy
from megatron_ext.parts.attention.cached import Sequences, WholeSequences
from megatron_ext.parts.linear.compute import split_product
from megatron_ext.parts.norm.compute import uninitialized


def token_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor, ahead: Ahead | None = None, share: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of one microbatch, and count its tokens.

    megatron-core adds the counts over all microbatches and data-parallel ranks and divides the gradients by the
    total (`calculate_per_token_loss`), so that the mean is over tokens, never a mean of means.

    Args:
        loss_mask: [batch, sequence], 1.0 where a token's loss counts.
        losses: [batch, sequence], nats, the model's output on the last stage; with `ahead`, one of each depth more.
        share: weight of the loss of each depth of multi-token prediction.
    Returns:
        The sum of the losses that count, to differentiate; how many tokens count (int); and for the log
        `{"lm loss": [sum, count]}` in fp32, to be added over microbatches and data-parallel ranks.
    """
    pairs = [(losses, loss_mask)]
    if ahead is not None:
        pairs = list(zip(losses, (loss_mask, *ahead.weights.unbind(-1)), strict=True))
    sums = [torch.dot(nats.reshape(-1).float(), weights.reshape(-1).float()) for nats, weights in pairs]
    return summed_loss(loss_mask, sums[0] if ahead is None else torch.stack(sums), share)


def summed_loss(
    loss_mask: torch.Tensor, loss_sum: torch.Tensor, share: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss, token count and report as `token_loss` does, for a model that was given the mask and has summed the
    losses itself."""
    num_tokens = loss_mask.sum()
    main, *depths = loss_sum.unbind() if loss_sum.dim() else (loss_sum,)
    report = torch.stack([main.detach(), num_tokens.float()])
    for depth in depths:
        main = main + share * depth
    return main, num_tokens.to(torch.int), {"lm loss": report}


def checked_losses(losses: object, labels_BS: torch.Tensor) -> torch.Tensor:
    """Return the losses of a user's own loss function, checked.

    Raises:
        ConfigurationError: it is not the loss of every token, [B, S], or cannot be differentiated.
    """
    batch, sequence = labels_BS.shape
    wanted = f"it must return the loss of every token, [batch, sequence] = [{batch}, {sequence}]"
    if not isinstance(losses, torch.Tensor):
        raise ConfigurationError(f"loss= returned {type(losses).__name__} and no tensor: {wanted}")
    if losses.shape != labels_BS.shape:
        average = ", and never an average: the division by the tokens of the global batch follows"
        raise ConfigurationError(f"loss= returned a tensor of shape {list(losses.shape)}: {wanted}{average}")
    if not losses.is_floating_point():
        raise ConfigurationError(f"loss= returned a tensor of {losses.dtype}: {wanted}, in fp32")
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise ConfigurationError(
            "loss= returned a tensor without a gradient: compute it from token.logits_SBV, or by token's methods, and "
            "not under torch.no_grad(), nor from what detach() or item() returns"
        )
    return losses


@dataclass(frozen=True)
class TokenLogits:
    """The logits of one microbatch, for a user's own loss. The results of its methods can be differentiated.

    Shape legend: S = tokens of a sample on this context-parallel rank, B = samples, V = vocabulary of this rank.
    """

    logits_SBV: torch.Tensor
    """Logits of the part of the vocabulary that this tensor-parallel rank has; padding has the lowest number there
    is."""

    labels_BS: torch.Tensor
    """The token to predict at each position."""

    tp_group: ProcessGroup
    """Ranks that share the vocabulary, each an equal part, in the order of the ranks."""

    def cross_entropy(self) -> torch.Tensor:
        """Return -log p(label) of each token in nats, fp32 [B, S]. Collective over `tp_group`."""
        return self.log_normalizer() - self.of_labels()

    def log_normalizer(self) -> torch.Tensor:
        """Return the log of the sum of exp(logit) over the whole vocabulary, fp32 [B, S]. Collective over
        `tp_group`."""
        own_SB = torch.logsumexp(self.logits_SBV.float(), dim=-1)
        if self.tp_group.size() == 1:
            return own_SB.t()
        highest_SB = own_SB.detach().clone()
        torch.distributed.all_reduce(highest_SB, torch.distributed.ReduceOp.MAX, group=self.tp_group)
        # The reduction writes into what it is given, which the backward pass of exp still needs.
        share_SB = (own_SB - highest_SB).exp().clone()
        return (reduce_from_tensor_model_parallel_region(share_SB, self.tp_group).log() + highest_SB).t()

    def of_labels(self) -> torch.Tensor:
        """Return the logit of each token's label, fp32 [B, S]. Collective over `tp_group`."""
        size = self.logits_SBV.size(-1)
        local_SB = self.labels_BS.t() - size * self.tp_group.rank()
        here_SB = (local_SB >= 0) & (local_SB < size)
        picked_SB = self.logits_SBV.gather(-1, local_SB.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1).float()
        picked_SB = torch.where(here_SB, picked_SB, 0.0).contiguous()
        if self.tp_group.size() > 1:
            picked_SB = reduce_from_tensor_model_parallel_region(picked_SB, self.tp_group)
        return picked_SB.t()


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap tanh(logits / cap) (Gemma 2, arXiv:2408.00118, section 2); without a cap the logits themselves."""
    return logits if cap is None else cap * (logits / cap).tanh()


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer, which gives padding no probability, and whose weight others may read in its forward
    pass: whatever divides weights over ranks has gathered it by then."""

    true_rows: int
    """Rows of this rank that stand for entries of the vocabulary; those after them are padding."""

    cap: float | None
    """Bound of the logits."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **settings: Any) -> torch.Tensor:
        if split_backward.splits(weight):
            return split_product(input, weight, settings)
        return super()._forward_impl(input, weight, **settings)

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        reads: Callable[[torch.Tensor, Any, Any], torch.Tensor] | None = None,
    ) -> Any:
        """Return the logits, [..., this rank's rows], and no bias; or the result of `reads` for the input, the weight
        and the bias."""
        if reads is not None:
            return reads(input_, self.weight if weight is None else weight, self.bias)
        logits, bias = super().forward(input_, weight, runtime_gather_output)
        logits = capped(logits, self.cap)
        if self.true_rows < self.output_size_per_partition:
            assert logits.size(-1) == self.output_size_per_partition, "logits stay divided over tensor-parallel ranks"
            # Behind autograd's back, to spare a copy of the gradient: the softmax makes these columns exactly 0, and
            # so their gradient is exactly 0 already.
            logits.detach()[..., self.true_rows :] = torch.finfo(logits.dtype).min
        return logits, bias


@dataclass(frozen=True)
class Readout:
    """Computes losses, or the results of inference, from the last hidden states: GPTModel's `output_processor`.

    Shape legend: S = tokens of a sample on this context-parallel rank (with sequence parallelism a part of them), B =
    samples, H = hidden size, N = tokens that are read.
    """

    config: TransformerConfig
    tp_group: ProcessGroup
    true_vocab_size: int
    """Entries of the vocabulary, without padding."""

    own_loss: Callable[[TokenLogits], torch.Tensor] | None = None
    """A user's loss of every token, in place of the cross-entropy."""

    keeps_output_weight: bool = True
    """Whether the output layer's weight stays where it is until the backward pass, or is gathered again for that."""

    cap: float | None = None
    """Bound of the logits, as cap tanh(logits / cap)."""

    has_bias: bool = False
    """Whether the logits have a bias."""

    z_loss: float = 0.0
    """Factor of the square of the log of the softmax's normalizer in the loss of a token (PaLM, arXiv:2204.02311,
    section 5)."""

    def prepare(self, output_layer: ColumnParallelLinear) -> None:
        """Make the layer that megatron-core has built an `OutputLayer`."""
        output_layer.__class__ = OutputLayer
        assert isinstance(output_layer, OutputLayer)
        rows = output_layer.output_size_per_partition
        output_layer.true_rows, output_layer.cap = min(rows, self._true_rows(rows)), self.cap
        if self.has_bias:
            output_layer.bias = uninitialized(self.config, rows)
            output_layer.bias.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
            set_tensor_model_parallel_attributes(output_layer.bias, True, 0, 1)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        output_layer: OutputLayer,
        output_weight: torch.Tensor | None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        packed_seq_params: Sequences | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return the loss of every token of `labels`, [B, S], in nats, fp32 [B, S]; with `loss_mask`, [B, S], the sum
        over the tokens that count, for which no logits are kept; in inference the result of `WholeSequences.read`.
        hidden_states: [S, B, H]."""
        layer = partial(output_layer, weight=output_weight)
        if isinstance(packed_seq_params, WholeSequences):
            return packed_seq_params.read(hidden_states, partial(self._logits, layer))
        if labels is None:
            return layer(hidden_states)[0].transpose(0, 1).contiguous()
        if loss_mask is None:
            return self._losses(layer, hidden_states, labels)
        assert self.own_loss is None, "a loss of one's own is given logits"
        assert self.keeps_output_weight, "the weight is not at hand"
        return layer(hidden_states, reads=partial(self._summed_loss, labels.t().flatten(), loss_mask.t().flatten()))

    def _losses(self, layer: Callable[..., Any], hidden_SBH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        if self.own_loss is not None:
            return checked_losses(self.own_loss(TokenLogits(layer(hidden_SBH)[0], labels_BS, self.tp_group)), labels_BS)
        if self.z_loss:
            token = TokenLogits(layer(hidden_SBH)[0], labels_BS, self.tp_group)
            log_normalizer_BS = token.log_normalizer()
            return log_normalizer_BS - token.of_labels() + self.z_loss * log_normalizer_BS.square()
        labels_SB = labels_BS.t()
        if self.tp_group.size() > 1 or not self.keeps_output_weight:
            logits = layer(hidden_SBH)[0]
            return vocab_parallel_cross_entropy(logits, labels_SB.contiguous(), tp_group=self.tp_group).t().contiguous()
        on_cuda = hidden_SBH.device.type == "cuda"
        if self.config.gradient_accumulation_fusion or on_cuda or split_backward.splits():
            # Padding is masked, and stays in the products: a GPU's matrix units want rows that begin at multiples of
            # 16 bytes, which 50,257 columns in 16 bits do not have.
            logits = layer(hidden_SBH)[0]
        else:
            logits = layer(hidden_SBH, reads=self._true_logits)
        return cross_entropy(logits.flatten(0, 1), labels_SB.flatten()).view(labels_SB.shape).t()

    def _summed_loss(
        self, labels_N: torch.Tensor, counts_N: torch.Tensor, hidden_SBH: torch.Tensor, weight: torch.Tensor, bias: None
    ) -> torch.Tensor:
        group = self.tp_group
        assert bias is None, "validated: --linear-cross-entropy knows no bias"
        if self.config.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=group)
        elif group.size() > 1:
            hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=group)
        vocabulary = Vocabulary(self._true_rows(len(weight)), group if group.size() > 1 else None, self.cap)
        fused = self.config.gradient_accumulation_fusion
        return linear_cross_entropy(
            hidden_SBH.flatten(0, 1), weight, labels_N, counts_N, vocabulary, into_main_grad=fused
        )

    def _logits(self, layer: Callable[..., Any], hidden_NH: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size() == 1 and self.keeps_output_weight:
            return layer(hidden_NH, reads=self._true_logits)
        return layer(hidden_NH.unsqueeze(1))[0].squeeze(1)

    def _true_logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        true = slice(self.true_vocab_size)
        return capped(linear(hidden, weight[true], None if bias is None else bias[true]), self.cap)

    def _true_rows(self, rows: int) -> int:
        """Return the number of true vocabulary entries on this rank and the ranks after it, where each has `rows`
        rows."""
        return max(0, self.true_vocab_size - rows * self.tp_group.rank())
