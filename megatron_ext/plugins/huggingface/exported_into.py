"""Exports a checkpoint into a copy of a model that has a text model inside of it: text is what was trained, and what
reads images stays as it was, byte for byte."""

import shutil
from dataclasses import replace
from pathlib import Path

from megatron_ext.checkpoint.native.extra_files import HUGGINGFACE_FILES
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.hf_config import differences, quantization
from megatron_ext.plugins.families.state_dict_mapping import copies, state_dict_mapping
from megatron_ext.plugins.families.unread import tied_head
from megatron_ext.plugins.huggingface.exporter import Exported, exported, new_folder, write_tensors
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder, safe_file, table_of
from megatron_ext.plugins.huggingface.saved_model import SavedModel


def export_into(source: SavedModel, destination: str | Path, whole: str | Path) -> Exported:
    """Write the folder `destination` as a copy of `whole` whose text model is the checkpoint's; all other bytes stay.

    Args:
        whole: folder of a model that has a text model inside of it, or of a text model; its files are copied, not
            folders in it.
    Raises:
        ConfigurationError: the text model of `whole` is another one than the checkpoint's or quantized, or the
            destination is not empty.
        DataError: the checkpoint is damaged, or the tensors of `whole` are not those that its `config.json` describes.
        OSError: the destination cannot be written.
    """
    target = HFFolder(whole)
    config = source.written[1] if target.values.get("mtp_num_layers") is None else source.config
    problems = [*differences(config, target.values)]
    if quantization(whole) is not None:
        problems.append("its weights are quantized, and none can be written in their place: give a copy in 16 bits")
    if problems:
        raise ConfigurationError(
            f"--into {whole}: its text model is another one than the checkpoint's: " + "; ".join(problems)
        )
    source.check()
    with new_folder(Path(destination)) as unfinished:
        for path in sorted(Path(whole).iterdir()):
            if path.is_file():
                shutil.copyfile(safe_file(Path(whole), path.name), unfinished / path.name)
        folder = HFFolder(unfinished)
        folder.check(config)
        repeated = copies(config, folder.family)
        if (head := tied_head(config, folder.family)) is not None:
            repeated[head] = table_of(folder.family)
        repeated = {copy: original for copy, original in repeated.items() if copy in folder.entries}
        write_tensors(source, state_dict_mapping(config, folder.family), folder.entries, repeated)
    entries = {name: replace(entry, path=Path(destination) / entry.path.name) for name, entry in folder.entries.items()}
    return exported(
        Path(destination),
        folder.family,
        entries,
        [one for one in HUGGINGFACE_FILES if (Path(destination) / one).exists()],
    )
