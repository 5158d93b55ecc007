"""Describes an optimizer's state, flags and sharding schemes, and has the traits of the core's optimizers.

A new optimizer is its update as a torch optimizer and its `OptimizerTraits`, in a plugin that brings them to the
extension point `optimizers`: building, sharding, host memory, checkpoints, `--dry-run`, the planner, rules and the
translation of other programs' files follow from the traits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_ext.config.derived.sharding import FLAGS, Flag

StateType = Literal["float32", "bfloat16", "float16"]
"""Data type of a state, by torch's name."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES: dict[str, StateType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


AVERAGE = "average"
"""Name of the state that is an average of the weight, which exports can take in its place."""


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for every tensor that it updates, of the same shape.

    The updated tensor is a weight, its fp32 master, or this rank's shard of either. Checkpoints hold the whole state,
    with the weight's shape. The state is divided and offloaded to host memory together with the updated tensor.
    """

    name: str
    """The key in torch's `optimizer.state`, and `optimizer.state.<name>.<weight>` in checkpoints."""

    dtype: StateType = "float32"

    dtype_field: str | None = None
    """A field of the optimizer's configuration that names the type (fp32, bf16, fp16); None: it is `dtype`."""

    unless_zero: str | None = None
    """A field of the optimizer's configuration without which, at 0, the state is not kept. None: always kept."""

    begins_as_weight: bool = False
    """Whether it begins as a copy of the updated tensor, and not as zero."""

    along: int | None = None
    """The dimension along which it is the same everywhere, -1 for all columns of a row or -2 for all rows of a column:
    one of these is kept, which is counted as no memory. Checkpoints have it for all."""


@dataclass(frozen=True)
class Elsewhere:
    """Names of the optimizer in another program's configuration."""

    names: tuple[str, ...]
    """The optimizer's names in the other program, in lower case."""

    flags: str = ""
    """Flags that set the values which are defaults in the other program and not here."""


@dataclass(frozen=True)
class OptimizerTraits:
    """All facts about one optimizer. Unless it `needs_whole_matrices`, its update must be element by element, as a
    shard is any range."""

    name: str
    """The optimizer's name as a value of `--optimizer`."""

    title: str
    """The optimizer's name in messages."""

    torch_class: str | type
    """`module:class` of the torch optimizer, or the class."""

    arguments: Mapping[str, str | tuple[str, ...]]
    """Arguments of the class, each with the field of the optimizer's configuration, or the fields, that it is read
    from; learning rate and weight decay aside, which every parameter group has."""

    states: tuple[State, ...]

    schemes: frozenset[Flag]
    """Sharding schemes that can run it, by flag. DDP runs every optimizer."""

    built_as: Literal["adam", "sgd"]
    """The optimizer that megatron-core is asked to build. If that is another one, `torch_class` replaces it before the
    first update; else the engine may take a fused kernel of Transformer Engine or apex."""

    of_elements: "OptimizerTraits | None" = None
    """The optimizer that updates, in place of this one, parameters whose `Parameter.update` is "element": embeddings,
    output layer, norms, biases. None: this optimizer updates every parameter."""

    needs_whole_matrices: bool = False
    """Whether the update of a matrix depends on all of it. The class then gets whole matrices, or stacks of experts'
    matrices, [experts, rows, columns], and a layout without whole ones is refused. `of_elements` updates the rest."""

    puts_matrices_together: bool = False
    """Whether the class also updates matrices that ranks hold in parts, by their `parallel.matrices.Matrix`. Parts in
    host memory are out of its reach."""

    in_16_bits: "OptimizerTraits | None" = None
    """The traits of the class that keeps averages in bf16 or fp16, where --exp-avg-dtype or --exp-avg-sq-dtype asks for
    it; None where there is none."""

    is_of_ours: bool = False
    """Whether a class of ours replaces the optimizer that the engine builds, although the engine has this optimizer."""

    counts_updates: bool = False
    """Whether an update depends on the number of earlier updates, which checkpoints then hold."""

    follows_gradients: bool = False
    """Whether the size of an update is proportional to the gradients, unlike Adam's."""

    numbers: tuple[str, ...] = ()
    """Numbers that it keeps besides, next to the states: the same for every tensor, in checkpoints once."""

    scalars: Mapping[str, str] = field(default_factory=dict)
    """The types in which the class keeps its count and its numbers, "int", "float" or a dtype of torch; default: the
    count in float32, numbers in float64."""

    reads_weight_decay: bool = True
    """Whether the class has a setting `weight_decay`."""

    can_be_masked: bool = False
    """Whether `torch_class` takes `found_inf`, as torch's fused kernels do: a scalar on the device that leaves weights,
    states and the count of updates as they are while it is 1. Its numbers need not be read before an update then."""

    torch_options: Mapping[str, Any] = field(default_factory=dict)
    """Further options that every parameter group of `torch_class` gets."""

    remark: str = ""
    """A remark for users who choose among the optimizers."""

    elsewhere: Mapping[str, Elsewhere] = field(default_factory=dict)
    """Names of the optimizer in other programs, by program."""

    drawn: tuple[str, ...] = ()
    """Flags with other values than the defaults, of which random models take one (docs/parity_fuzz.md)."""

    @property
    def each(self) -> tuple["OptimizerTraits", ...]:
        """The optimizers of a run: this one, and `of_elements` if it is set."""
        return (self,) if self.of_elements is None else (self, self.of_elements)

    def updating(self, update: str | None) -> "OptimizerTraits":
        """Return which of `each` updates parameters of this kind (`Parameter.update`)."""
        return self.each[-1 if update == "element" else 0]

    @property
    def flags(self) -> tuple[str, ...]:
        """The fields of the optimizer's configuration that only this optimizer reads."""
        fields = ((value,) if isinstance(value, str) else value for value in self.arguments.values())
        return tuple(name for names in fields for name in names)

    @property
    def is_the_engines(self) -> bool:
        """Whether megatron-core has the optimizer, so that no class of ours replaces the one that it builds."""
        return self.built_as == self.name and not self.is_of_ours

    @property
    def averages(self) -> bool:
        """Whether its weights are evaluated, and exported, as the averages that it keeps."""
        return any(state.name == AVERAGE for state in self.states)

    def values(self, settings: Any) -> dict[str, Any]:
        """Return the arguments of `torch_class`, from the optimizer's configuration."""
        return {
            argument: getattr(settings, names) if isinstance(names, str) else tuple(getattr(settings, n) for n in names)
            for argument, names in self.arguments.items()
        }

    def kept(self, settings: Any) -> tuple[State, ...]:
        """Return the states that are kept with these settings."""
        average = State(AVERAGE, unless_zero="ema_decay", begins_as_weight=True)
        states = (*self.states, average)
        kept = (one for one in states if one.unless_zero is None or getattr(settings, one.unless_zero))
        return tuple(
            one if one.dtype_field is None else replace(one, dtype=_DTYPES[getattr(settings, one.dtype_field)])
            for one in kept
        )

    def state_names(self, settings: Any) -> tuple[str, ...]:
        """Names of the states that are kept with these settings."""
        return tuple(dict.fromkeys(state.name for traits in self.each for state in traits.kept(settings)))

    def bytes_each(self, settings: Any) -> int:
        """Return the bytes of state for each element that is updated, without the fp32 master of a 16-bit weight."""
        return sum(_BYTES[state.dtype] for state in self.kept(settings) if state.along is None)


ALL_SCHEMES: frozenset[Flag] = frozenset(FLAGS)

FULL_ADAM = OptimizerTraits(
    name="adam",
    title="Adam",
    torch_class="torch.optim:AdamW",
    arguments={"betas": ("adam_beta1", "adam_beta2"), "eps": "adam_eps"},
    states=(State("exp_avg"), State("exp_avg_sq")),
    schemes=ALL_SCHEMES,
    built_as="adam",
    counts_updates=True,  # by which the bias of its averages is corrected
    drawn=(
        "--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp16",
        "--main-grads-dtype bf16 --bf16",
    ),
    can_be_masked=True,
    torch_options={"fused": True},  # one call for all tensors instead of a Python loop
    remark="AdamW, the fused kernel where there is one",
    elsewhere={
        "deepspeed": Elsewhere(("adam", "adamw", "fusedadam", "cpuadam")),
        "axolotl": Elsewhere(("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused")),
    },
)
_SHORT_ADAM = replace(
    FULL_ADAM,
    title="Adam with averages in 16 bits",
    torch_class="megatron_ext.optim.short_adam:ShortAdam",
    arguments={**FULL_ADAM.arguments, "dtypes": ("exp_avg_dtype", "exp_avg_sq_dtype")},
    states=(State("exp_avg", dtype_field="exp_avg_dtype"), State("exp_avg_sq", dtype_field="exp_avg_sq_dtype")),
    is_of_ours=True,
    can_be_masked=False,  # it counts on the host
    torch_options={},
)
"""Adam where --exp-avg-dtype or --exp-avg-sq-dtype is bf16 or fp16."""
ADAM = replace(FULL_ADAM, in_16_bits=_SHORT_ADAM)

SGD = OptimizerTraits(
    name="sgd",
    title="SGD",
    torch_class="torch.optim:SGD",
    arguments={"momentum": "sgd_momentum"},
    states=(State("momentum_buffer", unless_zero="sgd_momentum"),),
    schemes=frozenset({"use_torch_fsdp2"}),  # DistributedOptimizer, also under Megatron-FSDP, refuses the engine's SGD
    built_as="sgd",
    follows_gradients=True,
    drawn=("--sgd-momentum 0", "--sgd-momentum 0.5"),
    elsewhere=dict.fromkeys(("deepspeed", "axolotl"), Elsewhere(("sgd",), flags="--sgd-momentum 0")),
)
_FIRST_MUON = "--muon-momentum 0.95 --muon-nesterov --muon-coefficient-type simple"
"""Flags for the defaults of Muon's first implementation, which other programs keep."""

MUON = OptimizerTraits(
    name="muon",
    title="Muon",
    torch_class="megatron_ext.optim.muon:Muon",
    arguments={
        name: f"muon_{name}"
        for name in (
            *("momentum", "nesterov", "scale_mode", "extra_scale_factor", "num_ns_steps", "coefficient_type"),
            *("no_split_qkv", "tp_mode", "fp32_matmul_prec"),
        )
    },
    states=(State("momentum_buffer"),),
    schemes=ALL_SCHEMES,
    built_as="adam",
    of_elements=FULL_ADAM,
    needs_whole_matrices=True,
    puts_matrices_together=True,
    drawn=(
        "--muon-momentum 0.8 --muon-nesterov",
        "--muon-scale-mode unit_rms_norm --muon-extra-scale-factor 0.5",
        "--muon-scale-mode shape_scaling --muon-num-ns-steps 3",
        "--muon-coefficient-type simple --muon-fp32-matmul-prec highest",
        "--muon-coefficient-type polar_express",
        "--muon-no-split-qkv",
        "--muon-tp-mode distributed",
        "--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6",
    ),
    remark="matrices of layers by Muon; embeddings, output layer, norms, biases and routers by AdamW",
    elsewhere={
        "deepspeed": Elsewhere(
            ("muon",),
            flags=f"{_FIRST_MUON} --muon-scale-mode shape_scaling --adam-beta2 0.95 --adam-eps 1e-10",
        ),
        "axolotl": Elsewhere(
            ("muon",), flags=f"{_FIRST_MUON} --muon-extra-scale-factor 0.2 --adam-beta1 0.95 --adam-beta2 0.95"
        ),
    },
)
