"""What a layout should hold and send, from its flags alone: the formulas beside the counts of benchmarks/sharding.py.

P is the number of parameters of a rank's stage and tensor-parallel shard, n = data x context parallel size (who shares
gradients) over the r copies of the shards, m microbatches, L layers of a rank, S sequence, B samples of a microbatch, H
hidden size, w bytes of a weight or an activation (2 in bf16, 4 in fp32). A = S/c B H w is one activation, Q and KV this
rank's queries, and keys with values, of one layer. Gradients are reduced in fp32.
Sources: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, sections 5 and 7), Shoeybi et al. 2019 (arXiv:1909.08053,
section 3), Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2), Narayanan et al. 2021 (arXiv:2104.04473, 2.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.config.batch import num_microbatches
from megatron_ext.config.parameters import Parameter, count_per_rank, parameters, stages
from megatron_ext.config.schema import Config


@dataclass(frozen=True)
class Term:
    """Bytes that a rank sends in a step for one purpose."""

    collective: str
    bytes: float
    formula: str


@dataclass(frozen=True)
class Held:
    """Bytes that a rank keeps between steps."""

    weights: float
    gradients: float
    optimizer: float
    formula: str

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


class Formulas:
    """The formulas of one configuration on one pipeline stage."""

    def __init__(self, config: Config, stage: int):
        layout, training = config.layout, config.training
        self.config, self.stage = config, stage
        self.tensor, self.pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        self.context = getattr(layout, "context_parallel_size", 1)
        self.sharers = layout.data_parallel_size * self.context
        self.replicas = getattr(layout, "num_distributed_optimizer_instances", 1)
        self.microbatches = num_microbatches(config, training.global_batch_size)
        self.mixed = training.bf16 or training.fp16
        self.weight = 2 if self.mixed else 4
        self.parameters = count_per_rank(config)[stage]
        tokens = config.model.seq_length // self.context * training.micro_batch_size
        self.tokens, self.activation = tokens, tokens * config.model.hidden_size * self.weight
        self.strategy = _strategy(config)

    def held(self) -> Held:
        """Weights, gradients and optimizer state; the formula is in bytes a parameter."""
        moments = 12 if self.mixed else 8
        n = self.sharers // self.replicas
        whole = {
            "ddp": (1, 1, 1),
            "optim": (1, 1, n),
            "optim_grads": (1, n, n),
            "optim_grads_params": (n, n, n),
            "fsdp2": (n, n, n),
        }[self.strategy]
        weight = (
            4 if self.strategy == "fsdp2" else self.weight
        )  # which keeps its weights in fp32 and casts what it gathers
        state = 8 if self.strategy == "fsdp2" else moments
        sizes = (weight, 4, state)
        formula = " + ".join(
            f"{size}/{share}" if share > 1 else str(size) for size, share in zip(sizes, whole, strict=True)
        )
        held = [self.parameters * size / share for size, share in zip(sizes, whole, strict=True)]
        return Held(held[0], held[1], held[2], formula)

    def sent(self) -> list[Term]:
        """Every purpose for which this layout sends at least a tensor."""
        parts = self._data(), self._tensor(), self._context(), self._pipeline()
        return [term for part in parts for term in part]

    def _data(self) -> Iterator[Term]:
        n, m = self.sharers // self.replicas, self.microbatches
        if self.sharers == 1:
            return
        gradients, weights, share = 4 * self.parameters, self.weight * self.parameters, (n - 1) / n
        if self.strategy == "ddp":
            yield Term("all-reduce", 2 * share * gradients, "2 (n-1)/n 4P")
            return
        reduced = 1 if self.strategy == "optim" else m
        yield Term("reduce-scatter", reduced * share * gradients, f"{_times(reduced)}(n-1)/n 4P")
        gathered = {"optim": 1, "optim_grads": 1}.get(self.strategy, m * self._gathers())
        yield Term("all-gather", gathered * share * weights, f"{_times(gathered)}(n-1)/n {self.weight}P")
        if self.replicas > 1:
            between = reduced * 2 * (self.replicas - 1) / self.replicas * gradients / n
            yield Term("all-reduce", between, f"{_times(2 * reduced)}(r-1)/r 4P/n")

    def _gathers(self) -> int:
        return 1 if getattr(self.config.layout, "torch_fsdp2_no_reshard_after_forward", False) else 2

    def _tensor(self) -> Iterator[Term]:
        if self.tensor == 1:
            return
        t, m, layers = self.tensor, self.microbatches, self._layers()
        first, last = self.stage == 0, self.stage == self.pipeline - 1
        one = m * (t - 1) / t * self.activation
        if self.config.layout.sequence_parallel:
            gathers, scatters = 6 * layers + first + 2 * last, 4 * layers + first + last
            yield Term("all-gather", gathers * one, f"{gathers} m (t-1)/t A")
            yield Term("reduce-scatter", scatters * one, f"{scatters} m (t-1)/t A")
            norms = sum(p.size for p in parameters(self.config) if "layernorm" in p.name and self._here(p))
            yield Term("all-reduce", 2 * (t - 1) / t * 4 * norms, "2 (t-1)/t 4 norms")
        else:
            sums = 4 * layers + first + last
            yield Term("all-reduce", 2 * sums * one, f"{2 * sums} m (t-1)/t A")
        if last:
            # The loss over a divided vocabulary: largest logit, logit of the label, sum of exponentials, in fp32.
            yield Term("all-reduce", 3 * m * 2 * (t - 1) / t * 4 * self.tokens, "6 m (t-1)/t 4 S/c B")

    def _context(self) -> Iterator[Term]:
        if self.context == 1:
            return
        model, c = self.config.model, self.context
        one_head = self.tokens * model.kv_channels * self.weight // self.tensor
        keys, queries = 2 * model.num_key_value_heads * one_head, model.num_attention_heads * one_head
        calls = self.microbatches * self._layers()
        match self.config.layout.cp_comm_type:  # pyright: ignore[reportAttributeAccessIssue]
            case ("all_gather",):
                yield Term("all-gather", calls * (c - 1) * keys, "m L (c-1) KV")
                yield Term("reduce-scatter", calls * (c - 1) * keys, "m L (c-1) KV")
            case ("p2p",):
                # Forward the keys, backward the keys and, all the way home, their gradients in fp32.
                sums = c * keys * 4 // self.weight
                yield Term("send", calls * (2 * (c - 1) * keys + sums), f"m L (2 (c-1) + {4 // self.weight} c) KV")
            case ("a2a",):
                # Queries, keys and values one way, what they attended to the other; backward the same.
                share = (c - 1) / c
                yield Term("all-to-all", calls * 2 * share * (2 * queries + keys), "m L 2 (c-1)/c (2Q + KV)")

    def _pipeline(self) -> Iterator[Term]:
        if self.pipeline == 1:
            return
        chunks, m = self.config.layout.virtual_pipeline_model_parallel_size, self.microbatches
        last = self.stage == self.pipeline - 1
        activation = self.activation / (self.tensor if self.config.layout.sequence_parallel else 1)
        # A chunk sends its output on, but the model's last; and its input's gradient back, but the model's first.
        messages = 2 * chunks - last - (self.stage == 0)
        yield Term("send", messages * m * activation, f"{messages} m A{'/t' if activation < self.activation else ''}")
        if not self.config.model.untie_embeddings_and_output_weights and (last or self.stage == 0):
            table = self.config.model.padded_vocab_size * self.config.model.hidden_size // self.tensor
            yield Term("all-reduce", 4.0 * table, "2 (2-1)/2 4 V/t H")

    def _layers(self) -> int:
        names = {
            p.name.split(".")[2]
            for p in parameters(self.config)
            if p.name.startswith("decoder.layers.") and self._here(p)
        }
        return len(names)

    def _here(self, parameter: Parameter) -> bool:
        return self.stage in stages(self.config, parameter)


def _strategy(config: Config) -> str:
    layout = config.layout
    if getattr(layout, "use_torch_fsdp2", False):
        return "fsdp2"
    if getattr(layout, "use_megatron_fsdp", False):
        found = layout.data_parallel_sharding_strategy  # pyright: ignore[reportAttributeAccessIssue]
        return "ddp" if found == "no_shard" else found
    return "optim" if layout.use_distributed_optimizer else "ddp"


def _times(number: int) -> str:
    return "" if number == 1 else f"{number} "
