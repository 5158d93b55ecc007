"""What a configuration has to hold, compute and send, before any machine is asked: memory and time are both computed
from it, for a search that tries thousands of configurations and several machines."""

import copy

from megatron_ext.config.batch import num_microbatches
from megatron_ext.config.layers import Layer, stack
from megatron_ext.config.schema import Config
from megatron_ext.plan.activations import Activations
from megatron_ext.plan.hardware import Machine
from megatron_ext.plan.kernels import Kernels
from megatron_ext.plan.shapes import Shapes
from megatron_ext.plan.state_bytes import sharding, state_bytes
from megatron_ext.plan.traffic import Term, sent


class Workload:
    """The work of one resolved and validated configuration.

    Args:
        shapes: the parameters of its stages; configurations that share the model in the same way may share them.
        fused: whether it runs on GPUs, as for `activations.Activations`.
        like: work of a configuration that differs in its sharding and recomputation alone. What both hold and compute
            is then not summed again.
    """

    def __init__(self, config: Config, shapes: Shapes, *, fused: bool, like: "Workload | None" = None):
        self.config, self.shapes = config, shapes
        self.formulas = Activations(config, fused=fused) if like is None else like.formulas.recomputing(config)
        self._kernels: dict[tuple[int, bool], tuple[Machine, Kernels]] = {} if like is None else like._kernels
        self.microbatches = num_microbatches(config, config.training.global_batch_size)
        self.kind = sharding(config)
        self.state, self.state_of_experts = state_bytes(config), state_bytes(config, expert=True)
        self.gradients_of_a_layer = _gradients_of_a_layer(self.formulas, shapes)
        """Bytes held in a backward pass: gradients of a layer's widest activations and, before it is added up, of one
        matrix."""
        self._terms: dict[int, list[Term]] = {}

    def kernels(self, machine: Machine, *, fsdp: bool) -> Kernels:
        """Return the seconds of products, attention and memory-bound work on a machine."""
        key = id(machine), fsdp
        # With its machine, so that no other one gets the same id.
        if key not in self._kernels:
            self._kernels[key] = machine, Kernels(self.config, self.shapes, machine, fsdp=fsdp)
        return self._kernels[key][1]

    def recomputing(self, config: Config) -> "Workload":
        """Return the work of a configuration that differs from this one in what it recomputes alone."""
        other = copy.copy(self)
        other.config, other.formulas, other._terms = config, self.formulas.recomputing(config), {}
        return other

    def kept(self, stage: int) -> tuple[float, float, float]:
        """Return the bytes of weights, gradients and optimizer state that a rank of this stage keeps between steps."""
        dense, experts = self.shapes.parameters_of_stage(stage)
        sizes = zip(self.state.sizes, self.state_of_experts.sizes, strict=True)
        weights, gradients, optimizer = (dense * each + experts * other for each, other in sizes)
        return weights, gradients, optimizer

    def sent(self, stage: int) -> list[Term]:
        """Return every purpose for which a rank of this stage sends something."""
        if stage not in self._terms:
            self._terms[stage] = sent(self.config, stage, self.shapes)
        return self._terms[stage]


def _gradients_of_a_layer(formulas: Activations, shapes: Shapes) -> float:
    """Return the bytes of the kind of layer that needs most."""

    def of(kind: Layer) -> float:
        held, matrix = formulas.layer(kind), formulas.width * shapes.part(kind).largest
        return 2 * formulas.stream + max(held.mlp / 2 if kind.experts else held.mlp, held.heads) + matrix

    return max(of(kind) for kind, _ in stack(formulas.config).kinds)
