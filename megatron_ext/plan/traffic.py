"""Bytes that a rank sends in a step, from the flags alone: the formulas beside the counts of benchmarks/sharding.py.

P is the number of parameters of a rank's stage and tensor-parallel shard, n = data x context parallel size (who shares
gradients) over the r copies of the shards, m microbatches, L layers of a rank, S sequence, B samples of a microbatch, H
hidden size, w bytes of a weight or an activation (2 in bf16, 4 in fp32). A = S/c B H w is one activation, Q and KV this
rank's queries, and keys with values, of one layer. Gradients are reduced in fp32. Of experts: E and e their parallel
size and tensor-parallel size, k experts of a token, T this rank's part of A, which it routes.
Sources: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, sections 5 and 7), Shoeybi et al. 2019 (arXiv:1909.08053,
section 3), Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2), Narayanan et al. 2021 (arXiv:2104.04473, 2.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.config.batch import num_microbatches
from megatron_ext.config.schema import Config
from megatron_ext.config.state import sharding, sharing_ranks, state_bytes
from megatron_ext.plan.flops import repeated
from megatron_ext.plan.shapes import Shapes


@dataclass(frozen=True)
class Term:
    """Bytes that a rank sends in a step for one purpose."""

    axis: str
    """Whom it exchanges them with: dp, between (copies of the shards), edp, tp, cp, ep, or pp."""

    collective: str
    bytes: float
    formula: str


def sent(config: Config, stage: int, shapes: Shapes | None = None) -> list[Term]:
    """Every purpose for which a rank of this pipeline stage sends at least a tensor.

    Args:
        config: resolved and validated.
        shapes: of the same model and split; by default made from the configuration.
    """
    return _Stage(config, stage, shapes or Shapes(config)).terms()


class _Stage:
    def __init__(self, config: Config, stage: int, shapes: Shapes):
        layout, training = config.layout, config.training
        self.config, self.stage = config, stage
        self.shapes = shapes
        self.tensor, self.pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        self.context = layout.context_parallel_size
        self.microbatches = num_microbatches(config, training.global_batch_size)
        self.weight = 2 if training.bf16 or training.fp16 else 4
        self.tokens = config.model.seq_length // self.context * training.micro_batch_size
        self.activation = self.tokens * config.model.hidden_size * self.weight
        self.layers = self.shapes.layers_of_stage(stage)
        self.kind = sharding(config)
        again = [repeated(config, layers) for layers in shapes.counts[stage]]
        self.again = {part: sum(chunk[part] for chunk in again) for part in again[0]}
        """Layers of which recomputation repeats a part of the forward pass, and what that sends."""

    def terms(self) -> list[Term]:
        parts = self._data(), self._tensor(), self._context(), self._experts(), self._pipeline()
        return [term for part in parts for term in part]

    def _data(self) -> Iterator[Term]:
        dense, experts = self.shapes.parameters_of_stage(self.stage)
        copies = self.config.layout.num_distributed_optimizer_instances
        yield from self._shared("dp", dense, sharing_ranks(self.config), copies, "P")
        yield from self._shared("edp", experts, sharing_ranks(self.config, expert=True), copies, "P of experts")

    def _shared(self, axis: str, parameters: int, n: int, r: int, name: str) -> Iterator[Term]:
        """What is sent for parameters of which n ranks share one copy and r groups have one each."""
        if n * r == 1 or parameters == 0:
            return
        gradient = state_bytes(self.config).gradients
        gradients, weights, share = gradient * parameters, self.weight * parameters, (n - 1) / n
        if self.kind == "ddp":
            yield Term(axis, "all-reduce", 2 * share * gradients, f"2 (n-1)/n {gradient}{name}")
            return
        reduced = 1 if self.kind == "optim" else self.microbatches
        yield Term(axis, "reduce-scatter", reduced * share * gradients, f"{_times(reduced)}(n-1)/n {gradient}{name}")
        gathered = {"optim": 1, "optim_grads": 1}.get(self.kind, self.microbatches * self._gathers())
        yield Term(axis, "all-gather", gathered * share * weights, f"{_times(gathered)}(n-1)/n {self.weight}{name}")
        if r > 1 and self.config.layout.outer_dp_sharding_strategy == "optim":
            share = (r - 1) / r
            yield Term("between", "reduce-scatter", share * gradients / n, f"(r-1)/r {gradient}{name}/n")
            # In both passes of the first microbatch.
            yield Term("between", "all-gather", 2 * share * weights / n, f"2 (r-1)/r {self.weight}{name}/n")
        elif r > 1:
            # Megatron-FSDP sums across the copies once a step; under `optim` all of the gradients, not the shard alone.
            megatron = self.config.layout.use_megatron_fsdp
            times, whole = 2 if megatron else 2 * reduced, megatron and self.kind == "optim"
            between = times * (r - 1) / r * gradients / (1 if whole else n)
            yield Term(
                "between", "all-reduce", between, f"{_times(times)}(r-1)/r {gradient}{name}{'' if whole else '/n'}"
            )

    def _gathers(self) -> int:
        return 1 if self.config.layout.torch_fsdp2_no_reshard_after_forward else 2

    def _tensor(self) -> Iterator[Term]:
        if self.tensor == 1:
            return
        t, m, layers, model = self.tensor, self.microbatches, self.layers, self.config.model
        first, last = self.stage == 0, self.stage == self.pipeline - 1
        one = m * (t - 1) / t * self.activation
        # Routed experts have groups of their own.
        mlp = 1 if model.num_experts is None or model.moe_shared_expert_intermediate_size is not None else 0
        again = self.again["attention"] + mlp * self.again["mlp"]
        if self.config.layout.sequence_parallel:
            blocks = layers * (1 + mlp)
            gathers, scatters = 3 * blocks + again + first + 2 * last, 2 * blocks + again + first + last
            yield Term("tp", "all-gather", gathers * one, f"{gathers} m (t-1)/t A")
            yield Term("tp", "reduce-scatter", scatters * one, f"{scatters} m (t-1)/t A")
            norms = self.shapes.norms_of_stage(self.stage)
            yield Term("tp", "all-reduce", 2 * (t - 1) / t * 4 * norms, "2 (t-1)/t 4 norms")
        else:
            sums = 4 * layers + again + first + last
            yield Term("tp", "all-reduce", 2 * sums * one, f"{2 * sums} m (t-1)/t A")
        if last:
            # The loss over a divided vocabulary: largest logit, logit of the label, sum of exponentials, in fp32.
            yield Term("tp", "all-reduce", 3 * m * 2 * (t - 1) / t * 4 * self.tokens, "6 m (t-1)/t 4 S/c B")

    def _context(self) -> Iterator[Term]:
        kinds = self.config.layout.cp_comm_type
        if self.context == 1 or len(set(kinds)) > 1:
            return
        model, c = self.config.model, self.context
        one_head = self.tokens * model.kv_channels * self.weight // self.tensor
        keys, queries = 2 * model.num_key_value_heads * one_head, model.num_attention_heads * one_head
        m, forward = self.microbatches, self.layers + self.again["core"]
        layers = self.layers
        match kinds[0]:
            case "all_gather":
                yield Term("cp", "all-gather", m * forward * (c - 1) * keys, f"m {_layers(forward, layers)} (c-1) KV")
                yield Term("cp", "reduce-scatter", m * layers * (c - 1) * keys, "m L (c-1) KV")
            case "p2p":
                # Forward the keys, backward the keys and, all the way home, their gradients in fp32.
                sums = c * keys * 4 // self.weight
                each = (forward + layers) * (c - 1) * keys + layers * sums
                formula = f"m L ({_layers(forward + layers, layers).removesuffix('L')}(c-1) + {4 // self.weight} c) KV"
                yield Term("cp", "send", m * each, formula)
            case "a2a":
                # Queries, keys and values one way, what they attended to the other; backward the same.
                each = (forward + layers) * (c - 1) / c * (2 * queries + keys)
                yield Term("cp", "all-to-all", m * each, f"m {_layers(forward + layers, layers)} (c-1)/c (2Q + KV)")

    def _experts(self) -> Iterator[Term]:
        """Tokens to their experts and back, forward and again backward; an even load is assumed."""
        model, layout = self.config.model, self.config.layout
        ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_size
        if model.num_experts is None or ep * etp == 1:
            return
        own = self.microbatches * self.activation / self.tensor
        passes = 2 * self.layers + self.again["mlp"]  # forward and backward
        times = _layers(passes, self.layers)
        if layout.moe_token_dispatcher_type == "allgather":
            others = ep * etp - 1
            # Beside the tokens: which experts each has, forward in bytes, and with which weights, in fp32.
            weights = 4 * self.microbatches * self.layers * self.tokens / self.tensor * model.num_experts
            yield Term("ep", "all-gather", others * (passes * own + 1.25 * weights), f"m {times} (E e - 1) T")
            yield Term("ep", "reduce-scatter", others * (passes * own + weights), f"m {times} (E e - 1) T")
            return
        k = model.moe_router_topk
        yield Term("ep", "all-to-all", 2 * passes * k * (ep - 1) / ep * own, f"2 m {times} k (E-1)/E T")
        if etp > 1:
            each = passes * k * (etp - 1) * own
            yield Term("ep", "all-gather", each, f"m {times} k (e-1) T")
            yield Term("ep", "reduce-scatter", each, f"m {times} k (e-1) T")

    def _pipeline(self) -> Iterator[Term]:
        if self.pipeline == 1:
            return
        chunks, m = self.config.layout.virtual_pipeline_model_parallel_size, self.microbatches
        last = self.stage == self.pipeline - 1
        message = self.activation / (self.tensor if self.config.layout.sequence_parallel else 1)
        # A chunk sends its output on, but the model's last; and its input's gradient back, but the model's first.
        messages = 2 * chunks - last - (self.stage == 0)
        suffix = "/t" if message < self.activation else ""
        yield Term("pp", "send", messages * m * message, f"{messages} m A{suffix}")
        if not self.config.model.untie_embeddings_and_output_weights and (last or self.stage == 0):
            table = self.config.model.padded_vocab_size * self.config.model.hidden_size // self.tensor
            yield Term("pp", "all-reduce", 4.0 * table, "2 (2-1)/2 4 V/t H")


def _layers(passes: float, layers: int) -> str:
    """How often L layers: `L`, `2 L`, `1.5 L`."""
    return "L" if passes == layers else f"{passes / layers:g} L" if layers else "0"


def _times(number: int) -> str:
    return "" if number == 1 else f"{number} "
