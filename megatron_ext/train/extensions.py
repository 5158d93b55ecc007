"""Holds the parts that a user's own code brings to a run: callbacks, datasets, a loss, layers, an optimizer, a
learning-rate schedule, families of Hugging Face models.

    pretrain(flags, callbacks=[Mine()], datasets=my_datasets, loss=my_loss, layer_spec=my_layer)

docs/extending.md has an example of each. Every function is called on every rank that has a use for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ext.config.derived.cuda_graphs import FULL_ITERATION, graphs_warning, makes_graphs, without_graphs
from megatron_ext.config.derived.optimizer_traits import OptimizerTraits
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.data.corpus import Splits
from megatron_ext.data.samples import SampleDataset, Samples, SampleWindow, Source
from megatron_ext.errors import ConfigurationError, DataError, TrainingError
from megatron_ext.optim.curves import Schedule
from megatron_ext.own_code import OwnPart, read_script, text_of_own_error
from megatron_ext.parts.own_parameters import OwnParameters, with_own_parameters
from megatron_ext.registry import with_own
from megatron_ext.rules.part_rules import matrices_have_a_rule
from megatron_ext.rules.sharding_rules import matrices_are_whole
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ext.model.loss import TokenLogits
    from megatron_ext.parts.stack import Layer
    from megatron_ext.train.trainer import Callback

MakeDatasets = Callable[[Config, Tokenizer, Splits[int]], Splits[SampleDataset | None]]
"""From the configuration, the tokenizer and the number of samples that the run reads of each split, the datasets."""

Loss = Callable[["TokenLogits"], "torch.Tensor"]
"""From the logits of a microbatch, the loss of each token, [batch, sequence]."""

LayerSpec = Callable[["ModuleSpec", "Layer"], "ModuleSpec"]
"""From the spec of a layer and its description, the spec to build."""


OptimizerClass = Callable[..., "torch.optim.Optimizer"]
"""A class derived from torch.optim.Optimizer, or `functools.partial` of one with its arguments."""


def require_known(names: Iterable[str]) -> None:
    """Require that each argument that brings in a user's code is one of `Extensions`.

    Raises:
        ConfigurationError: one is not; the message names all that there are.
    """
    known = [part.name for part in fields(Extensions)]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"no part of a run is called {name}=; of your own can be {', '.join(f'{one}=' for one in known)} "
                "(docs/extending.md)"
            )


@dataclass(frozen=True)
class Extensions:
    """The parts of a run that are not ours. None stands for ours."""

    callbacks: Sequence["Callback | Callable[[], Callback]"] = ()
    datasets: MakeDatasets | None = None
    loss: Loss | None = None
    layer_spec: LayerSpec | None = None
    layer_parameters: OwnParameters | None = None
    optimizer: OptimizerTraits | OptimizerClass | None = None
    """Traits; a class, or a partial of one, becomes the traits that its state on a toy shows."""

    learning_rate: Schedule | None = None
    families: Sequence[Any] = ()
    """Families of Hugging Face models, for a plugin that reads and writes these."""

    def __post_init__(self) -> None:
        """Raise ConfigurationError where a part is not of its kind; let the functions be known in a traceback."""
        if self.optimizer is not None and not isinstance(self.optimizer, OptimizerTraits) and callable(self.optimizer):
            from megatron_ext.optim.toy_step import traits_of_class  # imports torch

            object.__setattr__(self, "optimizer", traits_of_class(self.optimizer))
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name in ("callbacks", "families"):
                fits, kind = isinstance(value, Sequence), f"a list of {part.name}"
            elif part.name == "optimizer":
                fits, kind = (
                    isinstance(value, OptimizerTraits),
                    "a class derived from torch.optim.Optimizer, or OptimizerTraits (docs/extending.md, An optimizer)",
                )
            else:
                fits, kind = callable(value), "a function"
            if part.name == "optimizer" and hasattr(value, "param_groups"):
                raise ConfigurationError(
                    f"optimizer= is an object of {type(value).__name__}, which has weights already: give the class, or "
                    f"functools.partial({type(value).__name__}, ...) with its arguments"
                )
            if value is not None and not fits:
                raise ConfigurationError(f"{part.name}= is {type(value).__name__}: give {kind}, or leave it out")
            if kind == "a function" and value is not None and not isinstance(value, OwnPart):
                object.__setattr__(self, part.name, OwnPart(part.name, value))

    def named(self) -> tuple[str, ...]:
        """Return the names of the parts that are not ours."""
        return tuple(part.name for part in fields(self) if getattr(self, part.name))

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Return a context for a run, in which the user's families are known. On exit, unregister the user's optimizer
        that `applied` has registered: the next run may have another one of its name."""
        known = set(OPTIMIZERS)
        try:
            with with_own("families", self.families):
                yield
        finally:
            if (traits := self.optimizer_traits) is not None and traits.name not in known:
                OPTIMIZERS.pop(traits.name, None)

    @property
    def optimizer_traits(self) -> OptimizerTraits | None:
        """The traits of the own optimizer; None where it is one of ours."""
        return self.optimizer if isinstance(self.optimizer, OptimizerTraits) else None

    def made_callbacks(self) -> list["Callback"]:
        """Return the user's callbacks; a class or function in the list is called to make one. This imports
        megatron-core.

        Raises:
            ConfigurationError: one of them is no callback.
        """
        from megatron_ext.train.trainer import Callback

        made = [one if isinstance(one, Callback) or not callable(one) else one() for one in self.callbacks]
        for maker, callback in zip(self.callbacks, made, strict=True):
            if not isinstance(callback, Callback):
                name = getattr(maker, "__name__", type(maker).__name__)
                what = f"made {type(callback).__name__}" if callable(maker) else "is none"
                raise ConfigurationError(
                    f"callbacks= has {name}, which {what}: give what derives from Callback "
                    "(megatron_ext.train.trainer), or a class or function that makes one"
                )
        return made

    def applied(self, config: Config) -> Config:
        """Return the configuration with the own layers' parameters and the own optimizer, which is registered, and
        without CUDA graphs of own parts.

        Raises:
            ConfigurationError: the optimizer has the name of another one, or cannot run in the flags' sharding scheme;
                or the flags compute the cross-entropy without the logits that the own loss is given; or there are
                parameters of own layers, and no own layers, or a Hugging Face model to begin with.
        """
        if self.layer_parameters is not None and self.layer_spec is None:
            raise ConfigurationError("layer_parameters= without layer_spec=: no layer has them; give layer_spec=, too")
        if self.layer_parameters is not None and config.checkpoint.load_hf is not None:
            raise ConfigurationError(
                "--load-hf, but layer_parameters= adds parameters to the layers, which no Hugging Face model holds; "
                "leave --load-hf out"
            )
        if self.loss is not None and config.training.linear_cross_entropy:
            raise ConfigurationError(
                "--linear-cross-entropy keeps no logits, which this run's own loss is given; leave "
                "--linear-cross-entropy out"
            )
        if self.loss is not None and config.model.z_loss_strength:
            raise ConfigurationError(
                f"--z-loss-strength {config.model.z_loss_strength:g} is a part of the cross-entropy, in whose place "
                "this run's own loss stands; add z * token.log_normalizer() ** 2 to that, and leave the flag out"
            )
        if makes_graphs(config) and self._uncaptured():
            config = without_graphs(config)
        config = with_own_parameters(config, self.layer_parameters)
        if self.optimizer_traits is not None:
            config = self._with_own_optimizer(config, self.optimizer_traits)
        if problems := [*matrices_are_whole(config, Facts()), *matrices_have_a_rule(config, Facts())]:
            raise ConfigurationError(problems)
        return config

    def _with_own_optimizer(self, config: Config, traits: OptimizerTraits) -> Config:
        """Return the configuration with the optimizer, which is registered."""
        if OPTIMIZERS.get(traits.name, traits) != traits:
            raise ConfigurationError(f"there is an optimizer {traits.name!r} already; give yours another name")
        flag = config.layout.sharding.flag
        if flag is not None and flag not in traits.schemes:
            raise ConfigurationError(
                f"{flag_of(flag)} cannot run {traits.title}: its traits do not name the scheme; leave the flag out, or "
                "add the scheme to `schemes` if the update is element by element"
            )
        OPTIMIZERS[traits.name] = traits
        return replace(config, optimizer=replace(config.optimizer, optimizer=traits.name))

    def warnings(self, typed: Mapping[str, Any]) -> list[str]:
        """Return warnings of typed values, given by field name, that have no effect next to the user's own parts."""
        uncaptured = self._uncaptured() if typed.get("cuda_graph_impl") == FULL_ITERATION else []
        warnings = [graphs_warning(uncaptured)] if uncaptured else []
        traits, decay = self.optimizer_traits, typed.get("weight_decay")
        if traits is not None and not traits.reads_weight_decay and decay:
            warnings.append(f"--weight-decay {decay:g} changes nothing here: {traits.title} has no weight_decay")
        return warnings

    def _uncaptured(self) -> list[str]:
        """Return the own parts that are called within a step's passes, each with why no graph of these is made."""
        parts = {"loss": self.loss, "layer_spec": self.layer_spec}
        return [
            f"{name}= (nobody knows what it does in Python, which a replay leaves out: train without it)"
            for name, part in parts.items()
            if part is not None
        ]

    def own_datasets(self, config: Config, tokenizer: Tokenizer, numbers: Splits[int]) -> Splits[Samples | None] | None:
        """Return the own datasets, one source each; None where there are none."""
        if self.datasets is None:
            return None
        made = self.datasets(config, tokenizer, numbers)
        if not isinstance(made, Splits):
            raise ConfigurationError(
                f"datasets= returned {type(made).__name__}: it must return Splits(train, valid, test) "
                "(megatron_ext.data.corpus), with None for a split that is not read"
            )
        for split in fields(made):
            own = getattr(made, split.name)
            if own is not None and not (hasattr(own, "__len__") and hasattr(own, "__getitem__")):
                raise ConfigurationError(
                    f"datasets= returned {type(own).__name__} as {split.name}: a dataset has __len__ and __getitem__; "
                    "give it both"
                )
        if made.train is None or len(made.train) < numbers.train:
            count = 0 if made.train is None else len(made.train)
            raise ConfigurationError(
                f"the own training dataset has {count} samples, and the run reads {numbers.train}; repeat them (index "
                "modulo their number), or lower --train-iters"
            )
        length = config.model.seq_length
        return Splits(
            *(None if own is None else OwnSamples(own, length) for own in (made.train, made.valid, made.test))
        )


NONE = Extensions()


def extensions_of_script(script: Path, arguments: Sequence[str]) -> Extensions:
    """Return the own parts that a script brings in, which becomes the main program of this process.

    Raises:
        ConfigurationError: it calls neither `start` nor `pretrain`.
    """
    return Extensions(**read_script(script, arguments)[1])


_SAMPLE_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


OWN_IDS = "The dataset is your own (datasets=): return ids below that, or raise --vocab-size"


class OwnSamples:
    """A user's dataset, seen as the samples of one source, each of which has `seq_length` tokens."""

    def __init__(self, dataset: SampleDataset, seq_length: int):
        self._dataset, self._seq_length = dataset, seq_length
        self.sources = [Source(type(dataset).__name__, len(dataset))]
        self.order_depends_on: list[int] = []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a sample.

        Raises:
            DataError: it cannot be made, or is none, or lacks a field, or a field has another shape.
        """
        where = f"sample {index} of the own dataset {type(self._dataset).__name__}"
        try:
            sample = OwnPart("datasets", self._dataset.__getitem__)(index)
        except TrainingError:
            raise
        except Exception as error:
            raise DataError(f"{where}: {text_of_own_error(error) or repr(error)}") from error
        if not isinstance(sample, Mapping):
            raise DataError(
                f"{where} is {type(sample).__name__}: it must be a dict of {', '.join(_SAMPLE_FIELDS)}, each of "
                f"[{self._seq_length}]"
            )
        for name in _SAMPLE_FIELDS:
            if name not in sample:
                raise DataError(f"{where} has no {name}; give it {', '.join(_SAMPLE_FIELDS)}")
            shape = tuple(np.shape(sample[name]))
            if shape != (self._seq_length,):
                raise DataError(
                    f"{where} has {name} of shape {list(shape)}, and --seq-length {self._seq_length} reads "
                    f"[{self._seq_length}]; return that many"
                )
        return sample

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples: all of the first `samples` samples come from the only source."""
        return [samples]

    def window_at(self, index: int) -> SampleWindow:
        """Return where sample `index` lies."""
        return SampleWindow(0, index)

    def part(self, source: int) -> "OwnSamples":
        """Return the dataset itself, which has only one source."""
        return self
