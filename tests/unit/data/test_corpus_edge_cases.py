"""The preparation of data at its boundaries: files of exactly one sample, documents of no tokens, far epochs."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_dataset import BlendedDataset

from megatron_ext.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.data_record import data_record, differences
from megatron_ext.data.formula_order import FormulaSource
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import file_fingerprint, share_of
from megatron_ext.data.samples import BySource
from megatron_ext.data.shuffled_order import ShuffledDataset
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.simple import ByteTokenizer

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
    numbers = [[samples.window_at(at).number for at in range(30)] for samples in (both.train, both.valid)]
    assert numbers[0] != numbers[1]


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


@pytest.mark.parametrize(
    ("epochs", "samples", "expected"),
    [
        ([1], 30, []),
        ([1, 1], 30, []),
        ([3], 30, [30, 3]),
        ([1, 3], 30, [30, 1, 3]),
        ([3, 1], 30, [30, 3, 1]),
        ([1, 3], None, []),
    ],
)
def test_an_order_of_several_epochs_depends_on_how_many_samples_are_taken(
    epochs: list[int], samples: int | None, expected: list[int]
) -> None:
    """Of any source; a pass over held-out data has one epoch of each."""
    parts = [SimpleNamespace(document_index=np.zeros(7 * count), indices=np.zeros(7)) for count in epochs]
    shuffled: Any = object.__new__(ShuffledDataset)
    shuffled._dataset = parts[0]
    if len(parts) > 1:
        blend: Any = object.__new__(BlendedDataset)
        blend.datasets = parts
        shuffled._dataset = blend
    shuffled._num_samples = samples
    assert shuffled.order_depends_on == expected


def _numbered(dataset: Any) -> list[tuple[int, int]]:
    return [(place.source, place.number) for place in map(dataset.window_at, range(len(dataset)))]


def test_a_place_of_the_shuffled_order_is_where_its_tokens_are(tmp_path: Path) -> None:
    """In the documents of a source in their shuffled order; of two sources each of its own."""
    paths = (_write(tmp_path / "a", [9] * 8), _write(tmp_path / "b", [11] * 9))
    data = DataConfig(data_order="shuffled", train_data_path=("0.3", paths[0], "0.7", paths[1]))
    data = dataclasses.replace(data, data_cache_path=str(tmp_path / "cache"))
    config = Config(model=ModelConfig(seq_length=SEQ), training=TrainingConfig(seed=3), data=data)
    train: Any = build_datasets(config, ByteTokenizer(), Splits(40, 0, 0)).train
    for index in range(40):
        place = train.window_at(index)
        part = train._parts[place.source]
        length = (9, 11)[place.source]
        stream = [
            token for document in part.document_index for token in range(document * length, length * document + length)
        ]
        first = SEQ * place.number
        assert train[index]["tokens"].tolist() == stream[first : first + SEQ]
    assert train.counts(40) == [sum(source == number for source, _ in _numbered(train)[:40]) for number in (0, 1)]
    assert [source.samples_per_epoch for source in train.sources] == [72 / SEQ, 99 / SEQ]


def _record(**changes: Any) -> dict[str, Any]:
    """What a checkpoint has of its data; `train` and `valid` are lists of files."""
    files = {"train": changes.pop("train", [_file("a")]), "valid": changes.pop("valid", [_file("v")]), "test": []}
    order = {"data_order": "shuffled", "seed": 1, "seq_length": 8, "split": "9,1,0", "order_depends_on": []}
    return {**order, "num_samples": 100, "files": files, **changes}


def _file(prefix: str, weight: Any = None, **content: str) -> dict[str, Any]:
    return {"prefix": prefix, "weight": weight, ".idx": "1", ".bin": "2", **content}


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        (_record(), _record(), []),
        (_record(), _record(data_order="formula"), ["--data-order is formula, not shuffled"]),
        (_record(), _record(seed=2), ["--seed is 2, not 1"]),
        (_record(), _record(seq_length=16), ["--seq-length is 16, not 8"]),
        (_record(), _record(split=None), ["--split is None, not 9,1,0"]),
        (
            _record(order_depends_on=[100, 2]),
            _record(order_depends_on=[130, 3], num_samples=130),
            ["--data-order shuffled shuffles all epochs together, and the run now takes 130 samples instead of 100"],
        ),
        (_record(order_depends_on=[100, 2]), _record(order_depends_on=[], seed=5), ["--seed is 5, not 1"]),
        (_record(), _record(num_samples=130), []),
        (_record(), _record(train=[_file("moved")]), []),
        (_record(), _record(train=[_file("a"), _file("b")]), ["the training data has b where it had nothing"]),
        (
            _record(train=[_file("a"), _file("b")]),
            _record(),
            ["the training data has nothing where it had b"],
        ),
        (_record(valid=[]), _record(), []),
        (_record(valid=[_file("v", 1.0)]), _record(valid=[_file("v", 2.0)]), []),
        (_record(train=[_file("a", 1.0)]), _record(train=[_file("a", 2.0)]), ["the weight of a is 2.0, not 1.0"]),
        (_record(train=[_file("a", 1.0)]), _record(train=[_file("b", 2.0)]), ["the weight of b is 2.0, not 1.0"]),
        (_record(), _record(train=[_file("b", **{".idx": "3"})]), ["the training data has b where it had a"]),
        (_record(), _record(train=[_file("b", **{".bin": "3"})]), ["the training data has b where it had a"]),
        (_record(), _record(train=[_file("a", **{".mask": "3"})]), []),
        (_record(train=[_file("a", **{".mask": "3"})]), _record(), []),
        (
            _record(train=[_file("a", **{".mask": "3"})]),
            _record(train=[_file("a", **{".mask": "4"})]),
            ["a.mask has other content"],
        ),
        (_record(valid=[_file("v", **{".bin": "3"})]), _record(), ["v.bin has other content"]),
        (_record(valid=[_file("v", **{".idx": "3"})]), _record(), ["v.idx has other content"]),
        (_record(valid=[_file("w", **{".bin": "3"})]), _record(), []),
    ],
)
def test_differences_from_the_data_of_a_checkpoint_are_named(
    saved: dict[str, Any], now: dict[str, Any], expected: list[str]
) -> None:
    assert differences(saved, now) == expected


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("blended", [False, True])
def test_the_record_of_a_run(tmp_path: Path, masked: bool, blended: bool) -> None:
    """--split belongs to --data-path; a mask to --assistant-only-loss; weights to a blend."""
    prefixes = [str(tmp_path / name) for name in ("a", "b")]
    for number, prefix in enumerate(prefixes):
        with IndexedWriter(prefix, np.uint16, packed_to=0) as writer:
            writer.add_tokens(np.full(20, number, np.uint16).tobytes(), [20], np.ones(20, np.uint8))
    path = ("0.25", prefixes[0], "0.75", prefixes[1]) if blended else (prefixes[0],)
    flags: dict[str, Any] = {"data_path" if blended else "train_data_path": path, "split": "5,5,0"}
    data = DataConfig(data_order="formula", assistant_only_loss=masked, **flags)
    config = Config(model=ModelConfig(seq_length=SEQ), training=TrainingConfig(seed=3), data=data)
    train: Any = SimpleNamespace(order_depends_on=[5, 2])
    suffixes = (".idx", ".bin", ".mask") if masked else (".idx", ".bin")
    files = [
        {"prefix": prefix, "weight": weight, **{suffix: file_fingerprint(prefix + suffix) for suffix in suffixes}}
        for prefix, weight in zip(prefixes, (0.25, 0.75) if blended else (None,), strict=False)
    ]
    assert data_record(config, train, 77) == {
        "data_order": "formula",
        "seed": 3,
        "seq_length": SEQ,
        "split": "5,5,0" if blended else None,
        "num_samples": 77,
        "order_depends_on": [5, 2],
        "files": {"train": files, "valid": files if blended else [], "test": []},
    }
    mock = dataclasses.replace(config, data=DataConfig(mock_data=True))
    assert data_record(mock, train, 77) is None


def _masked(prefix: Path, documents: int, packed_to: int) -> str:
    with IndexedWriter(prefix, np.uint16, packed_to=packed_to) as writer:
        tokens = np.arange(documents * SEQ, dtype=np.uint16)
        writer.add_tokens(tokens.tobytes(), [SEQ] * documents, np.ones(documents * SEQ, np.uint8))
    return str(prefix)


@pytest.mark.parametrize(
    ("packed", "order", "more"),
    [
        ((SEQ, SEQ), "formula", ""),
        ((SEQ, 0), "formula", " + 1"),
        ((0, SEQ), "formula", " + 1"),
        ((0, 0), "formula", " + 1"),
        ((SEQ, SEQ), "shuffled", " + 1"),
    ],
)
def test_a_sample_of_packed_data_needs_no_token_for_its_last_label(
    tmp_path: Path, packed: tuple[int, int], order: str, more: str
) -> None:
    """Only where all of it is packed, and in the order by formula, a sample needs no token for its last label."""
    paths = [_masked(tmp_path / f"{number}", 1, length) for number, length in enumerate(packed)]
    flags: Any = {"train_data_path": ("1", paths[0], "1", paths[1]), "assistant_only_loss": True, "data_order": order}
    config = Config(model=ModelConfig(seq_length=SEQ), data=DataConfig(**flags))
    if not more:
        small: Any = {"data_path": paths[:1], "split": "1,9,0", "assistant_only_loss": True, "data_order": order}
        with pytest.raises(
            ConfigurationError, match=re.escape(f"but one sample takes {SEQ} (--seq-length): give more")
        ):
            build_datasets(dataclasses.replace(config, data=DataConfig(**small)), ByteTokenizer(), Splits(4, 0, 0))
        assert len(build_datasets(config, ByteTokenizer(), Splits(4, 0, 0)).train or ()) == 4
        return
    needed = f"but one sample takes {SEQ + 1} (--seq-length + 1)"
    with pytest.raises(ConfigurationError, match=re.escape(needed)):
        build_datasets(config, ByteTokenizer(), Splits(4, 0, 0))


def test_the_file_with_too_little_is_named(tmp_path: Path) -> None:
    sizes = {"large": [50], "small": [3, 2], "middle": [20]}
    paths = [_write(tmp_path / name, lengths) for name, lengths in sizes.items()]
    blend = tuple(word for path in paths for word in ("1", path))
    data = DataConfig(data_order="formula", train_data_path=blend)
    config = Config(model=ModelConfig(seq_length=SEQ), data=data)
    expected = f"--train-data-path {paths[1]} gives train 2 sequences with 5 tokens, but one sample takes {SEQ + 1}"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(expected)}"):
        build_datasets(config, ByteTokenizer(), Splits(4, 0, 0))


@pytest.mark.parametrize(("samples", "enough"), [(11, True), (12, True), (13, False)])
def test_a_pass_without_weights_is_as_long_as_it_is(tmp_path: Path, samples: int, enough: bool) -> None:
    paths = tuple(_write(tmp_path / name, [6 * SEQ + 1]) for name in ("a", "b"))
    data = DataConfig(data_order="shuffled", train_data_path=paths, data_cache_path=str(tmp_path / "cache"))
    config = Config(model=ModelConfig(seq_length=SEQ), data=data)
    if enough:
        assert build_datasets(config, ByteTokenizer(), Splits(samples, 0, 0)).train is not None
        return
    with pytest.raises(ConfigurationError, match="one pass over 2 sources, 12 samples, but the run takes 13"):
        build_datasets(config, ByteTokenizer(), Splits(samples, 0, 0))


def test_a_test_without_tokens_can_be_left_out(tmp_path: Path) -> None:
    """As Megatron-LM's scripts divide a few documents; a smaller --seq-length would not help."""
    data = DataConfig(data_path=(_write(tmp_path / "few", [4] * 60),), split="949,50,1")
    config = Config(model=ModelConfig(seq_length=SEQ), data=data)
    left_out = (
        "leave the test out with --split 950,50,0, or --train-data-path and --valid-data-path instead of --data-path"
    )
    with pytest.raises(
        ConfigurationError, match=rf"gives test .*: give more data, {re.escape(left_out)} with --split 9\S+$"
    ):
        build_datasets(config, ByteTokenizer(), Splits(4, 1, 1))
