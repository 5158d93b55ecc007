"""The work of a configuration, whatever the machine: bytes to hold, operations to compute, bytes to send.

Memory and time are both computed from it, for a search over thousands of configurations and several machines.
"""

from collections.abc import Callable, Hashable
from typing import Any

from megatron_ext.config.derived.batch_size import num_microbatches
from megatron_ext.config.schema import Config
from megatron_ext.cost.activations import Activations, recomputation
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.kernel_times import Kernels
from megatron_ext.cost.schedule import schedule_of
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.state_bytes import state_bytes
from megatron_ext.cost.traffic import Term, sent_for_data, sent_for_model
from megatron_ext.parts.stack import Layer


class Portion:
    """A rank's portion of a layer and a microbatch.

    The bytes it holds are the same in all layouts of a model with the same tensor- and context-parallel sizes and micro
    batch; its computation is the same where the expert-parallel size is the same too.

    Args:
        fused: whether it runs on GPUs, as for `activations.Activations`.
    """

    def __init__(self, config: Config, shapes: Shapes, *, fused: bool):
        self.formulas = Activations(config, fused=fused)
        self.gradients_of_a_layer = _gradients_of_a_layer(self.formulas, shapes)
        """Bytes held in a backward pass: gradients of a layer's widest activations and, before it is added up, of one
        matrix."""
        self.kernels: dict[tuple[int, bool, int], tuple[Machine, Kernels]] = {}
        self.of_recomputations: dict[Hashable, dict[Hashable, Any]] = {}


class Portions:
    """The portions of all layouts of one model.

    Args:
        fused: as for `Portion`.
    """

    def __init__(self, *, fused: bool):
        self._fused = fused
        self._found: dict[tuple[int, ...], Portion] = {}

    def of(self, config: Config, shapes: Shapes) -> Portion:
        """Return the portion of a configuration; configurations with the same sizes share one object."""
        layout = config.layout
        sizes = (
            layout.tensor_model_parallel_size,
            layout.context_parallel_size,
            layout.expert_tensor_size,
            layout.sequence_parallel,
            config.training.micro_batch_size,
        )
        if sizes not in self._found:
            self._found[sizes] = Portion(config, shapes, fused=self._fused)
        return self._found[sizes]


class Workload:
    """The work of one resolved and validated configuration.

    Args:
        shapes: the parameters of its stages; configurations that share the model in the same way may share them.
        fused: whether it runs on GPUs, as for `activations.Activations`.
        like: work of a configuration that differs in its sharding and recomputation alone. Bytes and operations that
            both share are then not summed again.
        keeping: work of a configuration that differs in its micro batch and recomputation alone. Bytes of
            weights, gradients and optimizer state are then not computed again.
        portions: the portions of other layouts of the model.
    """

    def __init__(
        self,
        config: Config,
        shapes: Shapes,
        *,
        fused: bool,
        like: "Workload | None" = None,
        keeping: "Workload | None" = None,
        portions: Portions | None = None,
    ):
        self.config, self.shapes = config, shapes
        self.plain = self
        """The same work without the recomputation that a search chose."""
        self.microbatches = num_microbatches(config, config.training.global_batch_size)
        self.schedule = schedule_of(config, self.microbatches)
        self.scheme = config.layout.sharding
        if keeping is None:
            self.state, self.state_of_experts = state_bytes(config), state_bytes(config, expert=True)
            self._kept: dict[int, tuple[float, float, float]] = {}
        else:
            self.state, self.state_of_experts, self._kept = keeping.state, keeping.state_of_experts, keeping._kept
        if like is None:
            self.portion = (portions or Portions(fused=fused)).of(config, shapes)
            self._of_recomputations: dict[Hashable, dict[Hashable, Any]] = {}
        else:
            self.portion, self._of_recomputations = like.portion, like._of_recomputations
        self._begin()

    def _begin(self) -> None:
        again = recomputation(self.config)
        self.formulas = self.portion.formulas.recomputing(self.config)
        self._once = self._of_recomputations.setdefault(again, {})
        self._of_portion = self.portion.of_recomputations.setdefault(again, {})
        self._sent_for_data: dict[int, list[Term]] = {}
        self.totals: dict[int, float] = {}
        """All bytes of a rank by stage, for the stages computed so far."""

    def once[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once for all shardings of this layout, micro batch and
        recomputation, and must be the same for them."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def once_for_portion[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called once for all layouts with this portion and recomputation. If it
        depends on the kernels, the key must name them."""
        if key not in self._of_portion:
            self._of_portion[key] = make()
        return self._of_portion[key]

    def kernels(self, machine: Machine, *, fsdp: bool) -> Kernels:
        """Return the seconds of products, attention and memory-bound work on a machine."""
        key = id(machine), fsdp, self.config.layout.expert_model_parallel_size
        # With its machine, so that no other one gets the same id.
        of_machine = self.portion.kernels
        if key not in of_machine:
            of_machine[key] = machine, Kernels(self.config, self.shapes, machine, fsdp=fsdp)
        return of_machine[key][1]

    def recomputing(self, config: Config) -> "Workload":
        """Return the work of a configuration that differs from this one only in its recomputation."""
        other = Workload.__new__(Workload)
        vars(other).update(vars(self))
        other.config = config
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
        """Return the communication of data parallelism of this stage's ranks, one term for each purpose."""
        if stage not in self._sent_for_data:
            self._sent_for_data[stage] = sent_for_data(self.config, stage, self.shapes)
        return self._sent_for_data[stage]

    def sent_for_model(self, stage: int) -> list[Term]:
        """Return all other communication of a rank of this stage, one term for each purpose."""
        return self.once(("sent", stage), lambda: sent_for_model(self.config, stage, self.shapes))


def _gradients_of_a_layer(formulas: Activations, shapes: Shapes) -> float:
    """Return the bytes of the kind of layer that needs most."""

    def of(kind: Layer) -> float:
        matrix = formulas.width * shapes.part(kind).largest
        return 2 * formulas.stream + max(branch.part.gradients(formulas.share) for branch in kind.branches) + matrix

    return max(of(kind) for kind, _ in formulas.kinds)
