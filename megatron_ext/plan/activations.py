"""Bytes of activations that a rank holds for one microbatch between its forward and its backward pass.

Per layer, with T = S/c B tokens of a rank, H hidden, D and V channels of a query or key head and of a value head, q
and g query and key/value heads of a rank, F the rank's width of the MLP, w bytes of an element; what sequence
parallelism divides is marked /t:

    residual      2 w T H /t                inputs of the two norms
    norms         2 (w T H + 4 T) /t        their outputs, and 1/RMS in fp32 (LayerNorm: mean and 1/deviation, 8)
    heads         w T (D (q + g) + V g)     queries, keys, values (with all_gather: keys and values of all positions)
    core          w T V q + 4 T q           attention's result and the normalizer of its softmax; SDPA keeps no weights
    projection    w T V q                   input of the output projection
    mlp           w T 3 F                   SwiGLU in one kernel: gate and up, and their product (5 F where a CPU
                                            does it in steps, 2 F with GELU)
    dropout       2 T H /t                  masks: a byte an element on a GPU, w on a CPU
    gathered      2 w T H (t-1)/t           with --sequence-parallel-keep-gathered, the inputs of both blocks but for
                                            this rank's part, which is among the norms' outputs

An expert's input, what is inside it (4 F with SwiGLU) and that times the router's weight count for every (token,
expert) pair; an even load is assumed. Measured against this: tests/unit/test_recompute_bytes.py, to the byte, and
tests/distributed/test_plan_bytes.py, on ranks, within 0.5% (5% with experts, whose load is never even).
Source of the scheme: Korthikanti et al. 2022 (arXiv:2205.05198, section 4), who store an unfused softmax as well.
"""

import functools
from dataclasses import dataclass

from megatron_ext.config.derived.loss_chunks import LOSS_CHUNKS
from megatron_ext.config.schema import Config
from megatron_ext.parts.stack import Attention, Layer, Mlp, Norm, Stack, final_norm, stack

_FP32, _INT64 = 4, 8

# Of a mixture of experts: indices of a (token, expert) pair; a probability and a mark for each expert. Counted.
_OF_A_PAIR, _OF_A_LOGIT = 24, 5


@dataclass(frozen=True)
class LayerBytes:
    """The bytes that one layer holds of one microbatch, by part."""

    residual: float
    norms: float
    heads: float
    core: float
    projection: float
    mlp: float
    dropout: float

    @functools.cached_property
    def total(self) -> float:
        """Sum over the parts."""
        return self.residual + self.norms + self.heads + self.core + self.projection + self.mlp + self.dropout


@dataclass(frozen=True)
class ChunkBytes:
    """The bytes that one model chunk holds of one microbatch."""

    layers: float
    loss: float
    """Bytes of what lies between the last layer and the loss: final norm, softmax of the logits."""

    rest: float
    """Bytes of the embedding's dropout mask and the rotary table."""

    recomputed: float
    """Bytes held for a while in the backward pass: the activations of the layers, or parts, that are computed anew. By
    then what the loss held is gone."""

    logits: float
    """Bytes held for a while around the loss, which its logits need beyond `loss`."""

    @property
    def held(self) -> float:
        """Bytes held until the backward pass."""
        return self.layers + self.loss + self.rest


def recomputation(config: Config) -> tuple[object, ...]:
    """Return all that says what is recomputed."""
    training = config.training
    return (
        training.recompute_granularity,
        training.recompute_method,
        training.recompute_num_layers,
        training.recompute_modules,
    )


class Activations:
    """The formulas of one resolved configuration.

    Args:
        fused: whether one kernel computes SwiGLU, and another RMSNorm, and dropout masks are bytes: on GPUs.
    """

    def __init__(self, config: Config, *, fused: bool):
        layout, model, training = config.layout, config.model, config.training
        self.config, self.fused = config, fused
        self.width = training.params_bytes
        self.tensor, self.context = layout.tensor_model_parallel_size, layout.context_parallel_size
        self.divided = self.tensor if layout.sequence_parallel else 1
        self.tokens = model.seq_length // self.context * training.micro_batch_size
        self.stream = self.width * self.tokens * model.hidden_size / self.divided
        """Bytes of one residual stream."""
        self.kinds = stack(config).kinds
        self._of_kinds: dict[Layer, LayerBytes] = {}
        self._of_chunks: dict[tuple[object, bool, bool], ChunkBytes] = {}
        self._of_recomputations: dict[tuple[object, ...], Activations] = {recomputation(config): self}

    def recomputing(self, config: Config) -> "Activations":
        """Return the formulas of a configuration that differs from this one in what it recomputes alone."""
        again = recomputation(config)
        found = self._of_recomputations.get(again)
        if found is None:
            found = self._of_recomputations[again] = Activations.__new__(Activations)
            vars(found).update(vars(self), config=config, _of_chunks={})
        return found

    def layer(self, layer: Layer) -> LayerBytes:
        """Return the bytes of one layer, without recomputation."""
        found = self._of_kinds.get(layer)
        if found is None:
            found = self._of_kinds[layer] = self._layer(layer)
        return found

    def _layer(self, layer: Layer) -> LayerBytes:
        attention, width = layer.attention, self.width * self.tokens
        queries = attention.query_heads // self.tensor
        context = width * attention.value_head_size * queries
        return LayerBytes(
            residual=2 * self.stream,
            # One after attention or MLP keeps what they gave, and they the stream itself: as much as one before.
            norms=layer.norm_count * (self.stream + self._statistics(layer.norm)),
            heads=self._heads(attention),
            core=context + _FP32 * self.tokens * queries,
            projection=context,
            mlp=self._mlp(layer),
            dropout=2 * self._dropout_mask(),
        )

    def chunk(self, layers: Stack, *, first: bool, last: bool) -> ChunkBytes:
        """Return the bytes of one chunk of these layers; the first has the embedding, the last the loss."""
        key = layers.kinds, first, last
        if key not in self._of_chunks:
            held, recomputed = self._layers(layers)
            loss, logits = self._loss() if last else (0.0, 0.0)
            rest = self._dropout_mask() if first else 0.0
            self._of_chunks[key] = ChunkBytes(held, loss, rest + self._rotary_table, recomputed, logits)
        return self._of_chunks[key]

    def total(self, layers: Stack) -> float:
        """Return the bytes of some layers, without recomputation."""
        return layers.total(lambda layer: self.layer(layer).total)

    def _layers(self, layers: Stack) -> tuple[float, float]:
        """Return the bytes held, and those that come back for a while."""
        training = self.config.training
        if len(layers) == 0:
            return 0.0, 0.0
        if training.recompute_granularity == "full":
            units = training.recompute_num_layers or 1
            # The first norm, or product, of a unit keeps the input that is held already; RMSNorm on a CPU keeps another
            # tensor.
            first = next(iter(layers))
            own_input = self.fused or first.norm.kind != "RMSNorm" or not first.norms_before
            shared = self.stream if own_input else 0.0
            if training.recompute_method == "block":
                again = layers[:units]
                largest = max(self.layer(kind).total for kind, _ in again.kinds)
                return len(again) * self.stream + self.total(layers[units:]), largest - shared
            if units == 1:
                return len(layers) * self.stream, max(self.layer(kind).total for kind, _ in layers.kinds) - shared
            parts = [layers[start : start + units] for start in range(0, len(layers), units)]
            return len(parts) * self.stream, max(map(self.total, parts)) - shared
        if training.recompute_granularity == "selective":
            dropped = {kind: self._dropped(kind) for kind, _ in layers.kinds}
            return layers.total(lambda layer: self.layer(layer).total - dropped[layer]), max(dropped.values())
        return self.total(layers) + self._gathered(layers), 0.0

    def _gathered(self, layers: Stack) -> float:
        """Return the bytes of the other ranks' parts of the inputs of attention and MLP, where these are kept. That
        goes without recomputation alone."""
        if not self.config.layout.sequence_parallel_keep_gathered:
            return 0.0
        blocks = layers.total(lambda layer: 2 if layer.every_token else 1)
        return blocks * (self.divided - 1) * self.stream

    def _dropped(self, layer: Layer) -> float:
        """Return the bytes of the parts of a layer that selective recomputation drops."""
        held = self.layer(layer)
        # Of a norm after attention or MLP nobody keeps the output.
        norms = held.norms * 2 * layer.norms_before / layer.norm_count
        sizes = {"core_attn": held.core, "layernorm": norms, "mlp": held.mlp}
        return sum(sizes[part] for part in self.config.training.recompute_modules or ("core_attn",))

    def _heads(self, attention: Attention) -> float:
        """Return the bytes of queries, keys and values, and of what their norms keep."""
        queries = attention.query_heads // self.tensor
        groups = max(attention.groups // self.tensor, 1)
        gathered = self.context if "all_gather" in self.config.layout.cp_comm_type else 1
        keys, values = attention.head_size * groups, attention.value_head_size * groups
        normed = attention.head_size * queries + keys
        held = self.width * self.tokens * (attention.head_size * queries + gathered * (keys + values))
        if attention.qk_norm is None:
            return held
        # Queries and keys once more, and a number of each head and token, or of each token's queries and keys.
        numbers = queries + groups if attention.qk_norm == "head" else 2
        return held + (self.width * normed + _FP32 * numbers) * self.tokens

    def _loss(self) -> tuple[float, float]:
        """Return the bytes held until the backward pass, and what comes on top around the loss."""
        model = self.config.model
        norm = 2 * self.stream + self._statistics(final_norm(model))
        copy = 0 if self.width == _FP32 else self.width  # 16-bit logits next to their fp32 copy
        if self.config.training.linear_cross_entropy:
            # Both gradients are there from the forward pass on, in place of what they are made of: that of the hidden
            # states of all tensor-parallel ranks' tokens, and that of this rank's matrix in fp32.
            for_hidden = self.width * self.tokens * model.hidden_size
            rows = model.padded_vocab_size // self.tensor
            chunk = min(self.tokens, LOSS_CHUNKS["cuda" if self.fused else "cpu"])
            held = norm - self.stream + for_hidden + _FP32 * rows * model.hidden_size
            return held, (_FP32 + 2 * copy) * chunk * rows
        if self.tensor > 1:
            # The softmax overwrites the fp32 logits; next to it lie the labels of this rank's part and their mask.
            logits = self.tokens * model.padded_vocab_size / self.tensor
            return norm + _FP32 * logits + (_INT64 + 1) * self.tokens, copy * logits
        logits = self.tokens * (self.config.data.vocab_size or model.padded_vocab_size)
        held = norm + _FP32 * logits + _INT64 * self.tokens + _FP32  # log-softmax, labels, their total weight
        return held, (_FP32 + copy) * logits

    def _mlp(self, layer: Layer) -> float:
        if layer.experts is None:
            return self._inside(layer.inner, gated=4) * self.tokens / self.tensor
        experts, layout, own = layer.experts, self.config.layout, self.tokens / self.divided
        # Every rank of an expert's tensor-parallel group has all of its pairs.
        pairs = experts.top_k * own * layout.expert_tensor_size
        inside = (5 if experts.mlp.gated else 3) * self.width * experts.mlp.width / layout.expert_tensor_size
        held = pairs * (self.width * self.config.model.hidden_size + inside + _OF_A_PAIR)
        held += own * experts.count * _OF_A_LOGIT
        if experts.shared is not None:
            held += self._inside(experts.shared, gated=5) * self.tokens / self.tensor
        return held

    def _inside(self, mlp: Mlp, *, gated: int) -> float:
        """Return the bytes a token of an MLP's inside, undivided; `gated`: how many widths a gate keeps on a CPU."""
        times = (3 if self.fused else gated) if mlp.gated else 2
        return times * mlp.width * self.width

    def _statistics(self, norm: Norm) -> float:
        each = _FP32 if norm.kind == "RMSNorm" else 2 * _FP32
        return each * self.tokens / self.divided

    def _dropout_mask(self) -> float:
        if self.config.model.hidden_dropout == 0.0:
            return 0.0
        return self.stream if not self.fused else self.stream / self.width

    @functools.cached_property
    def _rotary_table(self) -> float:
        """Return the bytes of one table for all layers that rotate alike."""
        attentions = [kind.attention for kind, _ in self.kinds]
        tables = {(found.rotary, found.rotary.channels(found.head_size)) for found in attentions if found.rotary}
        rotated = sum(channels for _, channels in tables)
        return self.width * self.config.model.seq_length // self.context * rotated
