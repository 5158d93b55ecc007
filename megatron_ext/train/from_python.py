"""The function `megatron_ext.pretrain`: a training from a script of one's own, a Python prompt or a notebook."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron_ext.config.derived.optimizer_traits import OptimizerTraits
from megatron_ext.config.parse.settings import Settings, words_of
from megatron_ext.errors import ConfigurationError
from megatron_ext.optim.curves import Schedule
from megatron_ext.parts.own_parameters import OwnParameters
from megatron_ext.train import pretrain as training
from megatron_ext.train.extensions import Extensions, LayerSpec, Loss, MakeDatasets, OptimizerClass
from megatron_ext.train.training_result import Trained

if TYPE_CHECKING:
    from megatron_ext.train.trainer import Callback


def pretrain(
    settings: Settings = None,
    /,
    *,
    callbacks: Sequence["Callback | Any"] = (),
    datasets: MakeDatasets | None = None,
    loss: Loss | None = None,
    layer_spec: LayerSpec | None = None,
    layer_parameters: OwnParameters | None = None,
    optimizer: "OptimizerTraits | OptimizerClass | str | None" = None,
    learning_rate: Schedule | None = None,
    families: Sequence[Any] = (),
    returns_model: bool = True,
    **flags: Any,
) -> Trained:
    """Train a GPT model in this process, and return the model and the history of the run.

        trained = pretrain(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128, mock_data=True, ...)
        trained.losses[-1], trained.model, trained.save

    Settings are the flags of `megatron-ext pretrain` without their hyphens: `num_layers=4` is `--num-layers 4`,
    `bf16=True` is `--bf16`, and a list stands for several values. `config="run.yaml"` reads a file of settings. The
    process is left as it was found, so that `pretrain` can be called again. Under torchrun every rank calls it.

    Args:
        settings: a dict of settings by the flags' names, or flags as on a command line (a list of words, or a text).
        callbacks: objects that hear of each step, or functions that make one (`megatron_ext.train.trainer.Callback`).
        datasets: makes the datasets of the run, in place of those that the settings name.
        loss: returns the loss of every token, in place of the cross-entropy.
        layer_spec: changes the spec of each layer.
        layer_parameters: names the parameters that a layer then has besides the standard ones.
        optimizer: the name of an optimizer, as --optimizer takes it; or a class derived from torch.optim.Optimizer, or
            `functools.partial` of one with its arguments; or traits.
        learning_rate: changes the learning rate of each step.
        families: families of Hugging Face models beyond the program's (docs/python.md has an example), for `load_hf`,
            `hf_model_type` and `export_hf_at_end`; one with the model type of another takes its place.
        returns_model: whether the result has the model, which is freed otherwise.
        flags: settings as keywords, which win over `settings`.
    Returns:
        The losses, the history of the metrics, the folder of the checkpoints, and the model.
    Raises:
        ConfigurationError: the settings cannot work; the text names every problem, with a setting that works.
        TrainingError: something ended the run before its planned end (`megatron_ext.errors` has a class for each case).
    """
    if isinstance(learning_rate, int | float):
        raise ConfigurationError(
            f"learning_rate={learning_rate} is a number: lr={learning_rate} sets the rate; learning_rate= takes a "
            "function of the samples so far and the rate of the settings"
        )
    named, own = (optimizer, None) if isinstance(optimizer, str) else (None, optimizer)
    words = words_of(
        settings,
        flags if named is None else {**flags, "optimizer": named},
        objects=[part.name for part in fields(Extensions)],
    )
    if "--dry-run" in words:
        raise ConfigurationError(
            "--dry-run trains nothing: use megatron_ext.plan(evaluate=True, world_size=8, ...) for the memory and time "
            "of a layout, or `megatron-ext pretrain --dry-run` in a shell"
        )
    return training.pretrain(
        words,
        callbacks=callbacks,
        datasets=datasets,
        loss=loss,
        layer_spec=layer_spec,
        layer_parameters=layer_parameters,
        optimizer=own,
        learning_rate=learning_rate,
        families=families,
        returns_model=returns_model,
    )
