"""--data-order formula: every sample once an epoch, exact blends, the same at any layout, from any position."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_ext.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.formula_order import FormulaDataset, FormulaSource
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import share_of
from megatron_ext.data.loader import BatchLoader
from megatron_ext.data.mask import BEGINS, COUNTS, Mask, header, mask_path
from megatron_ext.data.splits import split_bounds, split_files
from megatron_ext.errors import DataError
from megatron_ext.tokenizer.simple import ByteTokenizer

SEQ = 8


def test_shares_of_a_split_are_megatron_cores():
    for split in ("969,30,1", "80,15,5", "1", "1,1,1", "99.5,0.5,0", "7,0,3", "0.1,0.2,0.7"):
        assert split_bounds(split) == convert_split_vector_to_split_matrix(parse_and_normalize_split(split)), split


def test_a_weight_of_the_only_files_of_a_split_is_left_out():
    """As in megatron-core, where it would change the number of epochs."""
    data = DataConfig(train_data_path=("3", "a"), valid_data_path=("3", "a", "1", "b"), test_data_path=("a",))
    config = Config(data=data)
    files = [split_files(config, split) for split in ("train", "valid", "test")]
    assert [one and (one.flag, one.blend.prefixes, one.blend.weights) for one in files] == [
        ("--train-data-path", ("a",), None),
        ("--valid-data-path", ("a", "b"), (3.0, 1.0)),
        ("--test-data-path", ("a",), None),
    ]


def write(prefix: Path, first: int, documents: int, seed: int = 0, dtype: Any = np.uint16) -> list[list[int]]:
    """Documents of 0 to 30 tokens, of ascending numbers from `first`, so that each token says where it lies."""
    lengths = np.random.default_rng(seed).integers(0, 31, documents)
    tokens = np.arange(first, first + lengths.sum(), dtype=dtype)
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_tokens(tokens.tobytes(), lengths)
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


class Numbers(ByteTokenizer):
    vocab_size = 65536


def build(tmp_path: Path, train: int, valid: int = 1, seed: int = 7, **data: Any) -> Splits[Any]:
    config = Config(
        model=ModelConfig(seq_length=SEQ),
        training=TrainingConfig(seed=seed),
        data=DataConfig(data_order="formula", data_cache_path=str(tmp_path / "cache"), **data),
    )
    return build_datasets(config, Numbers(), Splits(train, valid, 0))


def windows(documents: list[list[int]]) -> list[list[int]]:
    """Samples of a stream of documents, as megatron-core cuts it."""
    stream = [token for document in documents for token in document]
    return [stream[at : at + SEQ + 1] for at in range(0, len(stream) - SEQ, SEQ)]


def texts(dataset: Any, indices: Sequence[int]) -> list[list[int]]:
    samples = [dataset[index] for index in indices]
    assert all(sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist() for sample in samples)
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in samples]


def test_each_epoch_has_every_window_once_in_an_order_of_its_own(tmp_path: Path):
    documents = [document for document in write(tmp_path / "a", 0, 60) if document]
    datasets = build(tmp_path, train=10**9, data_path=(str(tmp_path / "a"),), split="80,20,0")
    held_back = round(0.8 * len(documents))
    expected = windows(documents[:held_back])
    size = len(expected)
    epochs = [texts(datasets.train, range(epoch * size, (epoch + 1) * size)) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == expected
    assert len({str(order) for order in [expected, *epochs]}) == 4
    assert datasets.train.sources[0].samples_per_epoch == size
    assert sorted(texts(datasets.valid, range(len(datasets.valid)))) == windows(documents[held_back:])
    assert not (tmp_path / "cache").exists()
    # Another seed is another order of the same samples.
    other = build(tmp_path, train=size, seed=8, data_path=(str(tmp_path / "a"),), split="80,20,0").train
    assert sorted(texts(other, range(size))) == expected
    assert texts(other, range(size)) != epochs[0]
    # 10^9 samples ahead is as near as the next one.
    assert texts(datasets.train, [10**9 - 1])[0] in expected
    for outside in (10**9, -1):
        with pytest.raises(IndexError, match=str(outside)):
            datasets.train[outside]
    assert {name: values.dtype for name, values in datasets.train[0].items()} == {
        "tokens": np.int64,
        "labels": np.int64,
        "loss_mask": np.float32,
        "position_ids": np.int64,
    }


def test_tokens_of_four_bytes(tmp_path: Path):
    """Of a vocabulary above 65,536, in the second split: places in the file are bytes."""
    documents = [document for document in write(tmp_path / "a", 60_000, 60, dtype=np.int32) if document]
    valid = build(tmp_path, train=1, data_path=(str(tmp_path / "a"),), split="80,20,0").valid
    assert sorted(texts(valid, range(len(valid)))) == windows(documents[round(0.8 * len(documents)) :])


def test_documents_that_were_packed_are_windows(tmp_path: Path):
    """Of one length, to the last one; the label of its last token belongs to another document, and never counts."""
    prefix, tokens = tmp_path / "a", np.arange(100, 100 + 3 * SEQ, dtype=np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(tokens.tobytes(), np.array([SEQ] * 3))
    mask_path(prefix).write_bytes(header(SEQ) + bytes([COUNTS | BEGINS] * len(tokens)))
    mask = Mask(str(prefix), len(tokens))
    source = FormulaSource(str(prefix), share_of(str(prefix), (0.0, 1.0)), SEQ, b"key", mask)
    assert source.windows == 3
    for number in range(3):
        window, flags = source.window(number), source.flags(number)
        assert window.tolist() == [*tokens[number * SEQ : (number + 1) * SEQ].tolist(), 0]
        assert flags.tolist() == [COUNTS | BEGINS] * SEQ + [0]
        assert (window.dtype, flags.dtype) == (np.int64, np.int64)


def test_blends_and_passes(tmp_path: Path):
    sources = {name: windows(write(tmp_path / name, first, 60, first)) for name, first in (("a", 0), ("b", 20000))}
    a, b = (str(tmp_path / name) for name in sources)
    dataset = build(tmp_path, train=1000, valid=0, train_data_path=("1", a, "3", b)).train
    for name, windows_of, share in (("a", sources["a"], 250), ("b", sources["b"], 750)):
        taken = [text for text in texts(dataset, range(1000)) if text in windows_of]
        assert len(taken) == share
        epochs, rest = divmod(share, len(windows_of))
        assert Counter(Counter(map(str, taken)).values()) == Counter(
            {epochs + 1: rest, epochs: len(windows_of) - rest} if rest else {epochs: len(windows_of)}
        ), name
    assert dataset.counts(1000) == [250, 750]
    # Without weights all are read in proportion, and a pass over the validation data takes each window once.
    datasets = build(tmp_path, train=10, train_data_path=(a, b), valid_data_path=("0.9", a, "0.1", b))
    assert sorted(texts(datasets.valid, range(len(datasets.valid)))) == sources["a"] + sources["b"]
    size = len(sources["a"]) + len(sources["b"])
    endless = build(tmp_path, train=3 * size, valid=0, train_data_path=(a, b)).train
    assert sorted(texts(endless, range(size, 2 * size))) == sources["a"] + sources["b"]
    part = datasets.valid.part(1)
    assert sorted(texts(part, range(len(part)))) == sources["b"]


def test_every_layout_and_every_start_reads_the_same_samples(tmp_path: Path):
    write(tmp_path / "a", 0, 60)
    write(tmp_path / "b", 20000, 60, 1)
    paths = ("0.3", str(tmp_path / "a"), "0.7", str(tmp_path / "b"))

    def read(dp_size: int, micro: int, first: int, end: int, workers: int) -> list[list[int]]:
        dataset = build(tmp_path, train=480, valid=0, train_data_path=paths).train
        loaders = [
            BatchLoader(
                dataset,
                vocab_size=65536,
                seq_length=SEQ,
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=dp_size,
                num_workers=workers,
            )
            for rank in range(dp_size)
        ]
        samples = []
        for consumed in range(first, end, 24):
            batches = [loader.global_batch(consumed, 24 // micro // dp_size) for loader in loaders]
            for microbatch in zip(*batches, strict=True):
                for batch in microbatch:
                    samples += batch.tokens.tolist()
        for loader in loaders:
            loader.close()
        return samples

    whole = read(1, 1, 0, 480, workers=0)
    assert len(whole) == 480
    assert whole == read(2, 3, 0, 480, workers=2)
    assert whole == read(1, 4, 0, 240, workers=0) + read(4, 2, 240, 480, workers=1)


def test_end_of_document_mask(tmp_path: Path):
    write(tmp_path / "a", 240, 20)
    dataset = build(tmp_path, train=100, valid=0, train_data_path=(str(tmp_path / "a"),), eod_mask_loss=True).train
    masks = [dataset[index]["loss_mask"].tolist() for index in range(100)]
    assert masks == [[float(token != 256) for token in dataset[index]["tokens"]] for index in range(100)]
    assert any(0.0 in mask for mask in masks)
    part = dataset.part(0)  # as an evaluation reads the sources, one after another
    assert [part[index]["loss_mask"].tolist() for index in range(100)] == masks


def test_both_masks_are_heeded(tmp_path: Path):
    """A token counts where its label is trained on, and is no end of a document that --eod-mask-loss leaves out."""
    prefix, tokens = tmp_path / "a", np.arange(100, 100 + SEQ + 1, dtype=np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(tokens.tobytes(), np.array([len(tokens)]))
    mask_path(prefix).write_bytes(header(0) + bytes([0, 0, COUNTS, COUNTS, COUNTS, 0, COUNTS, COUNTS, COUNTS]))
    source = FormulaSource(str(prefix), share_of(str(prefix), (0.0, 1.0)), SEQ, b"key", Mask(str(prefix), len(tokens)))
    dataset = FormulaDataset([source], None, None, eod=102)
    assert dataset[0]["loss_mask"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_sources_of_one_size_have_orders_of_their_own(tmp_path: Path):
    paths = tuple(str(tmp_path / name) for name in ("a", "b"))
    for number, path in enumerate(paths):
        write(Path(path), 20_000 * number, 60)
    dataset = build(tmp_path, train=60, valid=0, train_data_path=("1", paths[0], "1", paths[1])).train
    places = [dataset.window_at(index) for index in range(60)]
    orders = [[place.number for place in places if place.source == source] for source in (0, 1)]
    assert len(orders[0]) == len(orders[1]) == 30
    assert orders[0] != orders[1]


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path):
    write(tmp_path / "a", 0, 20)
    dataset = build(tmp_path, train=100, valid=0, train_data_path=(str(tmp_path / "a"),)).train
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"a\.bin ends before byte \d+: it was truncated during the run"):
        texts(dataset, range(30))
