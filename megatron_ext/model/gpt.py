"""Builds the model: megatron-core's GPTModel, one for each virtual pipeline stage of this rank."""

import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron_ext.config.derived.pipeline_split import is_v_shaped, stage_of_chunk
from megatron_ext.config.derived.rank_order import chunk_layers
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.data.microbatch import Ahead
from megatron_ext.data.packing import Documents
from megatron_ext.device.recomputed_outputs import share_or_copy
from megatron_ext.device.weight_gradients import stand_in
from megatron_ext.model.loss import Readout
from megatron_ext.parallel.groups import as_stage
from megatron_ext.parts.attention.cached import Sequences, WholeSequences
from megatron_ext.parts.attention.rope import RotaryTable, ScaledRotaryEmbedding
from megatron_ext.parts.layer import read_ahead
from megatron_ext.parts.linear.compute import keep_gathered
from megatron_ext.parts.norm.compute import norm_builder
from megatron_ext.parts.spec import OwnSpec, block_spec
from megatron_ext.parts.stack import final_norm, stack
from megatron_ext.registry import brought

# It warns on every rank and for every chunk that another model class will one day replace this one.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)

_KINDS_OF_KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_VARIABLES_OF_KERNELS = (*_KINDS_OF_KERNELS, *(f"NVTE_FLASH_ATTN_V{version}" for version in (2, 3, 4)))
"""Environment variables by which Transformer Engine chooses its attention kernel."""


class GPT(GPTModel):
    """megatron-core's GPTModel with a loss that knows the vocabulary's true size, by `model.loss.Readout`, and with
    positions taken from `position_ids` where they begin anew with each document."""

    def __init__(self, *, restarts_positions: bool, of_readout: Mapping[str, Any], **of_engine: Any) -> None:
        super().__init__(**of_engine)
        self.restarts_positions = restarts_positions
        self.readout = Readout(self.config, self.pg_collection.tp, **of_readout)
        self._end_with_norm()
        if self.post_process:
            self.readout.prepare(self.output_layer)
        if self.mtp_process and not self.pre_process and self.share_embeddings_and_output_weights:
            # The logits are a product with the embedding that the depths read; megatron-core makes another matrix.
            self.output_layer.weight = None
            # Products may add the output layer's share to its main gradient themselves; autograd has the embeddings'.
            # megatron-core marks a weight that has both on a single stage alone.
            vars(self.shared_embedding_or_output_weight())["zero_out_wgrad"] = True

    def _end_with_norm(self) -> None:
        """Put the final norm into the last chunk. megatron-core has it after the last layer where there are depths of
        multi-token prediction, which may stand in a chunk without layers."""
        block = self.decoder
        if not self.post_process:
            block.final_layernorm = None
        elif block.final_layernorm is None:
            build: Any = block.submodules.layer_norm
            eps = self.config.layernorm_epsilon
            block.final_layernorm = build(config=self.config, hidden_size=self.config.hidden_size, eps=eps)

    def _set_attention_backend(self) -> None:
        """Set the variables by which Transformer Engine chooses its kernel where the flags name one. Else they stay as
        the user has set them, which megatron-core would not allow: nothing else reads them."""
        named = self.config.attention_backend != AttnBackend.auto or self.config.flash_attention_version is not None
        if not named:
            return
        for variable in _VARIABLES_OF_KERNELS:
            os.environ.pop(variable, None)  # the flags decide
        super()._set_attention_backend()

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: None = None,
        labels: torch.Tensor | None = None,
        documents: Documents | None = None,
        inference: WholeSequences | None = None,
        loss_mask: torch.Tensor | None = None,
        ahead: Ahead | None = None,
    ) -> torch.Tensor:
        """Run one forward pass. The arguments are [batch, sequence]; a stage without a use for one ignores it.

        With `documents`, tokens see their own document alone. With `inference`, which then says how tokens see each
        other, positions come from `position_ids`, and the last stage returns the result of its `read` for the hidden
        states.

        Returns:
            On the last stage with labels the loss of every token in nats, fp32 [batch, sequence], or with `loss_mask`
            (1.0 where a token's loss counts) their sum over the tokens that count, a scalar, for which no logits are
            kept; without labels the logits, [batch, sequence, this rank's vocabulary]; on other stages the hidden
            states for the next one, [sequence, batch, hidden]. With `ahead`, the last stage's result has one more
            leading dimension: the main loss, then the loss of each depth of multi-token prediction.
        """
        output = super().forward(
            input_ids,  # pyright: ignore[reportArgumentType]
            position_ids,  # pyright: ignore[reportArgumentType]
            attention_mask,  # pyright: ignore[reportArgumentType]
            labels=labels,  # pyright: ignore[reportArgumentType]
            packed_seq_params=inference if documents is None else Sequences(documents),  # pyright: ignore[reportArgumentType]
            loss_mask=loss_mask,
            output_processor=None if labels is None and inference is None else self.readout,
            output_processor_context=ahead,
        )
        if self.post_process:
            return output
        # A compiled layer, or a fused addition, may return a view, which the pipeline's schedules cannot free.
        return make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)

    def _postprocess(self, **inputs: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run megatron-core's `_postprocess`, or with depths of multi-token prediction return the readout's results for
        the hidden states of the model and of each depth."""
        if not self.mtp_process:
            return super()._postprocess(**inputs)
        ahead, sequences = inputs["output_processor_context"], inputs["packed_seq_params"]
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        read = partial(self.readout, output_layer=self.output_layer, output_weight=shared, packed_seq_params=sequences)
        hidden, mask = inputs["hidden_states"], inputs["loss_mask"]
        output = read(hidden, labels=inputs["labels"], loss_mask=mask)
        if ahead is None:
            return output
        outputs = [output]
        of_depths = (values.unbind(-1) for values in ahead)
        for depth, (layer, tokens, labels, weights) in enumerate(zip(self._depths, *of_depths, strict=True)):
            embedded = self.embedding(input_ids=tokens, position_ids=inputs["position_ids"])
            hidden = layer(hidden, embedded, inputs["rotary_pos_emb"], sequences)
            outputs.append(read(hidden, labels=labels, loss_mask=None if mask is None else weights))
            layer.report(depth, outputs[-1], weights)
        return torch.stack(outputs)

    @property
    def _depths(self) -> list[Any]:
        """The module of each depth of multi-token prediction: the same one with --mtp-use-repeated-layer."""
        modules = list(self.mtp.layers)
        return modules * (self.config.mtp_num_layers or 0) if self.config.mtp_use_repeated_layer else modules

    def ahead(
        self,
        depth: int,
        hidden_SBH: torch.Tensor,
        tokens_BS: torch.Tensor,
        positions: torch.Tensor,
        sequences: WholeSequences,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return in inference the hidden states of a depth of multi-token prediction, [S, B, H], and the result of
        `sequences.read` for them. The last stage has the depths.

        Args:
            depth: its index, from 0.
            hidden_SBH: hidden states of the depth before; for the first one the hidden states that the model's logits
                are computed from.
            tokens_BS: the token that stands depth + 1 places after each of these.
            positions: int64 [B, S] or [1, S], of the hidden states.
        """
        embedded = self.embedding(input_ids=tokens_BS, position_ids=positions)
        hidden = self._depths[depth](hidden_SBH, embedded, self._angles(positions), sequences)
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return hidden, self.readout(hidden, self.output_layer, shared, packed_seq_params=sequences)

    def _angles(self, positions: torch.Tensor) -> Any:
        """Return the table of angles for queries and keys at these positions, [B, S] or [1, S]; None where the model
        has none."""
        rotary: Any = getattr(self, "rotary_pos_emb", None)
        return rotary and (rotary.at if positions.size(1) > 1 else rotary.at_token)(positions)

    def _preprocess(self, **inputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run megatron-core's preprocessing, with rotary angles by `position_ids` where these restart; or its results
        in inference: embedded tokens on the first stage, rotary angles, and None for the four unused outputs."""
        sequences, rotary = inputs.get("packed_seq_params"), getattr(self, "rotary_pos_emb", None)
        if isinstance(sequences, WholeSequences):
            has_last = self.post_process and len(self.decoder.layers) > 0
            last: Any = self.decoder.layers[-1] if has_last else None
            sequences.begin(last.layer_number if has_last else None)
            tokens_BS, positions = inputs["input_ids"], inputs["position_ids"]
            embedded = self.embedding(input_ids=tokens_BS, position_ids=positions) if self.pre_process else None
            return embedded, self._angles(positions), None, None, None, None
        # Its packed sequences have one sample and another rotary table.
        outputs = super()._preprocess(**{**inputs, "packed_seq_params": None})
        if self.restarts_positions and rotary is not None:
            outputs = (outputs[0], rotary.at(inputs["position_ids"]), *outputs[2:])
        return outputs


def build_model(
    config: Config,
    transformer_config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    *,
    on_meta: bool = False,
    layer_spec: OwnSpec | None = None,
    **of_readout: Any,
) -> list[GPT]:
    """Build this rank's chunks of the model, with uninitialized weights (see `model.initialize`).

    Args:
        config: the resolved configuration.
        transformer_config: from `model.config.transformer_config`; all chunks share it.
        pg_collection: this rank's process groups.
        on_meta: whether the weights get no memory yet, since no rank shall hold all of them.
        layer_spec: returns what to build in place of a layer's spec, which it is given with the layer's description.
        of_readout: the own loss, and whether the output layer's weight is kept (`model.loss.Readout`).
    Returns:
        One model per virtual pipeline stage, in that order; a single one without interleaving. Its forward pass
        takes tokens [batch, sequence] and returns the loss per token, [batch, sequence], on the last stage.
    """
    if transformer_config.gradient_accumulation_fusion:
        stand_in()
    if "layernorm" in (transformer_config.recompute_modules or ()):
        share_or_copy()
    chunks = config.layout.virtual_pipeline_model_parallel_size
    of_readout["true_vocab_size"] = config.data.vocab_size or config.model.padded_vocab_size
    of_readout |= {"cap": config.model.final_logit_softcapping, "has_bias": config.model.lm_head_bias}
    of_readout["z_loss"] = config.model.z_loss_strength
    build = partial(_build_chunk, config, transformer_config, pg_collection, chunks, on_meta, layer_spec, of_readout)
    return [build(chunk) for chunk in range(chunks)]


def _build_chunk(
    config: Config,
    transformer_config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    chunks: int,
    on_meta: bool,
    layer_spec: OwnSpec | None,
    of_readout: Mapping[str, Any],
    chunk: int,
) -> GPT:
    model, layout = config.model, config.layout
    rank, stages = pg_collection.pp.rank(), pg_collection.pp.size()
    held = chunk_layers(config)[rank][chunk]
    stage = stage_of_chunk(rank, chunk, stages, v_shaped=is_v_shaped(layout))
    spec, depths = block_spec(config, stack(config)[held.start : held.stop], pg_collection.tp, layer_spec)
    rotated = {one.rotary_table: one.attention for one, _ in stack(config).kinds if one.rotary_table}
    # ALiBi is computed in attention, of which megatron-core knows nothing; without attention nothing is rotated.
    kind = model.position_embedding_type
    has_table = kind != "alibi" and (kind != "rope" or bool(rotated))
    with torch.device("meta") if on_meta else nullcontext(), as_stage(pg_collection, stage) as groups:
        gpt = GPT(
            config=transformer_config,
            transformer_layer_spec=spec,  # pyright: ignore[reportArgumentType]
            vocab_size=model.padded_vocab_size,
            max_sequence_length=model.position_embedding_offset + model.max_position_embeddings,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == stages - 1 and chunk == chunks - 1,
            fp16_lm_cross_entropy=False,
            parallel_output=True,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=kind if has_table else "none",  # pyright: ignore[reportArgumentType]
            pg_collection=groups,
            vp_stage=chunk if chunks > 1 else None,
            mtp_block_spec=depths,
            restarts_positions=config.data.reset_position_ids,
            of_readout=of_readout,
        )
    if rotated:
        first, *others = rotated.values()
        if model.transformer_impl == "local":
            gpt.rotary_pos_emb = RotaryTable(first, transformer_config, pg_collection, others)
        else:
            gpt.rotary_pos_emb = ScaledRotaryEmbedding(first, transformer_config, pg_collection)
        # Latent attention rotates next to learned positions, too, which are the embedding's: the engine asks by this.
        gpt.position_embedding_type = "rope"
    _multiply_outputs(gpt, model)
    if gpt.pre_process and model.embed_layernorm:
        _normalize_embeddings(gpt, model)
    for formats in brought("product_formats"):
        formats.install(gpt, config, pg_collection)
    if gpt.pre_process and model.position_embedding_offset:
        gpt.embedding.position_embeddings.register_forward_pre_hook(partial(_shifted, model.position_embedding_offset))
    keep_gathered(gpt, config)
    recomputes, compiles = config.training.recompute_granularity == "full", config.training.torch_compile
    if not config.layout.flags_that_divide_weights and not recomputes and not compiles:
        # Else the next layer's weights are yet to be gathered, it is given a copy of what this one puts out, or the
        # compiler, which sees one layer at a time, makes the sum.
        read_ahead(gpt.decoder.layers)
    if on_meta:
        return gpt.to(dtype=transformer_config.params_dtype)
    # megatron-core makes the learned positions in fp32 on the CPU, whatever the rest of the model is.
    device = torch.device("cpu") if transformer_config.use_cpu_initialization else torch.cuda.current_device()
    return gpt.to(device=device, dtype=transformer_config.params_dtype)


def _multiply_outputs(gpt: GPT, model: ModelConfig) -> None:
    """Have the chunk's modules multiply their outputs by the model's factors."""
    modules: list[tuple[float, Any]] = []
    layers = [layer for layer in gpt.modules() if isinstance(layer, TransformerLayer)]
    if model.residual_multiplier != 1.0:
        branches = [branch for layer in layers for branch in (layer.self_attention, layer.mlp)]
        modules += [(model.residual_multiplier, branch) for branch in branches]
    if model.moe_shared_expert_intermediate_size is not None and model.moe_shared_expert_average:
        modules += [(0.5, layer.mlp) for layer in layers if hasattr(layer.mlp, "router")]
    if model.mlp_multipliers is not None:
        modules += [(model.mlp_multipliers[1], layer.mlp) for layer in layers]
    if model.embedding_multiplier != 1.0 and (gpt.pre_process or gpt.mtp_process):
        modules.append((model.embedding_multiplier, gpt.embedding.word_embeddings))
    if model.logits_multiplier != 1.0 and gpt.post_process:
        # The logits are a product with it.
        modules.append((model.logits_multiplier, gpt.decoder.final_layernorm))
    for factor, module in modules:
        module.register_forward_hook(partial(_multiplied, factor))


def _shifted(rows: int, _table: torch.nn.Module, positions: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Return the rows of the table of these positions, whose first is after `rows` others (a forward pre-hook)."""
    return (positions[0] + rows,)


def _normalize_embeddings(gpt: GPT, model: ModelConfig) -> None:
    """Have the chunk normalize word embeddings, as BLOOM does (arXiv:2211.05100, section 3.2.2)."""
    build, embedding = norm_builder(final_norm(model)), gpt.embedding
    norm = build(config=gpt.config, hidden_size=model.hidden_size, eps=model.norm_epsilon)
    if model.position_embedding_type == "learned_absolute":
        for parameter in norm.parameters():  # it sees all tokens: the sequence is divided after the sum with positions
            parameter.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
    embedding.word_embeddings_norm = norm
    embedding.word_embeddings.register_forward_hook(lambda _module, _inputs, words: norm(words))


def _multiplied(factor: float, _module: torch.nn.Module, _inputs: object, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return factor * output
    # A multiple of the bias would have no gradient where the MLP is computed anew (`--recompute-modules mlp`).
    branch, bias = output
    return factor * (branch if bias is None else branch + bias), None
