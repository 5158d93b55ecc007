"""Describes multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are
projected from one small vector of each token, the latent, and so may be the queries; a few channels are rotated by the
position, and all heads share the key's rotated channels. With --position-embedding-type none nothing is rotated, and
the heads share these channels all the same.

In training it is attention with as many key heads as query heads. With T tokens of a rank, H hidden, h heads of a rank,
D = N + P and V channels of a key and of a value head, P of them rotated, R and Q channels of the latents of keys and
queries, w bytes of an element, a rank holds of each layer

    heads         w T h (2 D + max(D, V))   queries, keys, values, which are filled up to the size of keys (V where
                                            attention is computed block by block, and in core)
    core          w T h max(D, V) + 4 T h   attention's result and the normalizer of its softmax; w T S h in short
                                            sequences in fp32 on a CPU: its weights
    projection    w T h V                   input of the output projection
    latents       w T (2 Q + 2 R + P) + 8 T before and after their norms, and 1/RMS (/t with sequence parallelism)

With I = Q (H where queries are projected at once) + R channels of what its column-parallel projections read, t
tensor-parallel ranks send (t-1)/t w T (I + P) one way and (t-1)/t w T H, of its output, the other way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.parts.attention.describe import Attention, Rotary, scaling_of, window_of, yarn_length
from megatron_ext.parts.kinds import Mixer
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Exchange, Number, Place, Product, Share, State, taken
from megatron_ext.parts.ways import Asked
from megatron_ext.plugins.latent_attention.flags import LETTER, VARIANT, LatentAttentionFlags

_FP32, _INT64 = 4, 8


INDEXER_LOSS = Number("indexer_loss", "of microbatches", "nats", "indexer loss")
"""The divergence of the indexer's distribution over keys from attention's, per token."""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Indexer that chooses the keys that a query attends to (DeepSeek sparse attention, arXiv:2512.02556, section
    2.1)."""

    heads: int
    head_size: int
    """Channels of its query heads and of its key, of which the first ones are rotated as attention's last ones are."""

    topk: int
    """Most keys that a query attends to."""

    interleaved: bool
    """Whether a pair of rotated channels is two neighbours, and not a channel of each half."""

    norm: Norm
    """Norm of its keys."""

    loss: float
    """Weight of its loss."""

    learns_from_chosen: bool
    """Whether the loss is over the chosen keys, and not over all."""

    warms_up: bool
    """Whether attention is over all keys: the warm-up, in which the indexer learns and chooses nothing."""

    @property
    def query_size(self) -> int:
        """Number of channels of all its query heads."""
        return self.heads * self.head_size

    def parameters(self, place: Place, query_rank: int) -> Iterator[Parameter]:
        """Yield its projections and norm, which every tensor-parallel rank has whole."""
        hidden = place.model.hidden_size
        yield place.matrix("linear_wq_b.weight", self.query_size, query_rank)
        yield place.matrix("linear_wk.weight", self.head_size, hidden, sequence_parallel=True)
        yield from self.norm.parameters(place.inside("k_norm"), self.head_size)
        yield place.matrix("linear_weights_proj.weight", self.heads, hidden, sequence_parallel=True)

    def products(self, share: Share, query_rank: int) -> list[Product]:
        """Return the projections."""
        own = share.tokens / share.divided
        outputs = self.head_size, self.heads
        return [
            Product(share.tokens, self.query_size, query_rank),
            *(Product(own, size, share.hidden) for size in outputs),
        ]

    def chooses(self, length: int) -> bool:
        """Return whether attention to `length` keys is to fewer, and computed again block by block."""
        return not self.warms_up and length > self.topk

    def held(self, share: Share, query_rank: int) -> float:
        """Return the bytes of the gradients of its queries, keys and weights, which the forward pass computes, of its
        norm's input, mean and 1/deviation, of latents that ranks gather, and of the chosen keys with a flag for each,
        whether the query sees it."""
        gradients = share.width * (self.query_size + self.head_size * share.context) + _FP32 * self.heads
        normalized = (share.width * self.head_size + 2 * _FP32) / share.divided
        gathered = share.width * query_rank if share.divided > 1 else 0
        choice = (_INT64 + 1) * self.topk if self.chooses(share.length) else 0
        return share.tokens * (gradients + normalized + gathered + choice)

    def sent(self, share: Share, query_rank: int) -> Iterator[Exchange]:
        """Yield the exchanges of tensor-parallel ranks, which sum attention's distribution for the loss and gather
        inputs of scores, and the keys that context-parallel ranks gather."""
        t, c = share.tensor, share.context
        if t > 1:
            target = 2 * (t - 1) / t * _FP32 * share.tokens * share.length
            yield Exchange("tp", "all-reduce", target, 0.0, (1, 0), "2 m {layers} (t-1)/t 4 T S", "core")
        if share.divided > 1:
            read = (t - 1) / t * share.width * share.tokens * (query_rank + self.head_size + self.heads)
            yield Exchange("tp", "all-gather", read, 0.0, (3, 0), "m {layers} (t-1)/t w T (Q + E + I)", "mixer")
        if c > 1:
            keys = (c - 1) * share.width * share.tokens * self.head_size
            yield Exchange("cp", "all-gather", keys, 0.0, (1, 0), "m {layers} (c-1) w T E", "core")
            yield Exchange("cp", "reduce-scatter", 0.0, keys, (0, 1), "m {layers} (c-1) w T E", "core")


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Attention whose keys and values, and perhaps queries, come out of latents. Names and the order of rows are as in
    megatron-core's MLASelfAttention, whose down projections every rank has whole, as with Transformer Engine."""

    builder = "megatron_ext.plugins.latent_attention.compute:mixer_spec"

    modules = (
        "linear_q_proj",
        "linear_q_down_proj",
        "q_layernorm",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "kv_layernorm",
        "linear_kv_up_proj",
        "core_attention",
        "linear_proj",
    )

    query_rank: int | None
    """Channels of the latent of a token's queries; None where they are projected at once."""

    rank: int
    """Channels of the latent of a token's keys and values."""

    position_size: int
    """Number of the last channels of a head, which are rotated, if any are; all heads share these channels of the
    key."""

    indexer: Indexer | None = None
    """Indexer that chooses the keys that a query attends to; None: it attends to all."""

    @property
    def blocks(self) -> int:
        """None: what tensor-parallel ranks gather is narrower than a block's input (`sent`)."""
        return 0

    @property
    def rotary_size(self) -> int:
        """Channels of a head of which `rotary` rotates a share."""
        return self.position_size

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores: 1 / sqrt(channels of a head), times the factor of the rotary scaling
        (`of_scores`), if any."""
        scaling = self.rotary.scaling if self.rotary is not None else None
        return self.head_size**-0.5 * (scaling.of_scores if scaling is not None else 1.0)

    @property
    def _kept_size(self) -> int:
        """Channels of the latent of keys and values with the key's that all heads share: what generation keeps."""
        return self.rank + self.position_size

    @property
    def _up_size(self) -> int:
        """Number of channels of all heads that come out of that latent."""
        return self.query_heads * (self.head_size - self.position_size + self.value_head_size)

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the projections and the norms of latents."""
        hidden = place.model.hidden_size
        if self.output_bias:
            yield place.vector("linear_proj.bias", hidden, sequence_parallel=True)
        yield place.matrix("linear_proj.weight", hidden, self.context_size, adds=True, tp_dim=1)
        if self.query_rank is None:
            yield place.matrix("linear_q_proj.weight", self.query_size, hidden, tp_dim=0)
        else:
            yield place.matrix("linear_q_down_proj.weight", self.query_rank, hidden, sequence_parallel=True)
            yield place.matrix("linear_q_up_proj.weight", self.query_size, self.query_rank, tp_dim=0)
        yield place.matrix("linear_kv_down_proj.weight", self._kept_size, hidden, sequence_parallel=True)
        yield place.matrix("linear_kv_up_proj.weight", self._up_size, self.rank, tp_dim=0)
        if self.qk_norm is not None:
            if self.query_rank is not None:
                yield from self.norm.parameters(place.inside("q_layernorm"), self.query_rank)
            yield from self.norm.parameters(place.inside("kv_layernorm"), self.rank)
        if self.indexer is not None:
            yield from self.indexer.parameters(place.inside("core_attention.indexer"), self.query_rank or hidden)

    def state(self, place: Place) -> Iterator[State]:
        """Yield the extra state that is saved with each linear layer that ranks divide."""
        queries = "linear_q_proj" if self.query_rank is None else "linear_q_up_proj"
        for name in ("linear_proj", queries, "linear_kv_up_proj"):
            yield State(f"{place.name}.{name}._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return the projections."""
        tokens, own, t = share.tokens, share.tokens / share.divided, share.tensor
        queries = [Product(tokens, self.query_size // t, self.query_rank or share.hidden)]
        if self.query_rank is not None:
            queries.insert(0, Product(own, self.query_rank, share.hidden))
        if self.indexer is not None:
            queries += self.indexer.products(share, self.query_rank or share.hidden)
        return [
            *queries,
            Product(own, self._kept_size, share.hidden),
            Product(tokens, self._up_size // t, self.rank),
            Product(tokens, share.hidden, self.context_size // t),
        ]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of queries, keys and values, of attention's result with its normalizer (or its weights), of
        the output projection's input, and of the latents."""
        heads, exchanges = self.query_heads // share.tensor, {*share.config.layout.cp_comm_type}
        of_all = share.context if "all_gather" in exchanges else 1
        in_parts = self.window is not None or share.config.data.reset_attention_mask
        in_parts = in_parts or (share.context > 1 and exchanges != {"a2a"}) or self._keeps_weights(share)
        filled = self.value_head_size if in_parts else max(self.head_size, self.value_head_size)
        of_heads = self.head_size + of_all * (self.head_size + filled)
        # A norm that keeps its input keeps what it is a part of.
        whole = self.qk_norm is not None and self.norm.keeps_its_input(share)
        channels, norms = (self._kept_size if whole else self.rank) + (self.query_rank or 0), 0
        if self.qk_norm is not None:
            channels += self.rank + (self.query_rank or 0)
            norms = 1 + (self.query_rank is not None)
        core = share.length if self._keeps_weights(share) else filled + _FP32 / share.width
        numbers = norms * _FP32 * (1 if self.norm.kind == "RMSNorm" else 2)
        if self.indexer is not None and self.indexer.chooses(share.length):
            core = 0
        latents = (share.width * channels + numbers) * share.tokens / share.divided
        if share.config.layout.sequence_parallel_keep_gathered:
            latents += share.width * share.tokens * self._read(share) * (share.divided - 1) / share.divided
        return {
            "heads": share.width * share.tokens * heads * of_heads,
            "core": share.width * share.tokens * heads * core,
            "projection": share.width * share.tokens * heads * self.value_head_size,
            "latents": latents,
            **({} if self.indexer is None else {"indexer": self.indexer.held(share, self.query_rank or share.hidden)}),
        }

    def _read(self, share: Share) -> int:
        """Return the number of channels that the column-parallel projections read."""
        return self.rank + (self.query_rank or share.hidden)

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges of tensor-parallel ranks, which gather latents instead of the layer's input, and of
        context-parallel ranks."""
        yield from super().sent(share)
        if self.indexer is not None:
            yield from self.indexer.sent(share, self.query_rank or share.hidden)
        if share.tensor == 1:
            return
        one = (share.tensor - 1) / share.tensor * share.width * share.tokens
        read, output = one * (self._read(share) + self.position_size), one * share.hidden
        of_read, of_output = "m {layers} (t-1)/t w T (I+P)", "m {layers} (t-1)/t A"
        if not share.config.layout.sequence_parallel:
            yield Exchange("tp", "all-reduce", 2 * output, 0.0, (1, 0), f"2 {of_output}", "mixer")
            yield Exchange("tp", "all-reduce", 0.0, 2 * read, (0, 3), f"2 {of_read}", "mixer")
            return
        again = 0 if share.config.layout.sequence_parallel_keep_gathered else 1
        yield Exchange("tp", "all-gather", read, 0.0, (3, 0), of_read, "mixer")
        yield Exchange("tp", "all-gather", 0.0, output, (0, 1), of_output, "mixer")
        if again:
            yield Exchange(
                "tp", "all-gather", 0.0, one * self._read(share), (0, 2), "m {layers} (t-1)/t w T I", "mixer"
            )
        yield Exchange("tp", "reduce-scatter", output, 0.0, (1, 0), of_output, "mixer")
        yield Exchange("tp", "reduce-scatter", 0.0, read, (0, 3), of_read, "mixer")

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield the problems of its flags."""
        model = config.model
        if model.softmax_scale is not None:
            yield (
                f"--softmax-scale {model.softmax_scale:g} with --multi-latent-attention, whose scale follows from its "
                "heads; leave --softmax-scale out"
            )
        for flag, is_asked in (
            ("--softmax-type", model.softmax_type != "vanilla"),
            ("--softmax-type-local", model.softmax_type_local is not None),
            ("--num-query-groups-local", model.num_query_groups_local is not None),
            ("--value-channels", model.value_channels is not None),
            ("--value-multiplier", model.value_multiplier != 1.0),
            ("--attention-logit-softcapping", model.attention_logit_softcapping is not None),
            ("--attention-output-gate", model.attention_output_gate),
            ("--qkv-clip", model.qkv_clip is not None),
            ("--rotary-seq-len-interpolation-factor", model.rotary_seq_len_interpolation_factor != 1.0),
            ("--rotary-base-local", model.rotary_base_local is not None),
            ("--attention-temperature-scale", model.attention_temperature_scale is not None),
        ):
            if is_asked:
                yield f"{flag} with --multi-latent-attention, whose layers have no such piece; leave {flag} out"
        if model.no_rope_freq is not None:
            yield (
                f"--no-rope-freq {model.no_rope_freq} with --multi-latent-attention, all of whose layers rotate; leave "
                "--no-rope-freq out"
            )
        if model.position_embedding_type == "alibi":
            yield (
                "--position-embedding-type alibi with --multi-latent-attention, whose layers rotate, or know no "
                "positions; use --position-embedding-type rope"
            )
        if self.position_size % 2 and self.rotary is not None:
            yield (
                f"--qk-pos-emb-head-dim {self.position_size} is odd, but channels are rotated in pairs; use "
                f"--qk-pos-emb-head-dim {self.position_size + 1}"
            )

        if model.rope_type == "dynamic":
            yield (
                "--rope-type dynamic needs heads of attention, and not --multi-latent-attention; use --rope-type yarn"
            )
        if model.experimental_attention_variant == VARIANT:
            yield from self._cannot_choose(config)

    def _cannot_choose(self, config: Config) -> Iterator[str]:
        """Yield the problems of flags next to an indexer that chooses keys."""
        model, exchanges = config.model, config.layout.cp_comm_type
        flags = flags_of(model, LatentAttentionFlags)
        asked = "--experimental-attention-variant dsa"
        for flag, value, usual in (
            ("--dsa-indexer-n-heads", flags.dsa_indexer_n_heads, 64),
            ("--dsa-indexer-head-dim", flags.dsa_indexer_head_dim, 128),
            ("--dsa-indexer-topk", flags.dsa_indexer_topk, 2048),
            ("--q-lora-rank", flags.q_lora_rank, 1536),
        ):
            if value is None:
                yield f"{asked} needs {flag}, which is not given; use {flag} {usual}"
        if (flags.dsa_indexer_head_dim or self.position_size) < self.position_size:
            yield (
                f"--dsa-indexer-head-dim {flags.dsa_indexer_head_dim} is below --qk-pos-emb-head-dim "
                f"{self.position_size}, the channels that the indexer rotates; use --dsa-indexer-head-dim "
                f"{self.position_size}"
            )
        if config.layout.context_parallel_size > 1 and {*exchanges} != {"all_gather"}:
            yield (
                f"--cp-comm-type {' '.join(exchanges)} with {asked}: a query chooses among the keys of all ranks at "
                "once, and all heads attend to the same; use --cp-comm-type all_gather"
            )
        if model.attention_dropout > 0.0:
            yield (
                f"--attention-dropout {model.attention_dropout:g} with {asked}, which has none; use "
                "--attention-dropout 0"
            )
        for flag, is_given in (
            ("--window-size", model.window_size is not None),
            ("--qk-clip", config.optimizer.qk_clip),
            ("--log-max-attention-logit", config.logging.log_max_attention_logit),
        ):
            if is_given:
                yield f"{flag} with {asked}: neither hides nor measures keys that are not chosen; leave {flag} out"

    def numbers(self, config: Config) -> Iterator[Number]:
        """Yield the loss of the indexer, where there is one, without its coefficient."""
        yield from super().numbers(config)
        if self.indexer is not None:
            yield INDEXER_LOSS

    def mean_keys(self, length: int) -> float:
        """Return the number of keys that a query attends to on average."""
        indexer = self.indexer
        if indexer is None or indexer.warms_up:
            return super().mean_keys(length)
        seen = min(indexer.topk, length)
        return seen - seen * seen / (2 * length)

    def core_flops(self, length: int) -> float:
        """Return the floating-point operations of Q K^T and A V for one token, forward, and of the indexer's products,
        which are with all keys."""
        flops, indexer = super().core_flops(length), self.indexer
        return flops if indexer is None else flops + 2 * indexer.query_size * super().mean_keys(length)

    def pieces(self, config: Config) -> dict[str, Asked]:
        """Return the pieces that latent attention asks of a way of computing a layer (`parts/ways.py`)."""
        lacked_by = {
            "Transformer Engine": "which was never run with latents here",
        }
        return {**super().pieces(config), "latent": Asked("--multi-latent-attention is given", lacked_by=lacked_by)}


def latent_attention_of(model: ModelConfig, norm: Norm, number: int) -> LatentAttention:
    """Return the latent attention of layer `number`, with norms of this kind."""
    flags, scaling = flags_of(model, LatentAttentionFlags), scaling_of(model)
    if scaling is not None and scaling.kind == "yarn":
        scaling = replace(scaling, of_scores=yarn_length(model.mscale_all_dim, scaling.factors[0]) ** 2)
    original = model.original_max_position_embeddings
    by_length = model.rope_type == "longrope" and (model.seq_length or 1) <= original
    rotary = Rotary(model.rotary_base, 1.0, scaling, interleaved=True, longest=original if by_length else None)
    return LatentAttention(
        kind="latent",
        query_heads=model.num_attention_heads,
        groups=model.num_attention_heads,
        head_size=flags.qk_head_dim + flags.qk_pos_emb_head_dim,
        value_head_size=flags.v_head_dim,
        window=window_of(model, number),
        rotary=None if model.position_embedding_type == "none" else rotary,
        qk_norm="head" if model.qk_layernorm else None,
        qk_norm_after_rotation=False,
        norm=norm if flags.latent_norm_epsilon is None else replace(norm, epsilon=flags.latent_norm_epsilon),
        qkv_bias=False,
        output_bias=model.has_output_bias,
        query_rank=flags.q_lora_rank,
        rank=flags.kv_lora_rank,
        position_size=flags.qk_pos_emb_head_dim,
        indexer=_indexer_of(model),
    )


def _indexer_of(model: ModelConfig) -> Indexer | None:
    """Return the indexer that chooses keys; None where queries attend to all keys, or where its sizes are not given,
    which `cannot` refuses."""
    flags = flags_of(model, LatentAttentionFlags)
    sizes = flags.dsa_indexer_n_heads, flags.dsa_indexer_head_dim, flags.dsa_indexer_topk
    heads, head_size, topk = sizes
    if model.experimental_attention_variant != VARIANT or None in (*sizes, flags.q_lora_rank):
        return None
    epsilon = model.norm_epsilon if flags.dsa_indexer_k_norm_epsilon is None else flags.dsa_indexer_k_norm_epsilon
    return Indexer(
        heads=heads or 1,
        head_size=head_size or 1,
        topk=topk or 1,
        interleaved=flags.dsa_indexer_rope_interleaved,
        norm=Norm("LayerNorm", epsilon),
        loss=flags.dsa_indexer_loss_coeff,
        learns_from_chosen=flags.dsa_indexer_use_sparse_loss,
        warms_up=flags.dsa_indexer_warmup,
    )


def draw(random: Random) -> list[str]:
    """Return flags of latent attention, drawn at random, some with an indexer; most draws have none."""
    sizes = "--kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    query = random.choice(("", " --q-lora-rank 20"))
    indexer = f"{' --q-lora-rank 20' if not query else ''} --experimental-attention-variant dsa --dsa-indexer-n-heads 8"
    indexer += f" --dsa-indexer-head-dim 10 --dsa-indexer-topk {random.choice((12, 40))}"
    of_loss = ("", " --dsa-indexer-use-sparse-loss", " --dsa-indexer-loss-coeff 0.3", " --dsa-indexer-warmup")
    of_keys = ("", "", " --dsa-indexer-rope-interleaved", " --dsa-indexer-k-norm-epsilon 1e-4")
    indexer += f"{random.choice(of_loss)}{random.choice(of_keys)}"
    norm = f"--qk-layernorm{random.choice(('', '', ' --latent-norm-epsilon 1e-4'))}"
    more = taken(random, (0.7, norm), (0.3, indexer.strip()))
    return taken(random, (0.2, " ".join(["--multi-latent-attention", f"{sizes}{query}", *more])))


MIXERS = (
    Mixer(
        LETTER,
        latent_attention_of,
        lambda model, number: flags_of(model, LatentAttentionFlags).multi_latent_attention,
        replaces_attention=True,
    ),
)

DRAWS = (draw,)
