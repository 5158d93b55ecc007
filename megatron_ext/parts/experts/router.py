"""Routes tokens to experts: megatron-core's router, with features that it lacks on plain torch or computes differently
in each layout.

Shapes: T tokens of this rank, E experts.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    router_gating_linear,
    sinkhorn,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter

from megatron_ext.parts.experts.describe import Capacity, Experts
from megatron_ext.parts.experts.load import RouterLoad

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def preferred(weights_TE: torch.Tensor, topk: int, capacity: Capacity) -> torch.Tensor:
    """Return the tokens that each expert takes where a microbatch has more tokens for it than its capacity, [T, E].

    Args:
        weights_TE: 0 for experts that a token did not choose; it chose `topk`.
    """
    number = math.ceil(weights_TE.size(0) * topk / weights_TE.size(1) * capacity.factor)
    judged_TE = weights_TE.sign() if capacity.policy == "position" else weights_TE
    # Of equal ones the first. megatron-core's top k takes any of them, by position as well.
    tokens = judged_TE.sort(dim=0, descending=True, stable=True).indices[:number]
    return torch.zeros_like(weights_TE, dtype=torch.bool).scatter(0, tokens, True)


def sparsely_mixed(logits_TE: torch.Tensor, eps: float, *, draws: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of each token's two experts and which these are, both [T, E], by SparseMixer-v2 (Liu et al.
    2024, arXiv:2409.12136, section 3.2).

    Each expert's weight is its softmax among the logits that are left and near the largest of them: of the largest one,
    or of one that is drawn. A drawn one that is not the largest has a third of it with the probability 3/4, so that the
    weight's plain gradient is the third-order estimate of the draw's gradient.

    Args:
        eps: logits are near if they differ from the largest by less than 2 eps of it, or of themselves.
        draws: whether experts are drawn, as in training.
    """
    left_TE, scores_TE = logits_TE, logits_TE.detach()
    weights_TE, chosen_TE = torch.zeros_like(logits_TE), torch.zeros_like(logits_TE, dtype=torch.bool)
    for _ in range(2):
        largest, experts = left_TE.detach().max(dim=-1, keepdim=True)
        far_TE = (largest - scores_TE) / scores_TE.abs().clamp(min=largest) > 2 * eps
        near_TE = left_TE.masked_fill(far_TE, -math.inf)
        if draws:  # by Gumbel's trick
            experts = (
                (near_TE.detach() - torch.empty_like(scores_TE).exponential_().log()).max(-1, keepdim=True).indices
            )
        shares_TE = near_TE.softmax(dim=-1)
        weight = shares_TE.gather(-1, experts)
        if draws:
            is_whole = (experts == shares_TE.detach().max(-1, keepdim=True).indices) | (torch.rand_like(weight) > 0.75)
            weight = weight - (weight * 0.6667 * ~is_whole).detach()
        weights_TE, chosen_TE = weights_TE.scatter(-1, experts, weight), chosen_TE.scatter(-1, experts, True)
        left_TE = left_TE.masked_fill(chosen_TE, -math.inf)
    return weights_TE, chosen_TE


class Router(TopKRouter):
    """A router of megatron-core's whose logits need no GPU, and whose balance does not depend on the layout.

    Args:
        described: the mixture that it is a part of.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        *,
        described: Experts,
    ) -> None:
        assert pg_collection is not None
        super().__init__(config, pg_collection, is_mtp_layer)
        self.capacity, self.sparse_mixer = described.capacity, described.sparse_mixer
        if self.sparse_mixer is not None:
            self.routing_type: Any = "sinkhorn"  # by which megatron-core asks `sinkhorn_load_balancing`
        if self.capacity is not None:  # which megatron-core's router would apply to each rank; its dispatcher reads it
            self.config = copy.copy(config)
            self.config.moe_expert_capacity_factor = None
        # megatron-core ties it to --disable-bias-linear alone.
        self.bias = torch.nn.Parameter(self.weight.new_empty(len(self.weight))) if described.mlp.bias else None
        if self.bias is not None:
            vars(self.bias)["sequence_parallel"] = config.sequence_parallel
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert = self.local_tokens_per_expert.long()  # exact, and not rounded with the model
        self.unnormalized, self.bias_of_logits = described.unnormalized and self.topk > 1, described.bias_of_logits
        self._logits_TE: torch.Tensor | None = None
        biased_softmax = self.enable_expert_bias and self.score_function == "softmax"
        if biased_softmax or self.bias_of_logits or described.group_scores is not None:
            # megatron-core asks a replay of earlier choices which experts to take: the one place where it asks.
            self.router_replay: Any = SimpleNamespace(get_replay_topk=partial(self._choose, described.group_scores))
        self.dp_group = pg_collection.dp
        # megatron-core's own counts would be rounded to bf16 with the model.
        self.global_tokens_per_expert: Any = None
        self.ga_steps: Any = None
        self.reset_global_aux_loss_tracker()
        self.load = RouterLoad()

    def reset_global_aux_loss_tracker(self) -> None:
        """Forget the load of a global batch. megatron-core calls it at the end of a step."""
        self._tokens_before_E: torch.Tensor | int = 0
        self._microbatches_before = 0

    def _apply(self, *args: Any, **options: Any) -> "Router":
        """Change the dtype or the device of the weights, as `torch.nn.Module`, but leave the bias of experts in fp32.
        megatron-core's next forward pass would do so, after a checkpoint was read into 16 bits."""
        super()._apply(*args, **options)
        self._maintain_float32_expert_bias()
        return self

    def apply_input_jitter(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input times random numbers in training, with those that dropout draws on each rank for tokens of
        its own. megatron-core's jitters in evaluation and generation, too."""
        if self.config.moe_input_jitter_eps is None or not self.training:
            return input
        with tensor_parallel.get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
            return super().apply_input_jitter(input)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' weights and which experts are chosen, both [tokens, experts], without choices beyond an
        expert's capacity. logits: of this rank's tokens, [..., experts]. In training the remaining choices are counted,
        once where activations are computed again."""
        self._logits_TE = logits.detach().view(-1, logits.size(-1)) if self.bias_of_logits else None
        weights_TE, chosen_TE = super().routing(logits, padding_mask)
        self._logits_TE = None
        if self.unnormalized:
            weights_TE = weights_TE * (self._scores(logits.view_as(weights_TE)) * chosen_TE).sum(-1, keepdim=True)
        counts = self.training and torch.is_grad_enabled()
        capacity = self.capacity
        if capacity is not None and self.training:
            weighed_TE = weights_TE.detach() * chosen_TE
            kept_TE = self._own_rows(lambda all_TE: preferred(all_TE, self.topk, capacity), weighed_TE)
            dropped_TE = chosen_TE & ~kept_TE
            if counts and self.local_tokens_per_expert is not None:
                self.local_tokens_per_expert -= dropped_TE.sum(0)
            weights_TE, chosen_TE = weights_TE * ~dropped_TE, chosen_TE & ~dropped_TE
        if counts:
            self.load.add(logits, chosen_TE)
        return weights_TE, chosen_TE

    def _scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
        """Return the scores of all experts, [T, E], which megatron-core has divided by the sum of the chosen ones."""
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        scores_TE = wide_TE.sigmoid() if self.score_function == "sigmoid" else F.softplus(wide_TE).sqrt()
        return scores_TE.type_as(logits_TE)

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return the weight of an auxiliary loss, by the flags. megatron-core derives it from the load-balancing type,
        by which experts are chosen."""
        losses: Any = self.config.moe_router_load_balancing_type
        weights: Any = self.config.moe_aux_loss_coeff
        return 0.0 if isinstance(losses, str) else dict(zip(losses, weights, strict=True)).get(aux_loss_type, 0.0)

    def _own_rows(self, judge: Callable[[torch.Tensor], torch.Tensor], rows_TE: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the result of `judge` for the rows of all tokens of the microbatch, in fp32.
        megatron-core has each rank judge its own tokens; here the result is the same in every layout."""
        group, own = self.tp_cp_group, rows_TE.float()
        everyones: Any = own if group.size() == 1 else gather_from_sequence_parallel_region(own, group=group)
        return judge(everyones).chunk(group.size())[group.rank()]

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits, [..., experts]. input: [..., H]."""
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        return router_gating_linear(input, self.weight, self.bias, dtype)

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Return the weights; their gradient gets the gradient of the load-balancing loss with the load of the global
        batch added (Qiu et al. 2025, arXiv:2501.11873, section 3).

        The loss of a microbatch is E sum_i f_i P_i, P_i being the mean score of expert i in this microbatch, and f_i
        its share of the tokens in this and all earlier microbatches of the global batch. Microbatches are ordered as
        their samples are, so that data-parallel ranks take turns. For one data-parallel rank it equals megatron-core's
        own loss. With more, megatron-core counts the microbatches of all ranks at once, and divides the loss by the
        number of ranks, so that another layout would train another model.
        """
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        tokens_E, own_tokens, tokens = get_tokens_per_expert_and_token_count(
            routing_map, self.tp_cp_group, self.topk, with_padding_mask
        )
        loss = switch_load_balancing_loss_func(
            scores_for_aux_loss,
            self._load_so_far(tokens_E),
            tokens,  # pyright: ignore[reportArgumentType]
            self.topk,
            scores_for_aux_loss.shape[1],
            coefficient,
        )
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "global_load_balancing_loss", self.tp_cp_group, valid_token_count=own_tokens
        )

    def _load_so_far(self, tokens_E: torch.Tensor) -> torch.Tensor:
        """Return the mean number of tokens of each expert, [E], over the microbatches up to and with this one.

        Args:
            tokens_E: the numbers in this microbatch, the same on all ranks that share it.
        """
        group = self.dp_group
        everyones: Any = gather_from_sequence_parallel_region(tokens_E, group=group)
        everyones_DE = everyones.view(group.size(), -1)
        turn = group.rank() + 1
        load_E = (self._tokens_before_E + everyones_DE[:turn].sum(0)) / (self._microbatches_before + turn)
        self._tokens_before_E = self._tokens_before_E + everyones_DE.sum(0)
        self._microbatches_before += group.size()
        return load_E

    def sinkhorn_load_balancing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' weights and which experts are chosen, both [tokens, experts]. logits: of this rank's
        tokens.

        Experts are chosen by Sinkhorn's balanced assignment (Clark et al. 2022, arXiv:2202.01169, section 3.1), in an
        evaluation by the weights alone. megatron-core balances the tokens of each rank; here the tokens of the whole
        microbatch are balanced, so that the choice is the same in every layout.

        With `sparse_mixer`, `sparsely_mixed` chooses the experts, in training by random numbers that each rank draws
        for its own tokens.
        """
        if self.sparse_mixer is not None:
            if not self.training:
                return sparsely_mixed(logits, self.sparse_mixer, draws=False)
            with tensor_parallel.get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                return sparsely_mixed(logits, self.sparse_mixer, draws=True)
        weights = logits.sigmoid() if self.topk == 1 else logits.softmax(dim=-1, dtype=torch.float32).type_as(logits)
        with torch.no_grad():
            scores = self._own_rows(sinkhorn, logits) if self.training else weights
            experts = scores.topk(self.topk, dim=1).indices
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return weights * chosen, chosen

    def _choose(
        self,
        group_scores: int | None,
        scores_TE: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of each token's experts and their indices, both [T, topk], where megatron-core has no such
        choice: by softmax's scores or by logits with a bias, as ERNIE 4.5 and Kolibri, or from groups that count
        another number of scores, as DeepSeek-V2 (Liu et al. 2024, arXiv:2405.04434, section 2.2.2).

        Args:
            scores_TE: of T tokens here; logits where softmax comes after the choice.
            compute_topk: megatron-core's choice, with the same arguments.
        """
        judged_TE = scores_TE
        if self._logits_TE is not None and self.expert_bias is not None:
            judged_TE = self._logits_TE.float() + self.expert_bias
        elif self.expert_bias is not None and self.score_function == "softmax":
            if not self.config.moe_router_pre_softmax:
                judged_TE = judged_TE.softmax(dim=-1, dtype=torch.float32)
            judged_TE = judged_TE + self.expert_bias
        if group_scores is not None and group_topk and num_groups:
            groups_TGE = judged_TE.unflatten(1, (num_groups, -1))
            best = groups_TGE.topk(group_scores, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
            others = torch.ones_like(groups_TGE[..., 0], dtype=torch.bool).scatter(1, best, False)
            judged_TE = groups_TGE.masked_fill(others.unsqueeze(-1), -math.inf).flatten(1)
            num_groups = group_topk = None
        experts = compute_topk(judged_TE, topk, num_groups, group_topk)[1]
        return scores_TE.gather(1, experts), experts
