"""Describes a toy linear recurrence: h_t = a h_(t-1) + (1 - a) u_t for each channel, between two matrices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ext.config.schema import Config
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Part, Place, Product, Share


@dataclass(frozen=True)
class Recurrence(Part):
    """A linear recurrence of `width` channels."""

    modules = ("linear_in", "decay", "linear_out")

    width: int

    def parameters(self, place: Place) -> Iterator[Parameter]:
        """Yield both matrices and the decay of each channel."""
        hidden = place.model.hidden_size
        yield place.vector("decay", self.width, tp_dim=0)
        yield place.matrix("linear_in.weight", self.width, hidden, tp_dim=0)
        yield place.matrix("linear_out.weight", hidden, self.width, adds=True, tp_dim=1)

    def products(self, share: Share) -> list[Product]:
        """Return its two products."""
        width = self.width / share.tensor
        return [Product(share.tokens, width, share.hidden), Product(share.tokens, share.hidden, width)]

    def held(self, share: Share) -> Mapping[str, float]:
        """Return the bytes of inputs and states."""
        each = share.width * share.tokens * self.width / share.tensor
        return {"heads": each, "core": each}

    def core_flops(self, length: int) -> float:
        """Return two multiplications and an addition a channel."""
        return 3.0 * self.width

    def cannot(self, config: Config) -> Iterator[str]:
        """Yield where its state would have to pass between ranks, documents or steps of generation."""
        layout, data, training = config.layout, config.data, config.training
        if layout.context_parallel_size > 1:
            yield (
                f"--recurrent-layer-freq with --context-parallel-size {layout.context_parallel_size}: no state passes "
                "between ranks; use --context-parallel-size 1"
            )
        if data.reset_attention_mask:
            yield (
                "--recurrent-layer-freq with --reset-attention-mask: the state does not begin anew with a document; "
                "leave --reset-attention-mask out"
            )
        if training.sample_interval is not None or training.eval_tasks is not None:
            yield (
                "--recurrent-layer-freq with --sample-interval or --eval-tasks: no state is kept from token to token; "
                "leave them out"
            )
        if config.model.transformer_impl == "transformer_engine" or training.fp8_format is not None:
            yield "--recurrent-layer-freq is ours, in no FP8; use --transformer-impl local without --fp8-format"
