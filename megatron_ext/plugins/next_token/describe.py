"""Describes the modules that a depth of multi-token prediction has besides its transformer layer (DeepSeek-V3,
arXiv:2412.19437, section 2.2).

Depth k, from 1, takes the hidden states h of depth k - 1 (of depth 0: of the final norm) and the embedding of the token
k positions ahead: h' = final_layernorm(layer(eh_proj [enorm(embedding); hnorm(h)])), from which the model's output
layer computes the logits of the token after that one. The last pipeline stage has all depths, and word embeddings for
them. With --mtp-use-repeated-layer each depth is the first one applied once more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Depth, Exchange, Number, Place, Product, Share, State, taken
from megatron_ext.parts.ways import Asked


def loss_of_depth(depth: int) -> Number:
    """Return the loss of a depth, from 0, as a number: the mean over its tokens."""
    title = f"mtp_{depth + 1}"
    return Number(f"{title}_loss", "of tokens", "nats", f"{title} loss", f"{title} loss")


@dataclass(frozen=True)
class NextToken(Depth):
    """The modules around the transformer layer of one depth: three norms, and the projection of hidden states and
    embedding."""

    builder = "megatron_ext.plugins.next_token.compute:next_token_spec"

    norm: Norm
    """Kind of each of its three norms."""

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield the norms of embedding, hidden states and output, and the projection; `place` is the layer's."""
        place, width = replace(place, name=self.name), place.model.hidden_size
        for norm in ("enorm", "hnorm", "final_layernorm"):
            yield from self.norm.parameters(place.inside(norm), width)
        yield place.matrix("eh_proj.weight", width, 2 * width, tp_dim=0)

    def state(self, place: Place) -> Iterator[State]:
        """Yield the extra state that is saved with the projection."""
        yield State(f"{self.name}.eh_proj._extra_state", "extra")

    def products(self, share: Share) -> list[Product]:
        """Return the projection's product."""
        return [Product(share.tokens, share.hidden / share.tensor, 2 * share.hidden)]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of the projection's input, embedding and hidden states next to each other, and of the
        tensors that the norms save; the hidden states themselves are kept in any case."""
        of_norms = 2 * self.norm.held(share) - (share.stream if self.norm.keeps_its_input(share) else 0.0)
        return {"next token": 2 * share.stream + of_norms}

    def sent(self, share: Share) -> Iterator[Exchange]:
        """Yield the exchanges of tensor-parallel ranks for the embedding, the projection and the output layer."""
        t, layout = share.tensor, share.config.layout
        if t == 1:
            return
        one = (t - 1) / t * share.tokens * share.hidden * share.width
        # The projection's outputs are gathered; with sequence parallelism its inputs are too, and their gradients.
        if not layout.sequence_parallel:
            yield Exchange("tp", "all-gather", one, 0.0, (1, 0), "m {layers} (t-1)/t A", "mlp")
            yield Exchange("tp", "all-reduce", 0.0, 2 * 4 * one, (0, 3), "8 m {layers} (t-1)/t A", "mlp")
            return
        again = 0 if layout.sequence_parallel_keep_gathered else 2
        of_output = 1 if share.config.training.linear_cross_entropy else 2
        yield Exchange("tp", "all-gather", 3 * one, (2 + again) * one, (2, 3), "m {layers} 4 (t-1)/t A", "mlp")
        yield Exchange("tp", "all-gather", 0.0, of_output * one, (0, of_output), "m {layers} (t-1)/t A", "mlp")
        yield Exchange("tp", "reduce-scatter", 0.0, 4 * one, (0, 3), "m {layers} 4 (t-1)/t A", "mlp")

    def pieces(self, config: Config) -> Mapping[str, Asked]:
        """Return the piece that multi-token prediction asks of a way of computing a layer (`parts/ways.py`)."""
        lacked_by = {
            "several layers": "and a depth of multi-token prediction is one by itself",
        }
        asked = f"--mtp-num-layers is {config.model.mtp_num_layers}"
        return {"next tokens": Asked(asked, "--mtp-num-layers 0", lacked_by)}

    def numbers(self, config: Config) -> Iterator[Number]:
        """Yield the depth's loss."""
        yield loss_of_depth(self.depth)

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield the problems of flags that multi-token prediction cannot be combined with."""
        model, no_copy = config.model, "the last stage would need a copy of"
        flag = f"--mtp-num-layers {model.mtp_num_layers} with"
        if model.position_embedding_type == "learned_absolute":
            yield f"{flag} learned positions: {no_copy} their table; use --position-embedding-type rope"
        if model.embed_layernorm:
            yield f"{flag} --embed-layernorm: {no_copy} that norm; leave --embed-layernorm out"
        if (factor := model.logits_multiplier) != 1.0:
            yield f"{flag} --logits-multiplier {factor:g}: it multiplies what a depth reads; use --logits-multiplier 1"
        if self.repeats and model.num_experts is not None and "global_aux_loss" in model.load_balancing_losses:
            yield (
                f"{flag} --mtp-use-repeated-layer and --moe-router-load-balancing-type "
                f"{' '.join(model.load_balancing)}: one router would add up the loads of all depths, in another order "
                "in each layout; leave --mtp-use-repeated-layer out"
            )


def depths_of(model: ModelConfig, norm: Norm) -> list[NextToken]:
    """Return the depths of the model, the first one first."""
    repeats = model.mtp_use_repeated_layer
    return [NextToken(depth, norm, repeats=repeats and depth > 0) for depth in range(model.mtp_num_layers or 0)]


def draw(random: Random) -> list[str]:
    """Return flags of depths of multi-token prediction, drawn at random; most draws have none."""
    depths = f"--mtp-num-layers {random.choice((1, 2))} --mtp-loss-scaling-factor 0.5"
    one = random.choice(("", " --mtp-use-repeated-layer"))
    return taken(random, (0.15, f"{depths}{one}"))


NEXT_TOKENS = (depths_of,)

DRAWS = (draw,)
