"""Bytes of activations that a rank holds for one microbatch between its forward and its backward pass.

Per layer, with T = S/c B tokens of a rank, H hidden, F the rank's width of the MLP, w bytes of an element; tensors that
sequence parallelism divides are marked /t:

    residual      2 w T H /t                inputs of the two norms
    norms         2 (w T H + 4 T) /t        their outputs, and 1/RMS in fp32 (LayerNorm: mean and 1/deviation, 8)
    mixer         parts/attention/describe.py; other mixers have their own `describe.py`
    mlp           w T 3 F                   SwiGLU in one kernel: gate and up, and their product (5 F where a CPU
                                            does it in steps, 2 F with GELU)
    dropout       2 T H /t                  masks: a byte an element on a GPU, w on a CPU
    gathered      2 w T H (t-1)/t           with --sequence-parallel-keep-gathered, the inputs of both blocks but for
                                            this rank's part, which is among the norms' outputs

Measured against this: tests/unit/cost/test_activations.py, to the byte, and
tests/distributed/test_plan_bytes.py, on ranks, within 0.5% (5% with experts, whose load is never even).
Source of the scheme: Korthikanti et al. 2022 (arXiv:2205.05198, section 4), who store an unfused softmax as well.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_ext.config.derived.batch_size import LOSS_CHUNKS
from megatron_ext.config.schema import Config
from megatron_ext.parts.protocol import Share
from megatron_ext.parts.stack import Layer, Stack, final_norm, stack

_FP32, _INT64 = 4, 8


class LayerBytes:
    """The bytes that one layer holds of one microbatch.

    Attributes:
        parts: by name: residual, norms, dropout, and the bytes that the parts of the layer name (`Part.held`).
        total: sum over the parts.
    """

    def __init__(self, parts: Mapping[str, float]):
        self.parts, self.total = parts, sum(parts.values())


@dataclass(frozen=True)
class ChunkBytes:
    """The bytes that one model chunk holds of one microbatch."""

    layers: float
    loss: float
    """Bytes held between the last layer and the loss: final norm, softmax of the logits."""

    rest: float
    """Bytes of the embedding's dropout mask and the rotary table."""

    recomputed: float
    """Bytes held for a while in the backward pass: activations of recomputed layers or parts, and tensors that a mixer
    recomputes in any case. By then the loss's bytes are freed."""

    logits: float
    """Bytes of the logits held for a while around the loss, beyond `loss`."""

    @property
    def held(self) -> float:
        """Bytes held until the backward pass."""
        return self.layers + self.loss + self.rest


def recomputation(config: Config) -> tuple[object, ...]:
    """Return the values of the flags that decide what is recomputed."""
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
        self.config, self.share = config, Share(config, fused=fused)
        share = self.share
        self.fused, self.width, self.tensor, self.divided = fused, share.width, share.tensor, share.divided
        self.tokens, self.stream = share.tokens, share.stream
        self.kinds = stack(config).kinds
        self._of_kinds: dict[Layer, LayerBytes] = {}
        self._of_chunks: dict[tuple[object, bool, bool], ChunkBytes] = {}
        self._of_recomputations: dict[tuple[object, ...], Activations] = {recomputation(config): self}

    def recomputing(self, config: Config) -> "Activations":
        """Return the formulas of a configuration that differs from this one only in its recomputation."""
        again = recomputation(config)
        formulas = self._of_recomputations.get(again)
        if formulas is None:
            formulas = self._of_recomputations[again] = Activations.__new__(Activations)
            vars(formulas).update(vars(self), config=config, _of_chunks={})
        return formulas

    def layer(self, layer: Layer) -> LayerBytes:
        """Return the bytes of one layer, without recomputation."""
        sizes = self._of_kinds.get(layer)
        if sizes is None:
            sizes = self._of_kinds[layer] = self._layer(layer)
        return sizes

    def _layer(self, layer: Layer) -> LayerBytes:
        apart = layer.parallel == "two-norms" and not layer.norm.keeps_its_input(self.share)
        streams = layer.additions + apart  # two norms of one stream keep it once, or something else each
        parts = {"residual": streams * self.stream, "norms": self._norms(layer)}
        for part in layer.parts:
            parts |= part.held(self.share)
        return LayerBytes({**parts, "dropout": layer.additions * self._dropout_mask()})

    def _norms(self, layer: Layer) -> float:
        # One after attention or MLP keeps what they gave, and they the stream itself: as much as one before.
        places = sum((branch.before is not None) + (branch.after is not None) for branch in layer.branches)
        return places * layer.norm.held(self.share)

    def chunk(self, layers: Stack, *, first: bool, last: bool) -> ChunkBytes:
        """Return the bytes of one chunk of these layers; the first has the embedding, the last the loss."""
        key = layers.kinds, first, last
        if key not in self._of_chunks:
            of_layers, recomputed = self._layers(layers)
            loss, logits = self._loss() if last else (0.0, 0.0)
            # Of a depth that is computed anew, its norm's output alone is kept.
            if last and (depths := self.config.model.mtp_num_layers):
                # Of a depth that is computed anew, its norm's output alone is kept.
                anew = self.config.training.recompute_method == "uniform"
                freed = final_norm(self.config.model).held(self.share) if anew else 0.0
                others = depths * (loss - freed) + freed
                # When the last depth is recomputed, the bytes that the other depths' losses hold are not freed yet.
                recomputed += others + freed if recomputed else 0.0
                loss += others - freed
            rest = self._dropout_mask() if first else 0.0
            self._of_chunks[key] = ChunkBytes(of_layers, loss, rest + self._rotary_table, recomputed, logits)
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
            # The first norm, or product, of a unit keeps the input that is held already.
            first = next(iter(layers))
            own_input = first.norm.keeps_its_input(self.share) or not first.norms_before
            shared = self.stream if own_input else 0.0
            if training.recompute_method == "block":
                again = layers[:units]
                largest = max(self._alone(kind) for kind, _ in again.kinds)
                rest = layers[units:]
                return len(again) * self.stream + self.total(rest), max(largest - shared, self._again(rest))
            if units == 1:
                alone = {kind: self._alone(kind) for kind, _ in layers.kinds}
                # The inputs of later layers are gone by then.
                most = max(alone[kind] - later * self.stream for later, kind in enumerate(reversed([*layers])))
                return len(layers) * self.stream, most - shared
            parts = [layers[start : start + units] for start in range(0, len(layers), units)]
            most = max(self.total(part) + self._again(part) for part in parts)
            return len(parts) * self.stream, most - shared
        if training.recompute_granularity == "selective":
            dropped = {kind: self._dropped(kind) for kind, _ in layers.kinds}
            held = layers.total(lambda layer: self.layer(layer).total - dropped[layer])
            return held, max(*dropped.values(), self._again(layers, dropped))
        return self.total(layers) + self._gathered(layers), self._again(layers)

    def _alone(self, layer: Layer) -> float:
        """Return the most bytes that one layer holds, from its forward pass to the end of its backward pass."""
        return self.layer(layer).total + self._again((layer,))

    def _again(self, layers: Iterable[Layer], dropped: Mapping[Layer, float] = MappingProxyType({})) -> float:
        """Return the bytes beyond the layers' own at the peak of their backward passes, for tensors that a mixer
        recomputes in any case: activations of later layers are freed by then.

        Args:
            dropped: bytes of a layer that recomputation drops, its core included.
        """
        most = freed = 0.0
        if not any(branch.part.computed_again(self.share) for kind, _ in self.kinds for branch in kind.branches):
            return most
        for layer in reversed([*layers]):
            parts, without = self.layer(layer).parts, dropped.get(layer, 0.0)
            if layer.mixer is not None and (again := layer.mixer.computed_again(self.share)):
                behind = sum(layer.mlp.held(self.share).values()) if layer.mlp is not None else 0.0
                behind += (parts["residual"] + parts["norms"]) / 2 if layer.mlp is not None else 0.0
                behind += self._gathered((layer,)) / 2 if layer.mlp is not None else 0.0
                core = min(without, parts["core"])
                most = max(most, again + core - freed - behind - parts["projection"] + (without - core))
            freed += self.layer(layer).total + self._gathered((layer,)) - without
        return most

    def _gathered(self, layers: Iterable[Layer]) -> float:
        """Return the bytes of the other ranks' parts of the inputs of attention and MLP, if they are kept, which is
        possible only without recomputation."""
        if not self.config.layout.sequence_parallel_keep_gathered:
            return 0.0
        inputs = sum(layer.blocks + 2 * (layer.around is not None) for layer in layers)
        return inputs * (self.divided - 1) * self.stream

    def _dropped(self, layer: Layer) -> float:
        """Return the bytes of the parts of a layer that selective recomputation drops."""
        parts = self.layer(layer).parts
        # Of a norm after attention or MLP nobody keeps the output.
        places = [(branch.before is not None, branch.after is not None) for branch in layer.branches]
        norms = parts["norms"] * sum(before for before, _ in places) / max(sum(map(sum, places)), 1)
        sizes = {"core_attn": parts.get("core", 0.0), "layernorm": norms}
        sizes["mlp" if layer.experts is None else "moe"] = parts.get("mlp", 0.0)
        return sum(sizes.get(part, 0.0) for part in self.config.training.recompute_modules or ("core_attn",))

    def _loss(self) -> tuple[float, float]:
        """Return the loss's bytes held until the backward pass, and its further bytes held for a while around the
        loss."""
        model = self.config.model
        norm = self.stream + final_norm(model).held(self.share)
        copy = 0 if self.width == _FP32 else self.width  # 16-bit logits next to their fp32 copy
        if self.config.training.linear_cross_entropy:
            # Both gradients exist from the forward pass on, in place of the tensors they are made of: the gradient of
            # the hidden states of all tensor-parallel ranks' tokens, and of this rank's matrix in fp32.
            for_hidden = self.width * self.tokens * model.hidden_size
            rows = model.padded_vocab_size // self.tensor
            chunk = min(self.tokens, LOSS_CHUNKS["cuda" if self.fused else "cpu"])
            kept = norm - self.stream + for_hidden + _FP32 * rows * model.hidden_size
            return kept, (_FP32 + 2 * copy) * chunk * rows
        if self.tensor > 1:
            # The softmax overwrites the fp32 logits; next to it lie the labels of this rank's part and their mask.
            logits = self.tokens * model.padded_vocab_size / self.tensor
            return norm + _FP32 * logits + (_INT64 + 1) * self.tokens, copy * logits
        logits = self.tokens * self.config.data.vocab_size
        kept = norm + _FP32 * logits + _INT64 * self.tokens + _FP32  # log-softmax, labels, their total weight
        return kept, (_FP32 + copy) * logits

    def _dropout_mask(self) -> float:
        if self.config.model.hidden_dropout == 0.0:
            return 0.0
        return self.stream if not self.fused else self.stream / self.width

    @functools.cached_property
    def _rotary_table(self) -> float:
        """Return the bytes of one table for all layers that rotate alike."""
        tables = {kind.rotary_table for kind, _ in self.kinds} - {None}
        rotated = sum(2 * rotary.room(size) for rotary, size in filter(None, tables))
        return self.width * self.share.length // self.share.context * rotated
