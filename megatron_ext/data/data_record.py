"""The record of the data that a run reads: saved in checkpoints as data.json, compared on resume. Torch-free."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.data.integrity import pair_fingerprint
from megatron_ext.data.samples import Samples
from megatron_ext.data.splits import SPLITS, split_files
from megatron_ext.untrusted.text import load_json, read_file

_LARGEST = 1 << 26  # bytes
_FLAGS = {"data_order": "--data-order", "seed": "--seed", "seq_length": "--seq-length", "split": "--split"}


def data_record(config: Config, train: Samples, num_samples: int) -> dict[str, Any] | None:
    """Return the flags, files and numbers that determine the order and content of the samples; None for --mock-data.

    Args:
        config: the run's configuration.
        train: the run's training data.
        num_samples: number of samples that the order was made for.
    """
    if config.data.mock_data:
        return None
    return {
        "data_order": config.data.data_order,
        "seed": config.training.seed,
        "seq_length": config.model.seq_length,
        "split": config.data.split if config.data.data_path else None,
        "num_samples": num_samples,
        "order_depends_on": train.order_depends_on,
        "files": {split: _files(config, split) for split in SPLITS},
    }


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's record; None where it has none that can be read, for instance one of another version."""
    try:
        record = load_json(read_file(path, _LARGEST))
        return record if isinstance(record["num_samples"], int) and isinstance(record["files"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return why a run on `now` would not go on through the samples of a run on `saved`, in words; empty where it
    would."""
    texts = [
        f"{flag} is {now[name]}, not {saved.get(name)}" for name, flag in _FLAGS.items() if now[name] != saved.get(name)
    ]
    for split in SPLITS:
        texts += _different_files(split, saved["files"].get(split, []), now["files"][split])
    if not texts and saved.get("order_depends_on") != now["order_depends_on"]:
        texts.append(
            f"--data-order shuffled shuffles all epochs together, and the run now takes {now['num_samples']} samples "
            f"instead of {saved['num_samples']}"
        )
    return texts


def _files(config: Config, split: str) -> list[dict[str, Any]]:
    files = split_files(config, split)
    if files is None:
        return []
    prefixes, weights = files.blend.prefixes, files.blend.weights or [None] * len(files.blend.prefixes)
    suffixes = (".idx", ".bin", ".mask") if config.data.assistant_only_loss else (".idx", ".bin")
    return [
        {
            "prefix": prefix,
            "weight": weight,
            **{suffix: pair_fingerprint(prefix, suffix) for suffix in suffixes},
        }
        for prefix, weight in zip(prefixes, weights, strict=True)
    ]


def _different_files(split: str, saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    texts = []
    for was, is_ in itertools.zip_longest(saved, now):
        if was is None or is_ is None or was["prefix"] != is_["prefix"]:
            # The same files may have moved. Other validation data changes no sample of the training.
            same = was and is_ and all(was[suffix] == is_[suffix] for suffix in (".idx", ".bin"))
            if split == "train" and not same:
                names = [entry["prefix"] if entry else "nothing" for entry in (is_, was)]
                texts.append(f"the training data has {names[0]} where it had {names[1]}")
        else:
            # Whether the mask is read is a flag, which may change.
            suffixes = [suffix for suffix in (".idx", ".bin", ".mask") if suffix in was and suffix in is_]
            texts += [f"{is_['prefix']}{suffix} has other content" for suffix in suffixes if was[suffix] != is_[suffix]]
        if was and is_ and split == "train" and was["weight"] != is_["weight"]:
            texts.append(f"the weight of {is_['prefix']} is {is_['weight']}, not {was['weight']}")
    return texts
