"""What a configuration has to hold, compute and send, before any machine is asked: memory and time are both computed
from it, for a search that tries thousands of configurations and several machines."""

from collections.abc import Callable, Hashable
from typing import Any

from megatron_ext.config.batch import num_microbatches
from megatron_ext.config.layers import Layer
from megatron_ext.config.schema import Config
from megatron_ext.plan.activations import Activations
from megatron_ext.plan.hardware import Machine
from megatron_ext.plan.kernels import Kernels
from megatron_ext.plan.shapes import Shapes
from megatron_ext.plan.state_bytes import sharding, state_bytes
from megatron_ext.plan.traffic import Term, sent_for_data, sent_for_model


class Workload:
    """The work of one resolved and validated configuration.

    Args:
        shapes: the parameters of its stages; configurations that share the model in the same way may share them.
        fused: whether it runs on GPUs, as for `activations.Activations`.
        like: work of a configuration that differs in its sharding and recomputation alone. What both hold and compute
            is then not summed again.
        keeping: work of a configuration that differs in its micro batch and recomputation alone. What both keep of
            weights, gradients and optimizer state is then not asked again.
    """

    def __init__(
        self,
        config: Config,
        shapes: Shapes,
        *,
        fused: bool,
        like: "Workload | None" = None,
        keeping: "Workload | None" = None,
    ):
        self.config, self.shapes = config, shapes
        self.formulas = Activations(config, fused=fused) if like is None else like.formulas.recomputing(config)
        self.microbatches = num_microbatches(config, config.training.global_batch_size)
        self.kind = sharding(config)
        if keeping is None:
            self.state, self.state_of_experts = state_bytes(config), state_bytes(config, expert=True)
            self._kept: dict[int, tuple[float, float, float]] = {}
        else:
            self.state, self.state_of_experts, self._kept = keeping.state, keeping.state_of_experts, keeping._kept
        if like is None:
            self._kernels: dict[tuple[int, bool], tuple[Machine, Kernels]] = {}
            self._of_recomputations: dict[Hashable, dict[Hashable, Any]] = {}
            self.gradients_of_a_layer = _gradients_of_a_layer(self.formulas, shapes)
            """Bytes held in a backward pass: gradients of a layer's widest activations and, before it is added up, of
            one matrix."""
        else:
            self._kernels, self._of_recomputations = like._kernels, like._of_recomputations
            self.gradients_of_a_layer = like.gradients_of_a_layer
        self._begin()

    def _begin(self) -> None:
        training = self.config.training
        names = "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"
        self._once = self._of_recomputations.setdefault(tuple(getattr(training, name) for name in names), {})
        self._sent_for_data: dict[int, list[Term]] = {}

    def once[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns, which must be the same for all shardings of this layout, micro batch and
        recomputation; it is called for the first of them."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def kernels(self, machine: Machine, *, fsdp: bool) -> Kernels:
        """Return the seconds of products, attention and memory-bound work on a machine."""
        key = id(machine), fsdp
        # With its machine, so that no other one gets the same id.
        if key not in self._kernels:
            self._kernels[key] = machine, Kernels(self.config, self.shapes, machine, fsdp=fsdp)
        return self._kernels[key][1]

    def recomputing(self, config: Config) -> "Workload":
        """Return the work of a configuration that differs from this one in what it recomputes alone."""
        other = Workload.__new__(Workload)
        vars(other).update(vars(self))
        other.config, other.formulas = config, self.formulas.recomputing(config)
        other._begin()
        return other

    def kept(self, stage: int) -> tuple[float, float, float]:
        """Return the bytes of weights, gradients and optimizer state that a rank of this stage keeps between steps."""
        if stage not in self._kept:
            dense, experts = self.shapes.parameters_of_stage(stage)
            sizes = zip(self.state.sizes, self.state_of_experts.sizes, strict=True)
            weights, gradients, optimizer = (dense * each + experts * other for each, other in sizes)
            self._kept[stage] = weights, gradients, optimizer
        return self._kept[stage]

    def sent_for_data(self, stage: int) -> list[Term]:
        """Return for what data-parallel ranks of this stage send something."""
        if stage not in self._sent_for_data:
            self._sent_for_data[stage] = sent_for_data(self.config, stage, self.shapes)
        return self._sent_for_data[stage]

    def sent_for_model(self, stage: int) -> list[Term]:
        """Return for what else a rank of this stage sends something."""
        return self.once(("sent", stage), lambda: sent_for_model(self.config, stage, self.shapes))


def _gradients_of_a_layer(formulas: Activations, shapes: Shapes) -> float:
    """Return the bytes of the kind of layer that needs most."""

    def of(kind: Layer) -> float:
        held, matrix = formulas.layer(kind), formulas.width * shapes.part(kind).largest
        return 2 * formulas.stream + max(held.mlp / 2 if kind.experts else held.mlp, held.heads) + matrix

    return max(of(kind) for kind, _ in formulas.kinds)
