"""A pair behind a URL gives the samples of the same pair on the disk, its index is copied once, and samples come
ahead."""

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from megatron_ext.config.schema import Config, DataConfig, ModelConfig
from megatron_ext.data import stored
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.data_manifest import made_with
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import check_token_ids, pair_fingerprint
from megatron_ext.data.loader import BatchLoader
from megatron_ext.data.mask import BEGINS, COUNTS
from megatron_ext.data.read_ahead import STEPS, ReadAhead
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.tokenizer.simple import NullTokenizer

FAR = "memory://bucket/corpus"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A pair with a mask on the disk, and the same in an empty memory://."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored._copied.cache_clear()
    random = np.random.default_rng(0)
    tokens, lengths = random.permutation(4000).astype(np.uint16), [40] * 100  # a token tells its place
    flags = random.integers(0, 2, 4000).astype(np.uint8) * COUNTS
    flags[::40] = BEGINS
    with IndexedWriter(tmp_path / "corpus", np.uint16, packed_to=0) as writer:
        writer.add_tokens(tokens.tobytes(), lengths, flags)
    (tmp_path / "corpus_manifest.json").write_text(
        '{"tokenizer": {"type": "NullTokenizer"}, "outputs": {"corpus": {"token_bytes": 8000}}}'
    )
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name in ("corpus.bin", "corpus.idx", "corpus.mask", "corpus_manifest.json"):
        system.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
    yield str(tmp_path / "corpus")
    system.store.clear()
    stored._copied.cache_clear()


def samples(prefix: str, order: str, masked: bool, cache: Path) -> list[dict[str, list[float]]]:
    data = DataConfig(
        data_path=(prefix,),
        split="80,20,0",
        data_order=order,
        data_cache_path=str(cache),
        assistant_only_loss=masked,
    )
    datasets = build_datasets(
        Config(model=ModelConfig(seq_length=16), data=data), NullTokenizer(4000), Splits(150, 1, 0)
    )
    return [
        {name: torch.as_tensor(values).tolist() for name, values in dataset[index].items()}
        for dataset in (datasets.train, datasets.valid)
        if dataset is not None
        for index in range(len(dataset))
    ]


@pytest.mark.parametrize("order", ["shuffled", "formula"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_samples_are_those_of_the_disk(order: str, masked: bool, pair: str, tmp_path: Path) -> None:
    near = samples(pair, order, masked, tmp_path / "near")
    assert samples(FAR, order, masked, tmp_path / "far") == near
    assert len(near) > 190
    assert ("document_begins" in near[0]) == masked
    if masked:
        flags = np.frombuffer(Path(f"{pair}.mask").read_bytes()[16:], np.uint8)
        tokens = np.fromfile(f"{pair}.bin", np.uint16)
        flag_of: dict[Any, int] = dict(zip(tokens.tolist(), flags.tolist(), strict=True))
        for sample in near:
            assert sample["loss_mask"] == [float(flag_of[label] & COUNTS) for label in sample["labels"]]
            assert sample["document_begins"] == [flag_of[token] == BEGINS for token in sample["tokens"]]
        assert 0.4 < np.mean([sample["loss_mask"] for sample in near]) < 0.55


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the store, one for each read of a range."""
    paths: list[str] = []
    cat = MemoryFileSystem.cat_file

    def cat_file(self: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None, **more: Any):
        paths.append(path)
        return cat(self, path, start=start, end=end, **more)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    return paths


def test_the_index_is_copied_once_and_again_when_it_changes(pair: str, fetched: list[str]) -> None:
    first = stored.local_file(FAR, ".idx")
    assert first.read_bytes() == Path(f"{pair}.idx").read_bytes()
    stored._copied.cache_clear()  # as another process
    assert stored.local_file(FAR, ".idx") == first
    assert fetched == ["/bucket/corpus.idx"]
    fsspec.filesystem("memory").pipe("/bucket/corpus.idx", b"another")
    stored._copied.cache_clear()
    assert stored.local_file(FAR, ".idx").read_bytes() == b"another"
    assert first.exists()


def test_checks_reach_the_store(pair: str) -> None:
    for suffix in (".idx", ".bin", ".mask"):
        assert pair_fingerprint(FAR, suffix) == pair_fingerprint(pair, suffix)
    made = made_with(FAR)
    assert made is not None
    assert made.manifest == "memory://bucket/corpus_manifest.json"
    check_token_ids(FAR, 4000)
    with pytest.raises(DataError, match=r"memory://bucket/corpus\.bin: token \d+ at byte"):
        check_token_ids(FAR, 900)
    with pytest.raises(ConfigurationError, match=r"memory://bucket/other\.idx does not exist"):
        samples("memory://bucket/other", "formula", False, Path())
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/corpus.bin", system.cat("/bucket/corpus.bin")[:-2])
    with pytest.raises(DataError, match=r"memory://bucket/corpus\.bin has 7998 bytes"):
        samples(FAR, "formula", False, Path())


class Gated:
    """Samples that come when the gate opens, and which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.gate = threading.Event()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        self.asked.append(index)
        assert self.gate.wait(60)
        values = np.full(4, index % 100)
        return {"tokens": values, "labels": values, "loss_mask": np.ones(4), "position_ids": np.arange(4)}


def test_the_samples_of_the_next_steps_are_on_their_way() -> None:
    dataset = Gated()
    loader = BatchLoader(
        dataset,
        vocab_size=1000,
        seq_length=4,
        micro_batch_size=2,
        dp_rank=1,
        dp_size=2,
        num_workers=0,
        reads_ahead=True,
    )
    opener = threading.Timer(0.5, dataset.gate.set)
    opener.start()
    batches = loader.global_batch(0, 2)
    assert [batch.tokens[:, 0].tolist() for batch in batches if batch.tokens is not None] == [[2, 3], [6, 7]]
    ours = [index for index in range(8 * (STEPS + 1)) if index % 4 > 1]
    for _ in range(200):
        if len(dataset.asked) == len(ours):
            break
        threading.Event().wait(0.05)
    assert sorted(dataset.asked) == ours
    loader.global_batch(8, 2)
    later = [index for index in range(8 * (STEPS + 1), 8 * (STEPS + 2)) if index % 4 > 1]
    for _ in range(200):
        if len(dataset.asked) == len(ours) + len(later):
            break
        threading.Event().wait(0.05)
    assert sorted(dataset.asked) == ours + later, "each is asked for once"
    batches = loader.global_batch(400, 1)  # a resume, or a batch of another size
    assert [batch.tokens[:, 0].tolist() for batch in batches if batch.tokens is not None] == [[2, 3]]
    loader.close()


def test_an_error_of_a_read_ahead_comes_where_it_is_read() -> None:
    class Broken(Gated):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            if index == 3:
                raise DataError("sample 3 is broken")
            return super().__getitem__(index)

    dataset = Broken()
    dataset.gate.set()
    ahead = ReadAhead(dataset, 2)
    ahead.will_need([1, 2, 3])
    assert ahead[1]["tokens"][0] == 1
    with pytest.raises(DataError, match="sample 3 is broken"):
        ahead[3]
    ahead.close()


@pytest.mark.usefixtures("pair")
def test_another_content_of_the_same_size_is_copied_anew() -> None:
    first = stored.local_file(FAR, ".idx")
    whole = first.read_bytes()
    other = bytes(reversed(whole))
    fsspec.filesystem("memory").pipe("/bucket/corpus.idx", other)
    stored._copied.cache_clear()
    second = stored.local_file(FAR, ".idx")
    assert (first.read_bytes(), second.read_bytes()) == (whole, other)
    assert first.parent != second.parent


def test_one_process_of_a_machine_copies_and_the_others_wait(pair: str, fetched: list[str]) -> None:
    """Who waited for the lock finds the copy and reads nothing."""
    path = stored.local_file(FAR, ".mask")
    content = path.read_bytes()
    assert fetched == ["/bucket/corpus.mask"]
    path.unlink()
    stored._copied.cache_clear()  # as another process
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found: list[Path] = []
        waits = threading.Thread(target=lambda: found.append(stored.local_file(FAR, ".mask")))
        waits.start()
        waits.join(0.3)
        assert waits.is_alive()
        path.write_bytes(content)
    waits.join(20)
    assert found == [path]
    assert fetched == ["/bucket/corpus.mask"]


@pytest.mark.usefixtures("pair")
def test_a_pipe_or_a_folder_in_the_place_of_the_lock_is_not_waited_for() -> None:
    lock = stored.local_file(FAR, ".idx").with_name("lock")
    for make in (os.mkfifo, os.mkdir):
        stored._copied.cache_clear()
        lock.with_name("corpus.idx").unlink(missing_ok=True)
        lock.unlink()
        make(lock)
        with pytest.raises(StorageError, match=rf"{FAR}\.idx cannot be copied to {lock.parent}: .*{lock}"):
            stored.local_file(FAR, ".idx")


def test_a_file_that_changes_while_it_is_copied_is_no_copy(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = stored.RemoteFile.read

    def replaced(file: Any, offset: int, length: int) -> bytes:
        found = read(file, offset, length)
        fsspec.filesystem("memory").pipe("/bucket/corpus.idx", found + b"more")
        return found

    monkeypatch.setattr(stored.RemoteFile, "read", replaced)
    with pytest.raises(DataError, match=r"memory://bucket/corpus\.idx was replaced while it was read"):
        stored.local_file(FAR, ".idx")
    assert not list(stored.cache_root().rglob("*.idx")), "nothing is left under its name"


def test_ranges_of_both_kinds_and_the_end_of_their_threads(pair: str) -> None:
    before = set(threading.enumerate())
    ranges = [(0, 4), (7990, 100), (100, 0), (16, 2)]
    whole = Path(f"{pair}.bin").read_bytes()
    expected = [whole[offset : offset + length] for offset, length in ranges]
    assert stored.read_many(pair, ranges) == expected
    assert stored.read_many(FAR, ranges) == expected
    for _ in range(2000):
        if set(threading.enumerate()) <= before:
            break
        threading.Event().wait(0.01)
    assert set(threading.enumerate()) <= before
    assert stored.local_file(FAR, ".nothing").exists() is False
    assert [stored.exists(FAR, suffix) for suffix in (".bin", ".nothing")] == [True, False]
