"""Computes a Gated DeltaNet layer on plain torch (Yang et al. 2024, arXiv:2412.06464, figure 1), as Qwen3-Next has it.

One projection gives the queries, keys, values, output gates, and two numbers of every value head; a short convolution
over the latest positions mixes queries, keys and values; the gated delta rule (`rule.py`) takes the place of attention;
its output is normalized head by head, gated, and projected. Several value heads share each key head, and rows of the
projection lie key head by key head: tensor-parallel ranks divide all of it by key heads. megatron-core's GatedDeltaNet
needs `fla` and a GPU; names are as in that class.

Kimi Delta Attention (arXiv:2510.26692, section 4) is the same with a decay for each channel of the key; the vectors
from which decays and output gates are projected are computed from the tokens that a rank has, as the latents of
attention are.

All of it between the two projections is computed span by span, and again in the backward pass, so that only the
projection's output and a state for each span are kept of a sequence.

Context-parallel ranks have two pieces of every sample. A piece maps the state before it affinely, S -> A S + C: all
ranks gather A and C of all pieces, and the last inputs of the convolution of each, and compute from these the state
before each of their pieces.

Shapes: P pieces of S positions, B samples, G key heads of this rank, R value heads of each, D and V channels of a key
and of a value head, M channels of a key head in all that is projected (X in the convolution, which come first; then
gates, how far is written, decays), K positions of the convolution.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.distributed import ProcessGroup

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.parts.attention.cached import Sequences, WholeSequences
from megatron_ext.parts.linear.compute import ColumnLinear, RowLinear, WholeLinear
from megatron_ext.parts.norm.compute import uninitialized
from megatron_ext.plugins.gated_delta.describe import SPAN, GatedDelta
from megatron_ext.plugins.gated_delta.rule import rule_of

_L2_EPSILON = 1e-6


class Weight(torch.nn.Module):
    """Holds a weight and a bias, either of which may be None, that other modules compute with. These call the module
    before they read its parameters, because a sharding scheme that gathers weights does so in a module's forward
    pass."""

    def __init__(self, weight: torch.nn.Parameter | None = None, bias: torch.nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self) -> None:
        """Do nothing; hooks run."""


class GatedDeltaNet(MegatronModule):
    """Projects, convolves, applies the gated delta rule, normalizes, gates, and projects the result.

    Args:
        described: its description.
    """

    divided: ClassVar[tuple[str, ...]] = ("conv1d.weight", "dt_bias", "A_log")
    """Names of the parameters, besides the projections, that tensor-parallel ranks divide and every span computes with,
    in the order of `_span`'s arguments."""

    divided_for_reading: tuple[str, ...] = ()
    """Names of the divided parameters that a span needs only to compute outputs; they replace the norm's vectors."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        *,
        described: GatedDelta,
        **_unused: object,
    ) -> None:
        super().__init__(config)
        self.described, self.layer_number = described, layer_number
        self.tp_group: Any = pg_collection.tp
        self.cp_group: Any = pg_collection.cp if config.context_parallel_size > 1 else None
        self.checkpoint_core_attention = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or ()
        )
        linear: Any = {"config": config, "bias": False, "tp_group": self.tp_group}
        column: Any = partial(
            ColumnLinear, **linear, init_method=config.init_method, gather_output=False, skip_bias_add=False
        )
        self.in_proj = column(config.hidden_size, described.projected_size)
        if described.by_channel:
            rank = described.value_size
            self.gates_in_proj = WholeLinear(config, config.hidden_size, described.gates_size)
            self.decay_out_proj = column(rank, described.value_heads * described.key_size)
            self.gate_out_proj = column(rank, described.context_size)
        heads, channels = (size // self.tp_group.size() for size in (described.value_heads, described.convolved_size))
        self.conv1d = Weight(divided_parameter(config, channels, 1, described.kernel))
        self.dt_bias = divided_parameter(config, heads * described.decays)
        self.A_log = divided_parameter(config, heads)
        self.out_norm = Weight(
            *(uninitialized(config, described.value_size) for _ in range(1 + described.norm.has_bias))
        )
        for own in self.out_norm.parameters():
            # Ranks add up its gradient in any case, since each has other heads.
            own.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
        self.out_proj = RowLinear(
            *(described.context_size, config.hidden_size),
            **linear,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    @property
    def linear_proj(self) -> RowLinear:
        """The output projection, by the name that attention has for it."""
        return self.out_proj

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the parameters as megatron-core's checkpoints take them."""
        assert metadata is not None, "which ranks hold the same?"
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: self.get_parameter(name) for name in (*self.divided, *self.divided_for_reading)}
        return found | make_sharded_tensors_for_checkpoint(
            own,  # the parameters themselves, by which the optimizer's state finds its names
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: object = None,
        packed_seq_params: Sequences | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the projected output, [S, B, hidden], and no bias. hidden_states: [S, B, hidden]. With
        `packed_seq_params` states begin anew in each document, or some positions alone are read, [N, 1, hidden]."""
        assert attention_mask is None, "the mask is causal"
        mixed_SBM = self._mixed(hidden_states)
        core: Any = partial(self._core, packed_seq_params)
        if self.checkpoint_core_attention and self.training:
            context: Any = tensor_parallel.checkpoint(core, False, mixed_SBM)
        else:
            context = core(mixed_SBM)
        if packed_seq_params is not None:
            context = packed_seq_params.narrowed(context, self)
        return self.out_proj(context)

    def _mixed(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Return all that is projected from each position, [S, B, G x M]."""
        mixed_SBM, _ = self.in_proj(hidden_SBH)
        if not self.described.by_channel:
            return mixed_SBM
        groups = self.described.key_heads // self.tp_group.size()
        halves = self.gates_in_proj(hidden_SBH).chunk(2, dim=-1)
        layers = (self.decay_out_proj, self.gate_out_proj)
        decays, gates = (layer(half.contiguous())[0] for layer, half in zip(layers, halves, strict=True))
        mixed, decays, gates = (x.unflatten(-1, (groups, -1)) for x in (mixed_SBM, decays, gates))
        inputs, writes = mixed.tensor_split((-self.described.per_key,), dim=-1)
        return torch.cat((inputs, gates, writes, decays), dim=-1).flatten(2)

    @torch.compiler.disable
    def _core(self, sequences: Sequences | None, mixed_SBM: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the heads, normalized and gated, [S, B, G x R x V]."""
        self.conv1d()
        self.out_norm()
        described, group = self.described, self.cp_group
        inference = sequences if isinstance(sequences, WholeSequences) else None
        if inference is not None:
            group = None  # context-parallel ranks have sequences of their own
        pieces, (length, rows, _) = 1 if group is None else 2, mixed_SBM.shape
        groups = described.key_heads // self.tp_group.size()
        mixed_PSBGM = mixed_SBM.view(pieces, -1, rows, groups, mixed_SBM.size(-1) // groups)
        inputs_PSBGX = mixed_PSBGM[..., : described.convolved_size // described.key_heads]
        begins_BS = None if sequences is None else sequences.begins(rows, length)
        ids = None
        if begins_BS is not None:
            ids = begins_BS.T.unflatten(0, (pieces, -1)).cumsum(1)
            ids = F.pad(ids, (0, 0, described.kernel, 0))  # of the positions before, too
        reading: list[Any] = [self.get_parameter(name) for name in self.divided_for_reading]
        if not reading:
            reading = list(self.out_norm.parameters())
            if self.tp_group.size() > 1:
                reading = [copy_to_tensor_model_parallel_region(one, group=self.tp_group) for one in reading]
        run = partial(self._run, mixed_PSBGM, ids, None if inference is None else inference.counted(length))
        kept = None if inference is None else inference.recurrent(self.layer_number)
        tail, state = kept or self._empty_state(mixed_PSBGM, inputs_PSBGX)
        if group is not None:
            if length := tail.size(1):
                latest = inputs_PSBGX[:, -length:]
                if ids is not None:  # the next piece goes on with the last document alone
                    latest = latest * (ids[:, -length:] == ids[:, -1:])[..., None, None]
                tail = before_pieces(latest, group)
            state = self.states_before(run, tail, state)
        context_PSBC, state = run(tail, state, reading)
        assert context_PSBC is not None, "what is needed for that is given"
        if inference is not None:
            inference.keep_recurrent(self.layer_number, torch.cat((tail, inputs_PSBGX), dim=1), state)
        return context_PSBC.flatten(0, 1)

    @property
    def compute_span(self) -> Callable[..., tuple[torch.Tensor | None, torch.Tensor]]:
        """Function that computes a span, with the arguments of `_span`."""
        return _span

    def states_before(self, run: Any, tail: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the state before each of this rank's pieces.

        Args:
            run: `_run`, but for its last arguments.
            tail: inputs of the convolution before each piece.
            state: a state of nothing.
        """
        identity = torch.eye(self.described.key_size, dtype=state.dtype, device=state.device)
        _, maps = run(tail, torch.cat((state, identity.expand(*state.shape[:-1], -1)), dim=-1), ())
        return states(maps, self.cp_group)

    def _empty_state(self, mixed: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs of the convolution, [P, K - 1, B, G, X], and a state, [P, B, G, R, D, V], of nothing."""
        described, (pieces, _, rows, groups, channels) = self.described, inputs.shape
        tail = inputs.new_zeros(pieces, described.kernel - 1, rows, groups, channels)
        sizes = (pieces, rows, groups, described.per_key, described.key_size, described.value_size)
        return tail, mixed.new_zeros(sizes, dtype=torch.promote_types(mixed.dtype, torch.float32))

    def _run(
        self,
        mixed_PSBGM: torch.Tensor,
        ids: torch.Tensor | None,
        counted_SB: torch.Tensor | None,
        tail: torch.Tensor,
        state: torch.Tensor,
        reading: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the outputs, [P, S, B, G x R x V], and the state after the last position, computed span by span.
        `reading` holds the parameters that the outputs need; where it is empty, the outputs are None.

        Args:
            ids: number of each position's document in its piece, with K zeros before, [P, K + S, B].
            counted_SB: which positions change the state; None: all.
        """
        described, outputs = self.described, []
        own = [self.get_parameter(name) for name in self.divided]
        for start in range(0, mixed_PSBGM.size(1), SPAN):
            span = mixed_PSBGM[:, start : start + SPAN]
            if start and described.kernel > 1:
                tail = mixed_PSBGM[:, start - described.kernel + 1 : start, ..., : tail.size(-1)]
            end = start + span.size(1)
            compute = partial(
                self.compute_span,
                described,
                None if ids is None else ids[:, start : end + described.kernel],
                None if counted_SB is None else counted_SB[start:end],
            )
            output, state = AgainInBackward.apply(compute, span, tail, state, *own, *reading)  # pyright: ignore
            outputs.append(output)
        return (torch.cat(outputs, dim=1) if reading else None), state


class AgainInBackward(torch.autograd.Function):
    """Computes a function once more in the backward pass, from its saved inputs. The function must draw no random
    numbers: unlike megatron-core's and torch's checkpoints, this keeps no generators' states."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        inputs = [x if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o is not None and g is not None]
        computed, given = zip(*pairs, strict=True)
        leaves = [x for x in inputs if x is not None]
        found = iter(torch.autograd.grad(computed, leaves, given, allow_unused=True))
        return None, *(None if x is None else next(found) for x in inputs)


def _span(
    described: GatedDelta,
    ids: torch.Tensor | None,
    counted_SB: torch.Tensor | None,
    mixed_PSBGM: torch.Tensor,
    tail_PKBGX: torch.Tensor,
    state: torch.Tensor,
    conv_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    *norm: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the outputs of a span, [P, S, B, G x R x V], or None without parameters for them, and the state after
    it."""
    groups, per_key, wide = mixed_PSBGM.size(3), described.per_key, state.dtype
    values, rule = per_key * described.value_size, rule_of(described, mixed_PSBGM.dtype)
    decays = described.decays
    mixed = mixed_PSBGM.split((tail_PKBGX.size(-1), values, per_key, per_key * decays), dim=-1)
    inputs = torch.cat((tail_PKBGX, mixed[0]), dim=1).to(wide)
    convolved = F.silu(convolved_inputs(inputs, conv_weight.to(wide).view(groups, -1, described.kernel), ids))
    convolved = convolved.to(mixed_PSBGM.dtype).to(wide)  # as a convolution of 16-bit numbers rounds
    query, key, value = convolved.split((described.key_size, described.key_size, values), dim=-1)
    query, key = (_normed(x).permute(0, 2, 3, 1, 4).unsqueeze(3) for x in (query, key))
    value = value.unflatten(-1, (per_key, -1)).permute(0, 2, 3, 4, 1, 5)
    beta, step = (x.unflatten(-1, (per_key, -1)).permute(0, 2, 3, 4, 1, 5).to(wide) for x in mixed[2:])
    of_heads = (groups, per_key, 1, -1)
    log_decay = -a_log.to(wide).exp().view(of_heads) * F.softplus(step + dt_bias.to(wide).view(of_heads))
    beta = described.furthest_write * beta.sigmoid()
    if counted_SB is not None:
        counted = counted_SB.T[None, :, None, None, :, None]
        beta, log_decay = beta * counted, log_decay * counted
    documents = documents_of_span(ids, described.kernel)
    if not norm:
        value = F.pad(value, (0, state.size(-1) - value.size(-1)))
        return None, rule(None, key, value, log_decay, beta, state, documents)[1]
    query = query * described.key_size**-0.5
    read, state = rule(query, key, value, log_decay, beta, state, documents)
    assert read is not None, "there are queries"
    vectors, epsilon = [vector.to(wide) for vector in norm], described.norm.epsilon
    if described.norm.kind == "RMSNorm":
        normed = F.rms_norm(read, norm[0].shape, *vectors, eps=epsilon)
    else:
        normed = F.layer_norm(read, norm[0].shape, *vectors, eps=epsilon)
    gate = mixed[1].unflatten(-1, (per_key, -1)).to(wide)
    output = normed.permute(0, 4, 1, 2, 3, 5) * (gate.sigmoid() if described.by_channel else F.silu(gate))
    return output.flatten(3).to(mixed_PSBGM.dtype), state


def convolved_inputs(inputs_PKBGX: torch.Tensor, weight_GXK: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Return the sum over the latest K positions of each, of its own document, with a weight for each channel and
    distance, [P, S, B, G, X]. inputs_PKBGX: [P, K - 1 + S, B, G, X]."""
    kernel = weight_GXK.size(-1)
    length = inputs_PKBGX.size(1) - kernel + 1
    total = inputs_PKBGX[:, kernel - 1 :] * weight_GXK[..., -1]
    for place in range(kernel - 1):
        seen = inputs_PKBGX[:, place : place + length]
        if ids is not None:
            same = ids[:, 1 + place : 1 + place + length] == ids[:, kernel:]
            seen = seen * same[..., None, None]
        total = total + seen * weight_GXK[..., place]
    return total


def _normed(x: torch.Tensor) -> torch.Tensor:
    """Return vectors of the length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPSILON)


def documents_of_span(ids: torch.Tensor | None, kernel: int) -> torch.Tensor | None:
    """Return the number of each position's document, [P, B, 1, 1, S], where 0 is the document that the state before the
    span belongs to. ids: [P, K + S, B], the K positions before the span first."""
    if ids is None:
        return None
    return (ids[:, kernel:] - ids[:, kernel - 1, None]).permute(0, 2, 1)[:, :, None, None]


def divided_parameter(config: TransformerConfig, *size: int, dim: int = 0) -> torch.nn.Parameter:
    """Return a parameter without values, this tensor-parallel rank's rows of the whole, or its part of dimension
    `dim`."""
    parameter = uninitialized(config, *size)
    del parameter.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
    return parameter


def _gathered(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return x [P, ...] of all pieces of the samples, in the order of the positions."""
    parts = gather_from_sequence_parallel_region(x.unsqueeze(0), group=group)
    assert isinstance(parts, torch.Tensor)
    found: dict[int, torch.Tensor] = {}
    for rank, part in enumerate(parts.unbind()):
        found |= dict(zip(context_chunks(rank, group.size()), part.unbind(), strict=True))
    return [found[piece] for piece in range(len(found))]


def _own(pieces: list[torch.Tensor], group: Any) -> torch.Tensor:
    return torch.stack([pieces[piece] for piece in context_chunks(group.rank(), group.size())])


def before_pieces(last: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the last inputs of the piece before each of this rank's pieces, gathered from all ranks; zeros before a
    sample's first piece."""
    every = _gathered(last, group)
    return _own([torch.zeros_like(every[0]), *every[:-1]], group)


def states(
    maps_PBGRDX: torch.Tensor, group: Any, apply: Callable[..., torch.Tensor] = torch.matmul, columns: int | None = None
) -> torch.Tensor:
    """Return the state before each of this rank's pieces, from the affine map of every piece: columns that the piece
    adds to a state, and last the `columns` (default D) that `apply` multiplies with the state before the piece."""
    columns = columns or maps_PBGRDX.size(-2)
    every = _gathered(maps_PBGRDX, group)
    found = [torch.zeros_like(every[0][..., :-columns])]
    for one in every[:-1]:
        found.append(one[..., :-columns] + apply(one[..., -columns:], found[-1]))
    return _own(found, group)


def mixer_spec(described: GatedDelta, _tp_group: ProcessGroup, _columns: slice | None) -> ModuleSpec:
    """Return the spec of a layer's gated delta rule."""
    # Depths of multi-token prediction ask a mixer for its mask.
    return ModuleSpec(GatedDeltaNet, {"attn_mask_type": AttnMaskType.causal, "described": described})
