from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_ext.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.loader import BatchLoader
from megatron_ext.data.samples import describe_sample
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.tokenizer.simple import ByteTokenizer

SEQ = 8


def write(prefix: Path, first: int, documents: int, length: int = 20) -> str:
    """Documents of `length` tokens, `first`, `first` + 1, ... in each; the last token is the end of document."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(documents):
            document = [first + number] * (length - 1) + [256]
            writer.add_tokens(np.array(document, np.uint16).tobytes(), [length])
    return str(prefix)


def config(tmp_path: Path, **data: Any) -> Config:
    data.setdefault("data_cache_path", str(tmp_path / "cache"))
    return Config(model=ModelConfig(seq_length=SEQ), training=TrainingConfig(seed=7), data=DataConfig(**data))


def build(configuration: Config, train: int = 100, valid: int = 1, test: int = 0) -> Splits[Any]:
    return build_datasets(configuration, ByteTokenizer(), Splits(train, valid, test))


def rows(dataset: Any, count: int | None = None) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset) if count is None else count)]


def test_sample_order_is_megatron_cores(tmp_path: Path):
    a, b = write(tmp_path / "a", 0, 40), write(tmp_path / "b", 100, 40)
    ours = build(config(tmp_path, data_path=("0.3", a, "0.7", b), split="80,15,5"), train=300)
    core_config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SEQ,
        blend=([a, b], [0.3, 0.7]),
        split="80,15,5",
        path_to_cache=str(tmp_path / "core"),
        tokenizer=_CoreTokenizer(),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    core = BlendedMegatronDatasetBuilder(GPTDataset, [300, 10, 0], lambda: True, core_config).build()
    assert core[0] is not None
    assert rows(ours.train, 300) == rows(core[0], 300)
    for sample, expected in ((ours.train[number], core[0][number]) for number in range(300)):
        assert sample.keys() == expected.keys()
        assert all(np.array_equal(sample[name], values) for name, values in expected.items())
    sources = {describe_sample(ours.train, i).split(" of ")[1] for i in range(300)}
    assert sources == {f"{a}.bin", f"{b}.bin"}


@pytest.mark.parametrize("order", ["formula", "shuffled"])
def test_ten_samples_of_a_blend_are_ten(order: str, tmp_path: Path):
    """megatron-core asks the three files for 8, 3 and 2 samples: more than are trained."""
    files = [write(tmp_path / name, 60 * number, 40) for number, name in enumerate("abc")]
    blend = [word for pair in zip(("0.7", "0.2", "0.1"), files, strict=True) for word in pair]
    dataset = build(
        config(tmp_path, data_path=tuple(blend), split="100,0,0", data_order=order), train=10, valid=0
    ).train
    sources = [describe_sample(dataset, number).split(" of ")[1] for number in range(10)]
    assert [sources.count(f"{file}.bin") for file in files] == [7, 2, 1]


class _CoreTokenizer:
    vocab_size, eod, pad, unique_identifiers = 257, 256, -1, {"type": "bytes"}


def test_training_repeats_and_validation_is_one_pass(tmp_path: Path):
    prefix = write(tmp_path / "a", 0, 50)
    datasets = build(config(tmp_path, data_path=(prefix,), split="80,20,0"), train=1000)
    assert len(datasets.train) >= 1000
    assert len(datasets.valid) == (10 * 20 - 1) // SEQ
    assert datasets.test is None
    seen = {token for row in rows(datasets.valid) for token in row} - {256}
    assert seen <= set(range(40, 50))
    assert {token for row in rows(datasets.train) for token in row} - {256} == set(range(40))


def test_each_split_may_have_paths_of_its_own(tmp_path: Path):
    train, valid = write(tmp_path / "t", 0, 20), [write(tmp_path / "v1", 100, 5), write(tmp_path / "v2", 200, 5)]
    paths = {"train_data_path": ("1", train), "valid_data_path": ("0.9", valid[0], "0.1", valid[1])}
    datasets = build(config(tmp_path, **paths), train=10)
    assert {token for row in rows(datasets.train) for token in row} - {256} <= set(range(20))
    # One pass over each source, whatever the weights.
    assert len(datasets.valid) == 2 * ((5 * 20 - 1) // SEQ)
    firsts = [describe_sample(datasets.valid, i) for i in range(len(datasets.valid))]
    assert {text.split(" of ")[1] for text in firsts} == {f"{prefix}.bin" for prefix in valid}


def test_a_source_too_small_for_its_share_is_left_out_of_a_pass(tmp_path: Path):
    large, small = write(tmp_path / "large", 0, 50), write(tmp_path / "small", 100, 2)
    datasets = build(config(tmp_path, data_path=("1", large, "1", small), split="90,10,0"), train=50)
    assert len(datasets.valid) == (5 * 20 - 1) // SEQ


def test_too_few_tokens_are_named(tmp_path: Path):
    prefix = write(tmp_path / "one", 0, 1)
    with pytest.raises(ConfigurationError) as caught:
        build(config(tmp_path, data_path=(prefix,), split="969,30,1"))
    assert f"--data-path {prefix} gives valid 0 sequences with 0 tokens, but one sample takes 9" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"--valid-data-path .* gives valid 1 sequences with 5 tokens"):
        build(config(tmp_path, train_data_path=(prefix,), valid_data_path=(write(tmp_path / "v", 0, 1, length=5),)))


def test_splits_that_nobody_asks_for_are_not_built(tmp_path: Path):
    prefix = write(tmp_path / "a", 0, 20)
    assert build(config(tmp_path, train_data_path=(prefix,)), valid=5).valid is None
    assert build(config(tmp_path, data_path=(prefix,), split="50,50,0"), valid=0).valid is None
    assert build(config(tmp_path, data_path=(prefix,), split="100,0,0"), valid=5).valid is None


def test_end_of_document_mask(tmp_path: Path):
    prefix = write(tmp_path / "a", 0, 10)
    plain, masked = (
        build(config(tmp_path, train_data_path=(prefix,), eod_mask_loss=flag), train=20, valid=0).train
        for flag in (False, True)
    )
    assert rows(plain) == rows(masked)
    for i in range(20):
        assert plain[i]["loss_mask"].tolist() == [1.0] * SEQ
        assert masked[i]["loss_mask"].tolist() == [float(token != 256) for token in masked[i]["tokens"].tolist()]


def test_other_data_under_the_same_name_meets_no_old_cache(tmp_path: Path):
    configuration = config(tmp_path, train_data_path=(str(tmp_path / "a"),))
    write(tmp_path / "a", 0, 30)
    build(configuration, train=50, valid=0)
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    build(configuration, train=50, valid=0)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == names
    write(tmp_path / "a", 50, 10, length=30)
    dataset = build(configuration, train=50, valid=0).train
    assert {token for row in rows(dataset) for token in row} - {256} == set(range(50, 60))


def test_the_cache_lies_beside_the_data_by_default(tmp_path: Path):
    prefix = write(tmp_path / "a", 0, 10)
    build(config(tmp_path, train_data_path=(prefix,), data_cache_path=None), train=5, valid=0)
    names = [path.name for path in (tmp_path / "a" / "cache" / "GPTDataset_indices").iterdir()]
    assert len(names) == 4
    assert all("-GPTDataset-train-" in name for name in names)


def test_damaged_data_is_refused(tmp_path: Path):
    prefix = write(tmp_path / "a", 0, 10)
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(whole[:-2])
    with pytest.raises(DataError, match="has 398 bytes"):
        build(config(tmp_path, train_data_path=(prefix,)))
    Path(f"{prefix}.bin").write_bytes(whole[:-2] + b"\xff\xff")
    with pytest.raises(DataError, match=rf"{prefix}\.bin: token 65535 at byte 398 \(document 9\) is outside"):
        build(config(tmp_path, train_data_path=(prefix,)))


@pytest.mark.parametrize("order", ["shuffled", "formula"])
def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(tmp_path: Path, order: str):
    prefix = write(tmp_path / "a", 0, 10)
    dataset = build(config(tmp_path, train_data_path=(prefix,), data_order=order), train=24, valid=0).train
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(2 * 150)
        file.write(b"\xff\xff")
    loader = BatchLoader(
        dataset,
        vocab_size=257,
        seq_length=SEQ,
        micro_batch_size=24,
        dp_rank=0,
        dp_size=1,
        describe=lambda index: describe_sample(dataset, index),
    )
    with pytest.raises(DataError, match=rf"sample \d+ of {prefix}\.bin: token id 65535 at position \d"):
        loader.global_batch(0, 1)


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    prefix = write(tmp_path / "a", 0, 10)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Give --data-cache-path a writable folder"):
        build(config(tmp_path, train_data_path=(prefix,), data_cache_path=str(tmp_path / "file" / "cache")))


def test_mock_data(tmp_path: Path):
    datasets = build(config(tmp_path, mock_data=True, vocab_size=33), train=12, valid=5)
    assert isinstance(datasets.train, MockDataset)
    assert (len(datasets.train), len(datasets.valid), datasets.test) == (12, 5, None)
    assert rows(datasets.train, 5) != rows(datasets.valid)
    assert max(max(row) for row in rows(datasets.train)) < 33
