"""Exports the model of a training that has come to its end: --export-hf-at-end FOLDER."""

from collections.abc import Iterator
from pathlib import Path

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.plugins.huggingface.flags import ExportFlags


def problem_of_folder(folder: str) -> str | None:
    """Return why an export cannot be written there, or None."""
    path = Path(folder)
    if (path.is_dir() and not any(path.iterdir())) or not path.exists():
        return None
    return f"--export-hf-at-end {folder} exists and is not an empty folder; give a new one, or move it away"


def model_can_be_exported(config: Config, facts: Facts) -> Iterator[str]:
    """Require a model that a family of Hugging Face has, where it is to be exported at the end."""
    folder = flags_of(config.checkpoint, ExportFlags).export_hf_at_end
    if folder is None:
        return
    from megatron_ext.plugins.families.registry import has_a_shape, written_as  # with every family

    if not has_a_shape(config):  # of which another rule speaks
        return
    try:
        written_as(config)
    except ConfigurationError as error:
        yield f"--export-hf-at-end {folder}: {error}; or leave --export-hf-at-end out"


def export(config: Config) -> None:
    """Export the last checkpoint of --save, where the flags ask for it.

    Raises:
        StorageError: the folder cannot be written; the checkpoint is whole.
    """
    folder = flags_of(config.checkpoint, ExportFlags).export_hf_at_end
    if folder is None or config.checkpoint.save is None or config.training.skip_train:
        return
    from megatron_ext.plugins.huggingface.commands.convert_checkpoint import to_huggingface
    from megatron_ext.plugins.huggingface.saved_model import SavedModel

    try:
        to_huggingface(SavedModel(config.checkpoint.save), folder)
    except OSError as error:
        raise StorageError(
            f"the model is trained and saved, but --export-hf-at-end {folder} cannot be written: {error}. Free space, "
            f"then: megatron-ext convert to-hf --load {config.checkpoint.save} --save {folder}"
        ) from error


ENDINGS = (export,)
