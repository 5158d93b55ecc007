"""Rank 0 builds the index cache, the others read it: with a cold and a warm cache."""

import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.schema import Config, DataConfig, ModelConfig
from megatron_ext.data import corpus, shuffled_order
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prove.parity import write_corpus
from megatron_ext.tokenizer.simple import NullTokenizer
from tests.support.corpora import write_documents
from tests.support.program import run_program


def read_on_rank(paths: dict[str, Any], cache: str) -> list[list[list[int]] | None]:
    """Train and validation tokens on this rank."""
    torch.distributed.init_process_group("gloo")
    config = Config(model=ModelConfig(seq_length=8), data=DataConfig(split="80,20,0", data_cache_path=cache, **paths))
    datasets = build_datasets(config, NullTokenizer(1000), Splits(60, 1, 0))
    return [
        None if dataset is None else [dataset[i]["tokens"].tolist() for i in range(len(dataset))]
        for dataset in (datasets.train, datasets.valid)
    ]


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    for name, documents in (("a", 50), ("b", 2)):  # b is too small for a share in the validation data
        write_documents(tmp_path / name, np.arange(documents * 20).reshape(documents, 20).tolist())
    return str(tmp_path / "a"), str(tmp_path / "b")


# One corpus is slow: a blend reads several in the same way.
@pytest.mark.parametrize("form", [pytest.param("one", marks=pytest.mark.slow), "blend", "paths"])
def test_all_ranks_read_the_same(tmp_path: Path, prefixes: tuple[str, str], form: str):
    a, b = prefixes
    paths = {
        "one": {"data_path": (a,)},
        "blend": {"data_path": ("0.5", a, "0.5", b)},
        "paths": {"train_data_path": (a, b), "valid_data_path": (b, a)},
    }[form]
    for _ in ("cold", "warm"):
        results = run_ranks(4, read_on_rank, paths, str(tmp_path / "cache"))
        assert results[0] == results[1] == results[2] == results[3]
        train, valid = results[0]
        assert len(train) >= 60
        assert len(valid) > 0


def write_cache_on_node(prefix: str, caches: list[str]) -> list[list[int]]:
    """Four ranks on two nodes, which may see the same cache or each its own."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    cache = caches[rank // 2]
    config = Config(model=ModelConfig(seq_length=8), data=DataConfig(train_data_path=(prefix,), data_cache_path=cache))
    built = []
    build = shuffled_order._in_memory
    shuffled_order._in_memory = lambda *arguments: built.append(rank) or build(*arguments)
    digested = []
    digest = corpus.index_digest
    corpus.index_digest = lambda prefix: digested.append(rank) or digest(prefix)
    train = build_datasets(config, NullTokenizer(1000), Splits(60, 0, 0)).train
    assert train is not None
    return [built, digested, *(train[i]["tokens"].tolist() for i in range(60))]


@pytest.mark.parametrize("shared", [True, False])
def test_the_cache_is_built_once_per_node(tmp_path: Path, prefixes: tuple[str, str], shared: bool):
    caches = [str(tmp_path / "node0"), str(tmp_path / ("node0" if shared else "node1"))]
    results = run_ranks(4, write_cache_on_node, prefixes[0], caches)
    assert [built for built, *_ in results] == ([[0], [], [], []] if shared else [[0], [], [2], []])
    assert [digested for _, digested, *_ in results] == [[0], [], [2], []], "one rank of a node reads the whole index"
    assert results[0][2:] == results[1][2:] == results[2][2:] == results[3][2:]
    for cache in caches:
        names = sorted(path.name for path in Path(cache).iterdir())
        assert [name.split("-train-")[1] for name in names] == [
            "description.txt",
            "document_index.npy",
            "sample_index.npy",
            "shuffle_index.npy",
        ]
        digest = hashlib.sha256(Path(f"{prefixes[0]}.idx").read_bytes()).hexdigest()
        assert f'"{digest}"' in (Path(cache) / names[0]).read_text(), "another index has another cache"


FLAGS = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --lr 1e-3 --eval-interval 4 --log-interval 1 --tensor-model-parallel-size 1"
)


@pytest.mark.parametrize("order", ["shuffled", "formula"])
def test_losses_of_data_behind_a_url_are_those_of_the_disk(order: str, tmp_path: Path) -> None:
    data = [*write_corpus(tmp_path), "--data-order", order]
    cache = data.index("--data-cache-path")
    del data[cache : cache + 2]
    far = [f"file://{word}" if word.startswith("/") else word for word in data]
    rows = []
    for name, flags in (("near", data), ("far", far)):
        metrics = tmp_path / f"{name}.jsonl"
        environment = {"XDG_CACHE_HOME": str(tmp_path / "home")}
        ends = run_ranks(2, run_program, [*FLAGS, *flags, "--metrics-file", str(metrics)], environment=environment)
        assert [end.code for end in ends] == [0, 0], ends[0].errors
        found = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows.append([{key: row.get(key) for key in ("lm_loss", "grad_norm", "validation_loss")} for row in found])
    assert rows[0] == rows[1]
    assert len(rows[0]) >= 4
    copies = sorted(path.name for path in (tmp_path / "home" / "megatron_ext").rglob("*.idx"))
    assert copies == ["train.idx", "valid.idx"], "one copy for the ranks of a machine"
