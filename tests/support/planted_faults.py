"""Faults as they were made before, for tests that must find them.

Each sabotage runs on every rank, before its model is built, and replaces one piece of the real program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def shift_qkv() -> None:
    """Every rank but the first takes its slice of QKV one row too early."""
    from megatron_ext.model import initialize

    fill = initialize.fill

    def fill_shifted(
        shard: torch.Tensor, parameter: Any, seed: int, tp_rank: int = 0, tp_size: int = 1, first_row: int = 0
    ) -> None:
        fill(shard, parameter, seed, tp_rank, tp_size, first_row)
        if parameter.name.endswith("linear_qkv.weight") and tp_rank > 0:
            whole = torch.empty(parameter.shape)
            fill(whole, parameter, seed)
            start = tp_rank * parameter.local_shape(tp_size)[0] + first_row - 1
            shard.copy_(whole[start : start + len(shard)])

    initialize.fill = fill_shifted


def forget_sequence_parallel_mark() -> None:
    """The norms' parameters lack the mark by which megatron-core sums their gradients over tensor-parallel ranks."""
    from megatron_ext.parts.norm import compute as norm

    make = norm.uninitialized

    def make_unmarked(config: Any, *size: int) -> torch.nn.Parameter:
        parameter = make(config, *size)
        parameter.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
        return parameter

    norm.uninitialized = make_unmarked


def keep_the_gradient_of_shared_keys_apart() -> None:
    """Each rank has the gradient that its own heads give the channels of the key that all heads share."""
    from megatron_ext.plugins.latent_attention import compute

    compute.copy_to_tensor_model_parallel_region = lambda shared_key, **_group: shared_key  # pyright: ignore


def move_the_bias_by_local_counts() -> None:
    """Each rank moves the bias of experts by the tokens that it has seen itself."""
    import importlib

    def moved(counts: torch.Tensor, bias: torch.Tensor, rate: float, **_group: Any) -> torch.Tensor:
        return bias + torch.sign(counts.float().mean(-1, keepdim=True) - counts) * rate

    importlib.import_module("megatron.core.distributed.finalize_model_grads").get_updated_expert_bias = moved  # pyright: ignore


def choose_groups_by_another_rank() -> None:
    """Each rank but the first takes the groups of experts for those of a neighbour."""
    from megatron.core.transformer.moe import moe_utils

    choose = moe_utils.group_limited_topk

    def choose_others(scores: torch.Tensor, **sizes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shift = torch.distributed.get_rank() * sizes["num_experts"] // sizes["num_groups"]
        experts = choose(scores=scores.roll(shift, dims=1), **sizes)[1]
        return scores.gather(1, experts), experts

    moe_utils.group_limited_topk = choose_others


def scale_weights_of_experts_twice() -> None:
    """Every rank but the first multiplies by the factor of the weights twice."""
    from megatron.core.transformer.moe import router

    route = router.topk_routing_with_score_function

    def scaled(*arguments: Any, **options: Any) -> Any:
        if torch.distributed.get_rank():
            options["scaling_factor"] **= 2
        return route(*arguments, **options)

    router.topk_routing_with_score_function = scaled


def skip_tied_embedding_reduction() -> None:
    import importlib

    # The package exports a function of the same name, which hides the module.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_word_embedding_grads = lambda *_args, **_kwargs: None  # pyright: ignore


def read_tied_weights_before_their_gather() -> None:
    """The output layer does not wait for a weight that it is given."""
    from megatron_ext.sharding import ddp

    ddp._wait_for_given = lambda *_of_module: None


def read_convolutions_before_their_gather() -> None:
    """Weights that another module computes with are read without a call of the module that holds them."""
    from megatron_ext.plugins.gated_delta.compute import Weight

    setattr(Weight, "__call__", lambda self: None)  # noqa: B010


def average_per_microbatch() -> None:
    """Mean of means: every microbatch counts alike, however many of its tokens do."""
    from megatron_ext.train import step

    token_loss = step.token_loss

    def mean_loss(
        loss_mask: torch.Tensor, losses: torch.Tensor, **_depths: object
    ) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        loss_sum, num_tokens, report = token_loss(loss_mask, losses)
        count = num_tokens.clamp(min=1)
        return loss_sum / count, torch.ones_like(count), {"lm loss": report["lm loss"] / count}

    step.token_loss = mean_loss


def count_tokens_of_own_rank_only() -> None:
    """The logged loss is right, but each rank divides its gradients by its own tokens times the number of ranks."""
    import importlib

    from megatron_ext.train import build

    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    all_reduce = torch.distributed.all_reduce

    def finalize(model: Any, num_tokens: torch.Tensor, **kwargs: Any) -> None:
        def all_reduce_but_tokens(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if tensor.data_ptr() == num_tokens.data_ptr():
                tensor.mul_(torch.distributed.get_world_size())
                return None
            return all_reduce(tensor, *args, **options)

        torch.distributed.all_reduce = all_reduce_but_tokens
        try:
            module.finalize_model_grads(model, num_tokens, **kwargs)
        finally:
            torch.distributed.all_reduce = all_reduce

    build.finalize_model_grads = finalize


def shift_labels_of_depths_too_little() -> None:
    """Each depth of multi-token prediction has the labels of the depth before, and its own tokens and weights."""
    from megatron_ext.data import microbatch

    read = microbatch._ahead

    def read_shifted(tokens: torch.Tensor, labels: torch.Tensor, *others: Any) -> microbatch.Ahead:
        ahead = read(tokens, labels, *others)
        return ahead._replace(labels=torch.cat([labels.unsqueeze(-1), ahead.labels[..., :-1]], dim=-1))

    microbatch._ahead = read_shifted


def scale_depths_by_counts_of_own_rank() -> None:
    """Losses of depths are scaled by the tokens that count on this rank, as megatron-core does it for a microbatch."""
    from megatron_ext.train import step

    def scales(_run: Any, microbatches: Any) -> torch.Tensor:
        counted = torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum()
        return counted / torch.stack([batch.ahead.weights.sum((0, 1)) for batch in microbatches]).sum(0)

    step._scales_of_depths = scales


def batch_sends_between_two_stages() -> None:
    """With two stages the next rank is also the previous one, and batched sends over gloo carry no tag: they swap."""
    from megatron_ext.train import build

    transformer_config = build.transformer_config

    def batched(*args: Any, **settings: Any) -> Any:
        config = transformer_config(*args, **settings)
        config.batch_p2p_comm, config.overlap_p2p_comm = True, False
        return config

    build.transformer_config = batched


def double_the_gradient_of_one_expert() -> None:
    """The second expert of the second expert-parallel rank: number 5 of 8."""
    from megatron_ext.parts.experts import compute as moe

    build = moe.ExpertMatrices.__init__

    def build_with_fault(self: Any, *sizes: Any, groups: Any, **settings: Any) -> None:
        build(self, *sizes, groups=groups, **settings)
        if groups.ep.rank() == 1:
            factors = torch.ones(len(self.weight), 1, 1)
            factors[1] = 2.0
            self.weight.register_hook(lambda gradient: gradient * factors)

    moe.ExpertMatrices.__init__ = build_with_fault


def add_the_bias_of_experts_on_every_rank() -> None:
    """Ranks that divide an expert each add its bias to their part of the sum."""
    from megatron_ext.parts.experts import compute as moe

    build = moe.ExpertMatrices.__init__

    def build_with_fault(self: Any, *sizes: Any, **settings: Any) -> None:
        build(self, *sizes, **settings)
        if self.bias is not None and self.divided == 1:
            self.divided = 0

    moe.ExpertMatrices.__init__ = build_with_fault


def weigh_no_bias_of_an_expert() -> None:
    """Every rank but the first adds the bias of an expert whatever the token's weight."""
    from megatron_ext.parts.experts import compute as moe

    rows = moe.rows_of_biases
    moe.rows_of_biases = lambda *values: rows(*values[: 3 if torch.distributed.get_rank() else 4])


def keep_what_another_rank_would() -> None:
    """Each rank but the first has the capacity of its experts taken by the tokens of the rank before it."""
    from megatron_ext.parts.experts import router as moe

    within = moe.preferred
    moe.preferred = lambda weights, *rest: within(weights, *rest).roll(torch.distributed.get_rank(), 0)


def give_each_rank_two_neighbouring_chunks() -> None:
    """Ranks read chunks 2r and 2r + 1, while attention and positions think of r and 2 x size - 1 - r."""
    from megatron_ext.data import packing

    packing.context_chunks = lambda rank, size: (2 * rank, 2 * rank + 1)


def turn_the_ring_around() -> None:
    """Keys travel the other way than the ranks believe. With two ranks both ways are the same: it takes four."""
    from megatron_ext.parts.attention import context_parallel

    context_parallel._neighbours = lambda rank, size: ((rank - 1) % size, (rank + 1) % size)


def average_over_ranks() -> None:
    """torch's own default, which megatron-core's wrapper keeps: the mean over the ranks, where the sum belongs."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda *_args: None  # pyright: ignore[reportAttributeAccessIssue]
    FSDPModule.set_force_sum_reduction_for_comms = lambda *_args: None  # pyright: ignore[reportAttributeAccessIssue]


def multiply_nothing_on_the_last_stage() -> None:
    from megatron_ext.model import gpt

    multiply = gpt._multiply_outputs
    gpt._multiply_outputs = lambda chunk, model: None if chunk.post_process else multiply(chunk, model)


def rotate_every_layer() -> None:
    from megatron_ext.parts import spec

    spec._columns = lambda layer, tables: slice(None)


def leave_rotated_heads_as_they_are() -> None:
    from megatron_ext.parts.norm import compute as norm

    norm._AfterRotation.of_rotated = lambda self, x: x


def add_the_bias_of_attention_on_every_rank() -> None:
    """The sum over tensor-parallel ranks then has it once for each."""
    from megatron_ext.parts.linear import compute as linear

    make = linear.BiasedRowLinear.__init__

    def make_without_a_sum(self: Any, *sizes: int, **settings: Any) -> None:
        make(self, *sizes, **settings)
        if self.bias is not None:
            self.register_forward_hook(lambda _module, _inputs, output: (output[0], output[1] * self.tp_group.size()))

    linear.BiasedRowLinear.__init__ = make_without_a_sum  # pyright: ignore[reportAttributeAccessIssue]


def normalize_for_the_mlp_as_for_attention() -> None:
    """One norm, where the MLP has its own: its weights then have no gradient."""
    from megatron.core.transformer.identity_op import IdentityOp

    from megatron_ext.parts.layer import ResidualLayer

    layer: Any = ResidualLayer
    both = layer._both

    def through_one(self: Any, attended: Any, normed: Any, hidden_states: Any, forget: Any) -> Any:
        own, self._modules["pre_mlp_layernorm"] = self.pre_mlp_layernorm, IdentityOp()
        output = both(self, attended, normed, hidden_states, forget)
        self._modules["pre_mlp_layernorm"] = own
        return output

    layer._both = through_one


def sum_attention_over_the_ranks_before_the_mlp_too() -> None:
    """What attention gives is then in the sum of both once for each tensor-parallel rank."""
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region as total

    from megatron_ext.parts.layer import ResidualLayer

    layer: Any = ResidualLayer
    both = layer._both

    def summed(self: Any, attended: Any, *others: Any) -> Any:
        return both(self, (total(attended[0], group=self.self_attention.linear_proj.tp_group), attended[1]), *others)

    layer._both = summed


def leave_the_bias_of_logits_out() -> None:
    from megatron_ext.model.loss import OutputLayer

    layer: Any = OutputLayer
    compute = layer.forward

    def without(self: Any, *inputs: Any, **settings: Any) -> Any:
        bias, self.bias = self.bias, None
        output = compute(self, *inputs, **settings)
        self.bias = bias
        return output

    layer.forward = without


def give_every_rank_the_slopes_of_the_first() -> None:
    from megatron_ext.parts.attention.scores import Scores

    of_heads = Scores.of_heads
    Scores.of_heads = lambda self, rank, size: of_heads(self, 0, size)


def count_positions_from_each_chunk() -> None:
    """Distances around the ring are then those within a chunk."""
    from megatron_ext.parts.attention import context_parallel

    context_parallel.context_chunks = lambda rank, size: (0, 0)


def leave_out_the_sink_of_the_ring() -> None:
    from megatron_ext.parts.attention import context_parallel

    context_parallel.with_sink = lambda out, log_sum_exp, sink: (out, log_sum_exp)


def open_every_gate() -> None:
    from megatron_ext.parts.attention.compute import CausalSelfAttention

    attention: Any = CausalSelfAttention
    attention._gated = lambda self, context, gate: context


def gate_heads_in_the_order_of_the_last() -> None:
    """Each rank's first head is then multiplied by the gate of its last."""
    from megatron_ext.parts.attention.compute import CausalSelfAttention

    attention: Any = CausalSelfAttention
    gated = attention._gated
    attention._gated = lambda self, context, gate: gated(self, context, gate if gate is None else gate.flip(2))


def let_logits_grow() -> None:
    from megatron_ext.model import loss

    loss.capped = lambda logits, cap: logits


def clip_nothing() -> None:
    from megatron_ext.parts.attention import compute

    attention: Any = compute.CausalSelfAttention
    attention._clipped = lambda _self, heads: heads


def _marks(change: Callable[..., Any]) -> None:
    """Have matrices marked otherwise: `change` gets shape, sections, divided dimension, group and rows."""
    from megatron_ext.sharding import engine

    engine.Matrix = change


def leave_parts_of_the_momentum_on_their_ranks() -> None:
    from megatron_ext.parallel.matrices import Matrix

    _marks(lambda shape, sections, divided, group, rows: Matrix(shape, sections, None, None, rows))


def leave_rows_of_the_momentum_on_their_ranks() -> None:
    from megatron_ext.optim import muon

    muon.on_owners = lambda parts, shards, compute: compute(list(range(len(parts))), parts)


def take_keys_for_queries() -> None:
    from megatron_ext.parallel.matrices import Matrix

    _marks(lambda shape, sections, *others: Matrix(shape, sections[::-1], *others))


def scale_by_the_shape_of_a_part() -> None:
    from megatron_ext.optim import muon

    scale = muon.scale
    muon.scale = lambda mode, rows, columns: scale(mode, rows // 2, columns)


def take_means_of_parts() -> None:
    from megatron_ext.parallel.matrices import Matrix

    setattr(Matrix, "summed", lambda self, x, *dims: x.sum(dims, keepdim=True))  # noqa: B010


def take_parts_for_matrices() -> None:
    from megatron_ext.parallel.matrices import Matrix

    setattr(Matrix, "size", lambda self, dim: self.shape[dim])  # noqa: B010


def bound_the_products_of_own_tokens() -> None:
    """Of ranks that have the same weights and other tokens."""
    from megatron_ext.optim.qk_clip import LargestScores

    take: Any = LargestScores.take

    def of_rank(self: Any) -> Any:
        self._group = torch.distributed.new_subgroups(1)[0]
        return take(self)

    setattr(LargestScores, "take", of_rank)  # noqa: B010


def look_at_the_keys_of_own_positions() -> None:
    """Of context-parallel ranks, as if a sample were no longer."""
    from megatron_ext.parts.attention.compute import SDPAttention

    measure: Any = SDPAttention._measure

    def of_rank(self: Any, *heads: Any) -> None:
        group, self.cp_group = self.cp_group, None
        measure(self, *heads)
        self.cp_group = group

    setattr(SDPAttention, "_measure", of_rank)  # noqa: B010


def rescale_rows_of_another_rank() -> None:
    """Where data-parallel ranks have rows of a weight."""
    from megatron_ext.optim import qk_clip

    shard_of: Any = qk_clip.row_shard
    qk_clip.row_shard = lambda weight: shard_of(weight) and dataclasses.replace(shard_of(weight), first=0)


def give_every_rank_its_own_momentum() -> None:
    """Gradients are reduced, and one rank's momentum decays otherwise."""
    from megatron_ext.optim.muon import Muon

    direction: Any = Muon._direction

    def of_rank(self: Any, weight: torch.Tensor) -> torch.Tensor:
        self._momentum = 0.9 if torch.distributed.get_rank() == 0 else 0.5
        return direction(self, weight)

    setattr(Muon, "_direction", of_rank)  # noqa: B010
