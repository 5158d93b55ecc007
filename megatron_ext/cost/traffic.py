"""Computes the bytes that a rank sends in a step, from the flags alone: the formulas next to the counts of
benchmarks/sharding.py.

P is the number of parameters of a rank's stage and tensor-parallel shard, n = data x context parallel size (the ranks
that share gradients) over the r copies of the shards, m microbatches, L layers of a rank, S sequence, B samples of a
microbatch, H hidden size, w bytes of a weight or an activation (2 in bf16, 4 in fp32). A = S/c B H w is one activation,
Q, K and KV this rank's queries, keys, and keys with values, of one layer, QKV the projection of all ranks; norms are
elements of norms and of the other parameters that every rank has whole: biases, routers, projections to latents.
Gradients are reduced in fp32. Of experts: E and e their parallel size and tensor-parallel size, k experts of a token, T
this rank's part of A, which it routes.
Sources: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, sections 5 and 7), Shoeybi et al. 2019 (arXiv:1909.08053,
section 3), Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2), Narayanan et al. 2021 (arXiv:2104.04473, 2.2).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_ext.config.derived.batch_size import LOSS_CHUNKS, num_microbatches
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.derived.pipeline_split import last_stage, splits_backward
from megatron_ext.config.derived.sharding import FSDP
from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import repeated
from megatron_ext.cost.schedule import schedule_of
from megatron_ext.cost.stage_parameters import Shapes, kinds_of
from megatron_ext.cost.state_bytes import sharing_ranks, state_bytes
from megatron_ext.parts.catalogue import layer_parameters, tensor_size
from megatron_ext.parts.protocol import Part, Share
from megatron_ext.parts.stack import Layer
from megatron_ext.registry import brought

# Parameters of a bucket of megatron-core's DDP, at least, and times the ranks (DistributedDataParallelConfig 0.19).
_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True)
class Term:
    """The bytes that a rank sends in a step for one purpose."""

    axis: str
    """Ranks that it exchanges them with: dp, between (copies of the shards), edp, tp, cp, ep, or pp."""

    collective: str
    bytes: float
    formula: str
    calls: float = 1.0
    """Number of collectives, or rounds of sends, in the step: each waits for its links' latency."""


def sent(config: Config, stage: int, shapes: Shapes | None = None) -> list[Term]:
    """Return every purpose for which a rank of this pipeline stage sends at least a tensor.

    Args:
        config: the resolved and validated configuration.
        shapes: shapes of the same model and split; by default made from the configuration.
    """
    of_stage = _Stage(config, stage, shapes or Shapes(config))
    return [*of_stage.of_data(), *of_stage.of_model()]


def sent_for_data(config: Config, stage: int, shapes: Shapes) -> list[Term]:
    """Return those purposes that depend on how data-parallel ranks divide weights, gradients and optimizer state."""
    return _Stage(config, stage, shapes).of_data()


def sent_for_model(config: Config, stage: int, shapes: Shapes) -> list[Term]:
    """Return the communication of TP, CP, EP and PP, one term for each purpose."""
    return _Stage(config, stage, shapes).of_model()


class _Stage:
    def __init__(self, config: Config, stage: int, shapes: Shapes):
        layout, training = config.layout, config.training
        self.config, self.stage = config, stage
        self.shapes = shapes
        self.tensor, self.pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        self.context = layout.context_parallel_size
        self.microbatches = num_microbatches(config, training.global_batch_size)
        self.weight = training.params_bytes
        self.tokens = config.model.seq_length // self.context * training.micro_batch_size
        self.activation = self.tokens * config.model.hidden_size * self.weight
        self.layers = self.shapes.layers_of_stage(stage)
        self.scheme = config.layout.sharding

    @functools.cached_property
    def held(self) -> Counter[Layer]:
        """Number of the stage's layers of each kind."""
        return self.shapes.kinds_of_stage(self.stage)

    @functools.cached_property
    def again(self) -> dict[str, Counter[Layer]]:
        """Layers of which recomputation repeats the forward pass, by the part that it repeats: the communication is
        repeated as well."""
        if self.config.training.recompute_granularity is None:
            return {part: Counter() for part in ("core", "mixer", "mlp")}
        again = [repeated(self.config, stack) for stack in self.shapes.stacks[self.stage]]
        return {part: kinds_of(chunk[part] for chunk in again) for part in again[0]}

    def of_data(self) -> list[Term]:
        """Return the communication of data parallelism, one term for each purpose."""
        return [*self._data(), *self._matrices()]

    def of_model(self) -> list[Term]:
        """Return the communication of all other parallelism, one term for each purpose."""
        parts = self._tensor(), self._of_parts("cp"), self._of_parts("ep"), self._pipeline()
        return [term for part in parts for term in part]

    def _data(self) -> Iterator[Term]:
        dense, experts = self.shapes.parameters_of_stage(self.stage)
        copies = self.config.layout.num_distributed_optimizer_instances
        less, less_of_experts = self._rounded_before_they_are_sent() if self.scheme.optimizer else (0, 0)
        yield from self._shared("dp", dense, sharing_ranks(self.config), copies, "P", less)
        ranks = sharing_ranks(self.config, expert=True)
        yield from self._shared("edp", experts, ranks, copies, "P of experts", less_of_experts)

    def _rounded_before_they_are_sent(self) -> tuple[int, int]:
        """Return the bytes that a gather of all weights has less because some are gathered in fewer bits: of dense
        parameters and of routed experts. Their scales are a few bytes a tensor."""
        config, less = self.config, [0, 0]
        every = [each for formats in brought("product_formats") if (each := formats.gathered_bytes(config))]
        layers = (layer for chunk in self.shapes.stacks[self.stage] for layer in chunk) if every else ()
        for layer in layers:
            number = layer.number if layer.next_token is None else None
            for parameter in layer_parameters(config, layer, (0,)):
                shape = parameter.local_shape(tensor_size(config, parameter))
                each = [size for one in every if (size := one(parameter, number, shape))]
                if each:
                    experts = layer.experts.count if layer.experts and parameter.expert is not None else 0
                    held = experts // config.layout.expert_model_parallel_size or 1
                    less[experts > 0] += held * math.prod(shape) * (self.weight - each[0])
        return less[0], less[1]

    def _shared(self, axis: str, parameters: int, n: int, r: int, name: str, less: int = 0) -> Iterator[Term]:
        """Yield the communication for parameters that n ranks share and that r groups have a copy of.

        Args:
            less: bytes that a gather of the weights has less than their precision needs.
        """
        if n * r == 1 or parameters == 0:
            return
        gradient = state_bytes(self.config).gradients
        units = self._units(parameters)
        gradients, weights, share = gradient * parameters, self.weight * parameters, (n - 1) / n
        if not self.scheme.optimizer:
            yield Term(axis, "all-reduce", 2 * share * gradients, f"2 (n-1)/n {gradient}{name}", units)
            return
        each = self.scheme.gradients and not splits_backward(self.config.layout)
        reduced = self.microbatches if each else 1
        yield Term(
            axis,
            "reduce-scatter",
            reduced * share * gradients,
            f"{_times(reduced)}(n-1)/n {gradient}{name}",
            reduced * units,
        )
        gathered = self.microbatches * self._gathers() if self.scheme.weights else 1
        yield Term(
            axis,
            "all-gather",
            gathered * share * (weights - less),
            f"{_times(gathered)}(n-1)/n {f'{weights - less:,} B' if less else f'{self.weight}{name}'}",
            gathered * units,
        )
        if r > 1 and self.config.layout.outer_dp_sharding_strategy == "optim":
            share = (r - 1) / r
            yield Term("between", "reduce-scatter", share * gradients / n, f"(r-1)/r {gradient}{name}/n")
            # In both passes of the first microbatch.
            yield Term("between", "all-gather", 2 * share * weights / n, f"2 (r-1)/r {self.weight}{name}/n")
        elif r > 1:
            times = 2 * reduced if self.scheme.between == "reductions" else 2
            whole = self.scheme.between == "whole steps"
            between = times * (r - 1) / r * gradients / (1 if whole else n)
            yield Term(
                "between", "all-reduce", between, f"{_times(times)}(r-1)/r {gradient}{name}{'' if whole else '/n'}"
            )

    def _matrices(self) -> Iterator[Term]:
        """Yield the communication for updates of whole matrices, in fp32: of row shards to the rank that computes a
        matrix and back, and then of the matrix among tensor-parallel ranks (optim/muon.py)."""
        layout, settings, gathered, swapped = self.config.layout, self.config.optimizer, 0.0, 0.0
        kinds = self.held.items() if "muon_tp_mode" in traits_of(settings).flags else ()
        for parameter, kind, layers in ((p, k, n) for k, n in kinds for p in layer_parameters(self.config, k, (0,))):
            if parameter.update != "matrix":
                continue
            experts = kind.experts.count if kind.experts and parameter.expert is not None else 0
            n = sharing_ranks(self.config, expert=experts > 0) if self.scheme.optimizer else 1
            t, number = tensor_size(self.config, parameter), experts / layout.expert_model_parallel_size or 1
            size = 4 * layers * number * math.prod(parameter.local_shape(t)) / n
            swapped += 2 * (n - 1) / n * size if self.scheme.flag in FSDP and not experts else 0.0
            gathered += (t - 1) * size if parameter.tp_dim is not None else 0.0
        if swapped:
            yield Term("dp", "all-to-all", swapped, "2 (n-1)/n 4M/n", 2)
        if gathered and settings.muon_tp_mode == "duplicated":
            yield Term("tp", "all-gather", gathered, "(t-1) 4M/n")

    def _units(self, parameters: int) -> float:
        """Return into how many pieces the parameters are divided that are exchanged one at a time: layers under FSDP,
        buckets otherwise."""
        ranks = self.config.layout.data_parallel_size * self.context
        whole = max(_BUCKET, _BUCKET_OF_A_RANK * ranks)
        return float(self.layers + 1) if self.scheme.gradients else max(math.ceil(parameters / whole), 1)

    def _gathers(self) -> int:
        return 1 if self.config.layout.torch_fsdp2_no_reshard_after_forward else 2

    def _tensor(self) -> Iterator[Term]:
        if self.tensor == 1:
            return
        t, m = self.tensor, self.microbatches
        first, last = self.stage == 0, self.stage == last_stage(self.config.layout)
        one = m * (t - 1) / t * self.activation
        # The mixer, and an MLP. Routed experts have groups of their own.
        blocks = sum(number * kind.blocks for kind, number in self.held.items())
        again = _blocks(self.again["mixer"], lambda kind: kind.mixer) + _blocks(
            self.again["mlp"], lambda kind: kind.mlp
        )
        # Parallel attention and MLP, or Mamba-2, are summed once, and so is the gradient of their sum gathered.
        saved, saved_again = (
            sum(number for kind, number in of_mlp.items() if kind.parallel and kind.experts is None)
            + sum(number * kind.mixer.joined for kind, number in of_mixer.items() if kind.mixer is not None)
            for of_mlp, of_mixer in ((self.held, self.held), (self.again["mlp"], self.again["mixer"]))
        )
        if self.config.layout.sequence_parallel:
            # With --linear-cross-entropy the backward pass reads no hidden states, and gathers none again.
            of_loss = last * (1 if self.config.training.linear_cross_entropy else 2)
            of_block = 2 if self.config.layout.sequence_parallel_keep_gathered else 3
            gathers = of_block * blocks + again + first + of_loss - saved
            # Learned positions are added before the sequence is divided: to word embeddings that are summed whole.
            whole = first and self.config.model.position_embedding_type == "learned_absolute"
            scatters = 2 * blocks + again + first - whole + last - saved - saved_again
            yield Term("tp", "all-gather", gathers * one, f"{gathers} m (t-1)/t A", gathers * m)
            yield Term("tp", "reduce-scatter", scatters * one, f"{scatters} m (t-1)/t A", scatters * m)
            if whole:
                yield Term("tp", "all-reduce", 2 * one, "2 m (t-1)/t A", m)
            norms = self.shapes.norms_of_stage(self.stage)
            yield Term("tp", "all-reduce", 2 * (t - 1) / t * 4 * norms, "2 (t-1)/t 4 norms")
        else:
            sums = 2 * blocks + again + first + last - saved - saved_again
            yield Term("tp", "all-reduce", 2 * sums * one, f"{2 * sums} m (t-1)/t A", sums * m)
        yield from self._of_parts("tp")
        if last and self.config.training.linear_cross_entropy:
            # Of each token's part of the vocabulary the normalizer and, where it has it, the label's logit, in fp32.
            chunk = LOSS_CHUNKS["cpu" if self.config.layout.device == "cpu" else "cuda"]
            each = m * (t - 1) * 8 * self.tokens
            yield Term("tp", "all-gather", each, "m (t-1) 8 S/c B", m * math.ceil(self.tokens / chunk))
        elif last:
            # The loss over a divided vocabulary: largest logit, logit of the label, sum of exponentials, in fp32.
            yield Term("tp", "all-reduce", 3 * m * 2 * (t - 1) / t * 4 * self.tokens, "6 m (t-1)/t 4 S/c B", 3 * m)

    def _of_parts(self, axis: str) -> Iterator[Term]:
        """Yield the communication of the layers' parts along this axis, summed over the layers."""
        share, m = Share(self.config), self.microbatches
        sums: dict[tuple[str, str], list[float]] = {}
        for kind, layers in self.held.items():
            for exchange in (one for part in kind.parts for one in part.sent(share) if one.axis == axis):
                forward, backward = layers + self.again[exchange.repeated_with][kind], layers
                calls = exchange.calls
                total = sums.setdefault((exchange.collective, exchange.formula), [0.0] * 4)
                total[0] += forward * exchange.forward + backward * exchange.backward
                total[1] += forward * calls[0] + backward * calls[1]
                total[2] += forward * (calls[0] > 0) + backward * (calls[1] > 0)
                total[3] += layers
        for (collective, formula), (sent_bytes, calls, passes, layers) in sums.items():
            times = _layers(passes, layers)
            text = formula.format(layers=times, times=times.removesuffix("L"), twice=f"{2 * calls:g}")
            yield Term(axis, collective, m * sent_bytes, text, m * calls)

    def _pipeline(self) -> Iterator[Term]:
        if self.pipeline == 1:
            return
        m, last = self.microbatches, last_stage(self.config.layout)
        message = self.activation / (self.tensor if self.config.layout.sequence_parallel else 1)
        messages = schedule_of(self.config, m).messages(self.stage)
        suffix = "/t" if message < self.activation else ""
        yield Term("pp", "send", messages * m * message, f"{messages} m A{suffix}", messages * m)
        if self.config.model.shares_word_embeddings and last > 0 and self.stage in (0, last):
            table = self.config.model.padded_vocab_size * self.config.model.hidden_size // self.tensor
            yield Term("pp", "all-reduce", 4.0 * table, "2 (2-1)/2 4 V/t H")


def _blocks(layers: Counter[Layer], part: Callable[[Layer], Part | None]) -> int:
    """Return how often one part of each layer has its input gathered, and its output scattered."""
    parts = ((part(kind), number) for kind, number in layers.items())
    return sum(number * one.blocks for one, number in parts if one is not None)


def _layers(passes: float, layers: float) -> str:
    """Return how often L layers count: `L`, `2 L`, `1.5 L`."""
    return "L" if passes == layers else f"{passes / layers:g} L" if layers else "0"


def _times(number: int) -> str:
    return "" if number == 1 else f"{number} "
