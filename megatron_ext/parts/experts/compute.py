"""Builds a mixture of experts on plain torch: megatron-core's MoE layer, router and dispatchers, with experts of our
own.

Without Transformer Engine megatron-core computes the experts of a rank one after another, even where a grouped product
was asked for. `GroupedExperts` holds each matrix of all local experts as one parameter and, with --moe-grouped-gemm,
multiplies by them in one call.

Shapes: T (token, expert) pairs on this rank, sorted by expert; E local experts; H hidden; F this rank's part of an
expert's width; I and O inputs and outputs of a matrix.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_ext.device import kernels, split_backward
from megatron_ext.device.triton import kernel_choice
from megatron_ext.parts.experts.describe import GROUPED_ALIGNMENT, Experts
from megatron_ext.parts.experts.exchange import added, gathered
from megatron_ext.parts.experts.router import Router
from megatron_ext.parts.linear.compute import ColumnLinear, RowLinear, WholeLinear
from megatron_ext.parts.mlp.compute import glu

_NOT_CHOSEN = -1.0
"""Stands for the weight of an expert that a token did not choose, where both are sent."""


def rows_of_biases(
    bias_EO: torch.Tensor, tokens_per_expert: torch.Tensor, rows: int, weights_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the bias of each row's expert, [T, O], times the row's weight; T is `rows`.

    It is a product with a matrix that has a weight at each row's expert, so that a GPU adds up the gradients of a bias
    in fp32, in one order, and no host waits for the number of an expert's rows.
    """
    each_EE = torch.eye(len(bias_EO), dtype=bias_EO.dtype, device=bias_EO.device)
    chosen_TE = each_EE.repeat_interleave(tokens_per_expert.to(bias_EO.device), dim=0, output_size=rows)
    if weights_T is not None:
        chosen_TE = chosen_TE * weights_T.unsqueeze(-1).to(bias_EO.dtype)
    return chosen_TE @ bias_EO


def can_group(x_TI: torch.Tensor, weight_EOI: torch.Tensor) -> bool:
    """Return whether `kernels.grouped_linear` takes these operands."""
    aligned = all(size % GROUPED_ALIGNMENT == 0 for size in weight_EOI.shape[1:])
    return x_TI.dtype == weight_EOI.dtype == torch.bfloat16 and aligned


class ExpertMatrices(torch.nn.Module):
    """One matrix of every local expert, stacked in one parameter [E, O, I], of which O or I is divided over the ranks,
    perhaps with biases [E, O].

    Args:
        rows, columns: numbers of rows and columns of one expert's matrix on this rank.
        divided: the dimension, 0 (rows) or 1 (columns), that the expert-tensor-parallel ranks divide.
        gated: whether rows are a gate above an up projection, each divided by itself.
    """

    def __init__(
        self,
        experts: range,
        rows: int,
        columns: int,
        *,
        divided: int,
        gated: bool,
        has_bias: bool = False,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.experts, self.divided, self.gated, self.groups = experts, divided, gated, groups
        self.group_products = config.moe_grouped_gemm
        self.trained_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Product in the place of this one while it is trained; None where there is no other."""
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(len(experts), rows, columns, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        stride = 2 if gated else 1
        set_tensor_model_parallel_attributes(self.weight, True, divided + 1, stride)
        self.bias = torch.nn.Parameter(weight.new_empty(weight.shape[:2])) if has_bias else None
        if self.bias is not None and divided == 0:
            set_tensor_model_parallel_attributes(self.bias, True, 1, stride)
        # Which ranks hold the same experts, and so whose gradients are added: as megatron-core's own layers say it.
        own_groups = groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size()
        for marked in self.parameters():
            vars(marked)["allreduce"] = not own_groups

    def forward(
        self, x_TI: torch.Tensor, tokens_per_expert: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the products with their biases, [T, O], of which ranks that divide I have parts of a sum.

        Args:
            x_TI: rows sorted by expert.
            weights_T: factor of the bias of each row.
        """
        grouped = self.group_products and can_group(x_TI, self.weight)
        multiply = kernels.grouped_linear if grouped else kernels.linear_by_expert
        if self.trained_product is not None and self.training:
            product_TO = self.trained_product(x_TI, self.weight, tokens_per_expert)
        elif split_backward.splits(self.weight):
            product_TO = split_backward.linear_by_expert(
                x_TI, self.weight, tokens_per_expert.tolist(), lambda x, weight: multiply(x, weight, tokens_per_expert)
            )
        else:
            product_TO = multiply(x_TI, self.weight, tokens_per_expert)
        if self.bias is None:
            return product_TO
        bias_EO = self.bias
        if self.divided == 1 and self.groups.expt_tp.rank() > 0:
            # The first rank's part of the sum has the bias. The others, whose gradient is the same, add zero.
            bias_EO = bias_EO - bias_EO.detach()
        return product_TO + rows_of_biases(bias_EO, tokens_per_expert, len(product_TO), weights_T)

    def sharded(self, parameter: torch.Tensor, key: str, offsets: tuple[Any, ...]) -> ShardedTensorFactory:
        """Return a stacked parameter as the sharded tensors of single experts: parts of a tensor [..., all experts, all
        rows, all columns] or [..., all experts, all rows], with the name and pieces of megatron-core's own experts.

        Args:
            offsets: offsets of the axes before, as megatron-core gives them: (axis, this part's index, number of
                parts).
        """
        prepended = len(offsets) + 1
        is_divided = parameter.dim() > self.divided + 1
        axis = prepended + self.divided
        all_experts = len(self.experts) * self.groups.ep.size()
        tp_rank, tp_size = self.groups.expt_tp.rank(), self.groups.expt_tp.size()
        # A gated matrix has a part of the gate and one of the up projection, which lies after the whole gate.
        places = [tp_rank, tp_size + tp_rank] if self.gated else [tp_rank]

        def matrices(key: str, stacked: torch.Tensor, replica_id: Any, _flattened: Any) -> Any:
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    part,
                    *offsets,
                    (prepended - 1, expert, all_experts),
                    *([(axis, place, len(places) * tp_size)] if is_divided else []),
                    replica_id=replica_id,
                    prepend_axis_num=prepended,
                )
                for expert, matrix in zip(self.experts, stacked, strict=True)
                for place, part in zip(places, matrix.chunk(len(places)), strict=True)
            ]

        def stack(parts: Any) -> torch.Tensor:
            return torch.cat(parts).view(parameter.shape)

        replica = (0, 0 if is_divided else tp_rank, self.groups.expt_dp.rank())
        return ShardedTensorFactory(key, parameter, matrices, stack, replica)


class GroupedExperts(MegatronModule):
    """The routed experts of this rank, MLPs of one shape, built by megatron-core's MoELayer.

    Args:
        has_bias: whether both matrices of an expert have a bias.
        latent: channels of their input and output; None: the hidden size.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        has_bias: bool = False,
        name: str | None = None,
        latent: int | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.moe_ffn_hidden_size is not None
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        first = pg_collection.ep.rank() * num_local_experts
        self.local_experts = experts = range(first, first + num_local_experts)
        gated = config.gated_linear_unit
        build = partial(ExpertMatrices, experts, has_bias=has_bias, config=config, groups=pg_collection)
        hidden = latent or config.hidden_size
        self.linear_fc1 = build(2 * width if gated else width, hidden, divided=0, gated=gated)
        self.linear_fc2 = build(hidden, width, divided=1, gated=False)

    def forward(
        self, tokens_TH: torch.Tensor, tokens_per_expert: torch.Tensor, weights_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return every row through its expert, times the router's weight: [T, H].

        With tensor-parallel experts it is this rank's part of the sum, which the dispatcher takes. The second value
        is the bias that others are to add; ours are added.
        """
        if self.config.moe_apply_probs_on_input:
            tokens_TH = (tokens_TH * weights_T.unsqueeze(-1)).to(tokens_TH.dtype)
            weights_T = torch.ones_like(weights_T)
        hidden_TF = self.linear_fc1(tokens_TH, tokens_per_expert)
        if self.config.bias_activation_fusion and kernel_choice.take(hidden_TF):
            from megatron_ext.device.triton.swiglu import swiglu

            return self.linear_fc2(swiglu(hidden_TF, weights_T), tokens_per_expert, weights_T), None
        gated = self.config.gated_linear_unit
        hidden_TF = glu(hidden_TF, self.config) if gated else self.config.activation_func(hidden_TF)
        hidden_TF = (hidden_TF * weights_T.unsqueeze(-1)).to(tokens_TH.dtype)
        return self.linear_fc2(hidden_TF, tokens_per_expert, weights_T), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state dict with the keys of megatron-core's experts: the experts of all ranks are one tensor,
        [layers, experts, ...]."""
        return {
            f"{prefix}{name}.{kind}": matrices.sharded(parameter, f"{prefix}experts.{name}.{kind}", sharded_offsets)
            for name, matrices in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2))
            for kind, parameter in matrices.named_parameters()
        }


class Mixture(MoELayer):
    """A mixture that sends tokens together with the weights of their experts: a small message takes hardly less time
    than a large one (on a CPU two milliseconds).

    Args:
        latent: width of its routed experts' input and output, between projections for which megatron-core's needs
            Transformer Engine; None: the hidden size.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, latent: int | None, **settings: Any) -> None:
        super().__init__(config, *arguments, **settings)
        self.latent = latent
        if latent is not None:
            self.fc1_latent_proj = WholeLinear(config, config.hidden_size, latent)
            self.fc2_latent_proj = WholeLinear(config, latent, config.hidden_size)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the experts' input down, and send it on its way."""
        read = hidden_states if self.latent is None else self.fc1_latent_proj(hidden_states)
        return super().preprocess(read, probs, routing_map)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that the ranks of this one's experts have, and their weights. hidden_states: [..., H]."""
        way: Any = self.token_dispatcher
        gathers, on_cpu = self.config.moe_token_dispatcher_type == "allgather", probs.is_cpu
        # On a GPU the engine waits in its own way for what is sent all-to-all, whose sizes the host needs.
        together = probs.dtype == hidden_states.dtype and (gathers or on_cpu) and not way.use_nccl_stream
        if not together or way.tp_ep_group.size() == 1:
            return super().dispatch(hidden_states, probs)
        weights = probs.where(way.routing_map, _NOT_CHOSEN) if gathers else probs.unsqueeze(1)
        sent = torch.cat([hidden_states, weights], 1)
        if gathers:
            arrived = (gathered if on_cpu else gather_from_sequence_parallel_region)(sent, group=way.tp_ep_group)
        else:
            arrived = all_to_all(way.ep_group, sent, way.output_splits, way.input_splits)
        rows, probs = arrived.split([hidden_states.size(1), weights.size(1)], 1)
        if gathers:
            way.routing_map = probs != _NOT_CHOSEN
            return rows, probs
        return rows.contiguous(), probs.squeeze(1)

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all ranks' experts for this rank's tokens, added up or to be added."""
        way: Any = self.token_dispatcher
        gathers = self.config.moe_token_dispatcher_type == "allgather" and way.tp_ep_group.size() > 1
        if gathers and output.is_cpu and output.dtype == way.local_probs.dtype:
            return added(output, way.tp_ep_group)
        return super().combine(output)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Project the experts' output up, and add the shared experts' output."""
        output = super().postprocess(output, None)
        output = output if self.latent is None else self.fc2_latent_proj(output)
        return output if shared_expert_output is None else output + shared_expert_output


def mixture_of_experts(described: Experts) -> Any:
    """Return the builder of the mixture that takes the place of a layer's MLP."""
    shared = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    submodules = MoESubmodules(
        experts=partial(GroupedExperts, has_bias=described.mlp.bias, latent=described.latent),  # pyright: ignore[reportArgumentType]
        shared_experts=partial(SharedExpertMLP, submodules=shared),
        router=partial(Router, described=described),
    )
    return partial(Mixture, submodules=submodules, latent=described.latent)
