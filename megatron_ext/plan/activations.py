"""Bytes of activations that a rank holds for one microbatch between its forward and its backward pass.

Per layer, with T = S/c B tokens of a rank, H hidden, D a head's channels, q and g query and key/value heads of a rank,
F the rank's width of the MLP, w bytes of an element; what sequence parallelism divides is marked /t:

    residual      2 w T H /t                inputs of the two norms
    norms         2 (w T H + 4 T) /t        their outputs, and 1/RMS in fp32 (LayerNorm: mean and 1/deviation, 8)
    heads         w T D (q + 2 g)           queries, keys, values (with all_gather: keys and values of all positions)
    core          w T D q + 4 T q           attention's result and the normalizer of its softmax; SDPA keeps no weights
    projection    w T D q                   input of the output projection
    mlp           w T 3 F                   SwiGLU in one kernel: gate and up, and their product (5 F where a CPU
                                            does it in steps, 2 F with GELU)
    dropout       2 T H /t                  masks: a byte an element on a GPU, w on a CPU

An expert's input, what is inside it (4 F with SwiGLU) and that times the router's weight count for every (token,
expert) pair; an even load is assumed. Measured against this: tests/unit/test_recompute_bytes.py, to the byte, and
tests/distributed/test_plan_bytes.py, on ranks, within 0.5% (5% with experts, whose load is never even).
Source of the scheme: Korthikanti et al. 2022 (arXiv:2205.05198, section 4), who store an unfused softmax as well.
"""

from dataclasses import dataclass

from megatron_ext.config.schema import Config

_FP32, _INT64 = 4, 8

# Of a mixture of experts: indices of a (token, expert) pair; a probability and a mark for each expert. Counted.
_OF_A_PAIR, _OF_A_LOGIT = 24, 5


@dataclass(frozen=True)
class LayerBytes:
    """What one layer holds of one microbatch, by part."""

    residual: float
    norms: float
    heads: float
    core: float
    projection: float
    mlp: float
    dropout: float

    @property
    def total(self) -> float:
        return self.residual + self.norms + self.heads + self.core + self.projection + self.mlp + self.dropout


@dataclass(frozen=True)
class ChunkBytes:
    """What one model chunk holds of one microbatch."""

    layers: float
    loss: float
    """What lies between the last layer and the loss: final norm, softmax of the logits."""

    rest: float
    """Embedding's dropout mask, rotary table."""

    recomputed: float
    """For a while in the backward pass, the activations of the layers, or parts, that are computed anew. By then what
    the loss held is gone."""

    logits: float
    """For a while around the loss, what its logits need beyond `loss`."""

    @property
    def held(self) -> float:
        return self.layers + self.loss + self.rest


class Activations:
    """The formulas of one resolved configuration.

    Args:
        fused: whether one kernel computes SwiGLU, and another RMSNorm, and dropout masks are bytes: on GPUs.
    """

    def __init__(self, config: Config, *, fused: bool):
        layout, model, training = config.layout, config.model, config.training
        self.config, self.fused = config, fused
        self.width = 2 if training.bf16 or training.fp16 else _FP32
        self.tensor, self.context = layout.tensor_model_parallel_size, layout.context_parallel_size
        self.divided = self.tensor if layout.sequence_parallel else 1
        self.tokens = model.seq_length // self.context * training.micro_batch_size
        self.stream = self.width * self.tokens * model.hidden_size / self.divided
        """Bytes of one residual stream."""

    def layer(self) -> LayerBytes:
        """One layer, without recomputation."""
        model, layout = self.config.model, self.config.layout
        channels = self.width * self.tokens * model.kv_channels
        queries = model.num_attention_heads // self.tensor
        groups = max(model.num_key_value_heads // self.tensor, 1)
        gathered = self.context if "all_gather" in layout.cp_comm_type else 1
        heads = channels * (queries + 2 * groups * gathered)
        if model.qk_layernorm:
            # What their norms keep: queries and keys once more, and a number of each head and token.
            heads += (channels + _FP32 * self.tokens) * (queries + groups)
        return LayerBytes(
            residual=2 * self.stream,
            norms=2 * (self.stream + self._statistics()),
            heads=heads,
            core=channels * queries + _FP32 * self.tokens * queries,
            projection=channels * queries,
            mlp=self._mlp(),
            dropout=2 * self._dropout_mask(),
        )

    def chunk(self, layers: int, *, first: bool, last: bool) -> ChunkBytes:
        """One chunk of so many layers; the first has the embedding, the last the loss."""
        held, recomputed = self._layers(layers)
        loss, logits = self._loss() if last else (0.0, 0.0)
        rest = self._dropout_mask() if first else 0.0
        return ChunkBytes(held, loss, rest + self._rotary_table(), recomputed, logits)

    def _layers(self, layers: int) -> tuple[float, float]:
        """Bytes held, and those that come back for a while."""
        training, layer = self.config.training, self.layer()
        if layers == 0:
            return 0.0, 0.0
        if training.recompute_granularity == "full":
            units = training.recompute_num_layers or 1
            # The first norm of a unit keeps the input that is held already; RMSNorm on a CPU keeps another tensor.
            own_input = self.fused or self.config.model.normalization != "RMSNorm"
            shared = self.stream if own_input else 0.0
            if training.recompute_method == "block":
                again = min(units, layers)
                return again * self.stream + (layers - again) * layer.total, layer.total - shared
            return -(-layers // units) * self.stream, min(units, layers) * layer.total - shared
        if training.recompute_granularity == "selective":
            sizes = {"core_attn": layer.core, "layernorm": layer.norms, "mlp": layer.mlp}
            dropped = [sizes[part] for part in training.recompute_modules or ("core_attn",)]
            return layers * (layer.total - sum(dropped)), sum(dropped)
        return layers * layer.total, 0.0

    def _loss(self) -> tuple[float, float]:
        """Held until the backward pass, and what comes on top around the loss."""
        model = self.config.model
        norm = 2 * self.stream + self._statistics()
        copy = 0 if self.width == _FP32 else self.width  # 16-bit logits beside their fp32 copy
        if self.tensor > 1:
            # The softmax overwrites the fp32 logits; beside it lie the labels of this rank's part and their mask.
            logits = self.tokens * model.padded_vocab_size / self.tensor
            return norm + _FP32 * logits + (_INT64 + 1) * self.tokens, copy * logits
        logits = self.tokens * (self.config.data.vocab_size or model.padded_vocab_size)
        held = norm + _FP32 * logits + _INT64 * self.tokens + _FP32  # log-softmax, labels, their total weight
        return held, (_FP32 + copy) * logits

    def _mlp(self) -> float:
        model = self.config.model
        if model.num_experts is None:
            return self._gated(model.ffn_hidden_size) * self.tokens / self.tensor
        layout, own = self.config.layout, self.tokens / self.divided
        # Every rank of an expert's tensor-parallel group has all of its pairs.
        pairs = model.moe_router_topk * own * layout.expert_tensor_size
        inside = (5 if model.swiglu else 3) * self.width * model.expert_ffn_hidden_size / layout.expert_tensor_size
        held = pairs * (self.width * model.hidden_size + inside + _OF_A_PAIR)
        held += own * model.num_experts * _OF_A_LOGIT
        if model.moe_shared_expert_intermediate_size is not None:
            held += self._gated(model.moe_shared_expert_intermediate_size) * self.tokens / self.tensor
        return held

    def _gated(self, width: int) -> float:
        """Bytes a token of an MLP's inside, undivided."""
        times = (3 if self.fused else 5) if self.config.model.swiglu else 2
        return times * width * self.width

    def _statistics(self) -> float:
        each = _FP32 if self.config.model.normalization == "RMSNorm" else 2 * _FP32
        return each * self.tokens / self.divided

    def _dropout_mask(self) -> float:
        if self.config.model.hidden_dropout == 0.0:
            return 0.0
        return self.stream if not self.fused else self.stream / self.width

    def _rotary_table(self) -> float:
        model = self.config.model
        if model.position_embedding_type != "rope":
            return 0.0
        rotated = int(model.kv_channels * model.rotary_percent)
        return self.width * model.seq_length // self.context * rotated
