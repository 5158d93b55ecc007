"""The preparation of data at its boundaries: files of exactly one sample, documents of no tokens, far epochs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset

from megatron_ext.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.formula import FormulaSource
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import share_of
from megatron_ext.data.samples import BySource
from megatron_ext.data.shuffled import ShuffledDataset
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.byte import ByteTokenizer

SEQ = 7


def _write(prefix: Path, lengths: list[int]) -> str:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(np.arange(sum(lengths), dtype=np.uint16).tobytes(), np.array(lengths))
    return str(prefix)


def _train(tmp_path: Path, prefix: str, number: int = 1) -> Splits:
    data = DataConfig(data_order="formula", train_data_path=(prefix,), valid_data_path=(prefix,))
    config = Config(model=ModelConfig(seq_length=SEQ), training=TrainingConfig(seed=3), data=data)
    return build_datasets(config, ByteTokenizer(), Splits(number, number, 0))


@pytest.mark.parametrize("tokens", range(SEQ - 1, 3 * SEQ + 3))
def test_a_file_gives_as_many_samples_as_it_has_whole_ones(tmp_path: Path, tokens: int):
    prefix = _write(tmp_path / "a", [2, 0, tokens - 2, 0])
    if tokens < SEQ + 1:
        with pytest.raises(ConfigurationError, match=f"with {tokens} tokens, but one sample takes {SEQ + 1}"):
            _train(tmp_path, prefix)
        return
    valid = _train(tmp_path, prefix).valid
    assert valid is not None
    whole = [list(range(at, at + SEQ)) for at in range(0, tokens - SEQ, SEQ)]
    assert sorted(valid[index]["tokens"].tolist() for index in range(len(valid))) == whole


def test_orders_of_epochs_and_of_splits_differ(tmp_path: Path):
    prefix = _write(tmp_path / "a", [5, 0, 30 * SEQ - 4])
    source = FormulaSource(prefix, share_of(prefix, (0.0, 1.0)), SEQ, b"key")
    orders = [tuple(source.number_at(epoch * 30 + at) - epoch * 30 for at in range(30)) for epoch in range(12)]
    assert len(set(orders)) == 12
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(30))}
    both = _train(tmp_path, prefix, 30)
    assert both.train is not None
    assert both.valid is not None
    assert [both.train.place(at).number for at in range(30)] != [both.valid.place(at).number for at in range(30)]


def test_a_held_out_sample_is_named_by_its_place_in_its_source(tmp_path: Path):
    paths = (_write(tmp_path / "a", [3 * SEQ + 1]), _write(tmp_path / "b", [5 * SEQ + 1]))
    data = DataConfig(data_order="formula", train_data_path=paths, valid_data_path=paths)
    config = Config(model=ModelConfig(seq_length=SEQ), training=TrainingConfig(seed=3), data=data)
    valid = build_datasets(config, ByteTokenizer(), Splits(0, 1, 0)).valid
    assert valid is not None
    held_out = BySource(valid, [2, 4])
    assert [held_out.describe(index).split(f" of {tmp_path}/") for index in (0, 1, 2, 5)] == [
        ["held-out sample 0", "a.bin"],
        ["held-out sample 1", "a.bin"],
        ["held-out sample 0", "b.bin"],
        ["held-out sample 3", "b.bin"],
    ]


def test_counts_of_fewer_samples_than_before_begin_anew() -> None:
    """As of an evaluation, for which all samples are counted and then those that it reads."""
    blend: Any = object.__new__(BlendedDataset)
    blend.dataset_index = np.array([0, 2, 2, 1, 2, 0])
    shuffled: Any = object.__new__(ShuffledDataset)
    shuffled._dataset, shuffled.sources, shuffled._counted = blend, ["a", "b", "c"], (0, np.zeros(3, np.int64))
    assert [shuffled.counts(samples) for samples in (6, 3, 4, 0)] == [[2, 1, 3], [1, 0, 2], [1, 1, 2], [0, 0, 0]]
