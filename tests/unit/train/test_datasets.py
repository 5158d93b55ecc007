"""How many samples a run reads, and for how many its order is made: what the flags say, and what a checkpoint does."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.checkpoint.native.resume import Resume
from megatron_ext.config.derived.batch_size import evaluation_batch
from megatron_ext.config.schema import Config, DataConfig, TrainingConfig
from megatron_ext.data.corpus import Splits
from megatron_ext.data.data_manifest import Block, checksums
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.samples import use_of_sources
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.train import datasets
from megatron_ext.train.build import _held_out_counts
from megatron_ext.train.configure import configure
from megatron_ext.train.datasets import samples_of_order, samples_of_run, samples_of_step
from megatron_ext.train.pretrain import pretrain
from tests.support.corpora import write_corpus
from tests.support.small_models import small_config
from tests.support.small_runs import MODEL


def _config(**training: Any) -> Config:
    given = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 10, "eval_interval": 5, "eval_iters": 3}
    return Config(training=TrainingConfig(**{**given, **training}))


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, (80, 24)),
        ({"rampup_batch_size": (4, 4, 16)}, (4 * 4 + 6 * 8, 24)),
        ({"train_iters": None, "train_samples": 77}, (77, 24)),
        ({"eval_global_batch_size": 2}, (80, 6)),
        ({"eval_interval": 0}, (80, 0)),
        ({"eval_iters": 0}, (80, 0)),
        ({"eval_iters": 0, "full_validation": True}, (80, 8)),
    ],
)
def test_samples_of_a_run(training: dict[str, Any], expected: tuple[int, int]) -> None:
    train, held_out = expected
    assert samples_of_run(_config(**training)) == Splits(train, held_out, held_out)


def test_batches_of_an_evaluation() -> None:
    """Those of the training, unless they have flags of their own."""
    assert evaluation_batch(_config(micro_batch_size=2)) == (8, 2)
    assert evaluation_batch(_config(eval_global_batch_size=16, eval_micro_batch_size=4)) == (16, 4)


def test_samples_of_a_step() -> None:
    """With batches of 4 for 16 samples."""
    config = _config(rampup_batch_size=(4, 4, 16))
    assert [samples_of_step(config, step) for step in (1, 4, 5, 10)] == [
        range(4),
        range(12, 16),
        range(16, 24),
        range(56, 64),
    ]
    for step in (0, 11):
        with pytest.raises(ConfigurationError, match=f"step {step}: the training has steps 1 to 10"):
            samples_of_step(config, step)


@pytest.mark.parametrize(
    ("was", "flags", "expected"),
    [
        (500, {}, 500),
        (50, {}, 80),
        (500, {"finetune": True}, 80),
        (500, {"data_order": "formula"}, 80),
        (None, {}, 80),
    ],
)
def test_the_order_is_that_of_the_checkpoint(was: int | None, flags: dict[str, Any], expected: int) -> None:
    """As long as it is enough; a run that begins anew has its own, and an order by formula depends on no number."""
    config = _config()
    order, finetune = flags.get("data_order", "shuffled"), flags.get("finetune", False)
    config = dataclasses.replace(
        config, data=DataConfig(data_order=order), checkpoint=dataclasses.replace(config.checkpoint, finetune=finetune)
    )
    record = None if was is None else {"num_samples": was}
    assert samples_of_order(config, Resume(Path("iter_0000001"), 1, None, None, record)) == expected
    assert samples_of_order(config, None) == 80


class _Samples:
    """100 samples of two sources, a quarter of the first; both have the name of one file."""

    sources = (SimpleNamespace(name="a", samples_per_epoch=50), SimpleNamespace(name="a", samples_per_epoch=50))

    def __len__(self) -> int:
        return 100

    def counts(self, samples: int) -> list[int]:
        return [samples // 4, samples - samples // 4]


def test_samples_of_an_evaluation() -> None:
    data: Any = _Samples()
    assert _held_out_counts(_config(), data, 40) == [10, 30]
    assert _held_out_counts(_config(), data, 400) == [25, 75]
    assert _held_out_counts(_config(multiple_validation_sets=True), data, 40) == [25, 40]
    assert _held_out_counts(_config(full_validation=True), data, 40) == [25, 75]


def test_a_file_that_is_named_twice_is_one_source() -> None:
    data: Any = _Samples()
    assert use_of_sources(data, 40, 8) == {"a": {"samples": 40, "tokens": 320, "epochs": 0.8}}


def test_a_checkpoint_gives_the_flags_of_another_only_if_they_are_the_same() -> None:
    one = Resume(Path("a"), 1, None, {"lr": 1.0})
    assert one.gives_the_flags_of(Resume(Path("a"), 1, None, {"lr": 1.0}))
    assert not one.gives_the_flags_of(Resume(Path("a"), 1, None, {"lr": 2.0})), "it was read from elsewhere"
    assert not one.gives_the_flags_of(Resume(Path("b"), 1, None, {"lr": 1.0}))
    assert not one.gives_the_flags_of(None)


def test_synthetic_data_without_a_tokenizer_has_ids_alone() -> None:
    config = dataclasses.replace(_config(), data=DataConfig(vocab_size=31))
    assert datasets.tokenizer_of_run(config).vocab_size == 31


def _corpus(tmp_path: Path, *names: str) -> dict[str, str]:
    """Write corpora, and return their prefixes."""
    for name in names:
        write_corpus(tmp_path / name, 4000)
    return {name: str(tmp_path / name) for name in names}


@pytest.mark.parametrize(
    ("rank", "flags", "warns"), [("0", [], True), ("1", [], False), ("0", ["--assistant-only-loss"], False)]
)
def test_a_mask_that_nobody_reads_is_told_of(
    rank: str,
    flags: list[str],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once for each file that has one, under the flag that names it, on one rank."""
    named = _corpus(tmp_path, "a", "b", "c")
    data = ["--train-data-path", named["a"], named["b"], "--valid-data-path", named["c"]]
    words = [flag for flag in MODEL if flag != "--mock-data"] + ["--tokenizer-type", "NullTokenizer", *data, *flags]
    config = configure(words).config
    for name in ("b", "c"):
        Path(f"{named[name]}.mask").touch()
    monkeypatch.setenv("RANK", rank)
    capsys.readouterr()
    datasets._warn_of_masks_that_are_not_read(config)
    said = [line.partition(" has a mask")[0] for line in capsys.readouterr().err.splitlines()]
    expected = [f"warning: --train-data-path {named['b']}", f"warning: --valid-data-path {named['c']}"]
    assert said == (expected if warns else [])


def test_one_rank_of_each_node_reads_the_record_of_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others would read the same files."""
    named = _corpus(tmp_path, "a")
    words = [flag for flag in MODEL if flag != "--mock-data"] + ["--tokenizer-type", "NullTokenizer"]
    config = configure([*words, "--data-path", named["a"], "--split", "80,10,10"]).config
    train = datasets.datasets_of_run(config, datasets.tokenizer_of_run(config)).train
    assert train is not None
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    record = datasets.record_of_run(config, train, None)
    assert record is not None
    assert record["num_samples"] == 12
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert datasets.record_of_run(config, train, None) is None


def test_data_that_differs_from_the_checkpoints_is_named_unless_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = _corpus(tmp_path, "a")
    words = [flag for flag in MODEL if flag != "--mock-data"] + [
        "--tokenizer-type",
        "NullTokenizer",
        "--eval-iters",
        "0",
    ]
    flags = [*words, "--data-path", named["a"], "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    pretrain([*flags, "--exit-interval", "2"])
    write_corpus(tmp_path / "a", 8000)
    with pytest.raises(DataError, match=r"the data is not that of the checkpoint .*iter_0000002: .*Put back what"):
        pretrain(flags)
    pretrain([*flags, "--accept-changed-data"])
    assert "warning: the data is not that of the checkpoint" in capsys.readouterr().out


SIZE = 65_536
"""Bytes of the tokens of a pair, in blocks of 1 kB."""


def _as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, local: int, on_machine: int) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, number in zip(names, (rank, ranks, local, on_machine), strict=True):
        monkeypatch.setenv(name, str(number))


def _pair(prefix: Path, *, with_manifest: bool = True) -> str:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens((np.arange(SIZE // 2) % 61).astype(np.uint16).tobytes(), [32] * (SIZE // 64))
    if with_manifest:
        content = {"tokenizer": {}, "outputs": {str(prefix): {"token_bytes": SIZE}}}
        content["checksums"] = checksums([str(prefix)], 1024)
        Path(f"{prefix}_manifest.json").write_text(json.dumps(content))
    return str(prefix)


def _verifying(verify_data: str, **data: Any) -> Config:
    return dataclasses.replace(small_config(), data=DataConfig(verify_data=verify_data, **data))


def _damage(prefix: str, place: int) -> None:
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(place)
        file.write(b"\xff")


def test_a_file_that_two_splits_name_is_compared_once_and_one_without_checksums_is_named(tmp_path: Path) -> None:
    one, plain = _pair(tmp_path / "one"), _pair(tmp_path / "plain", with_manifest=False)
    config = _verifying("start", train_data_path=(one, plain), valid_data_path=(one,))
    blocks, without = datasets.blocks_of_run(config)
    assert {block.path for block in blocks} == {f"{one}.bin", f"{one}.idx"}
    assert len({(block.path, block.first) for block in blocks}) == len(blocks)
    assert without == [plain]


@pytest.mark.parametrize("machines", [1, 2, 3])
@pytest.mark.parametrize("on_machine", [1, 2, 3])
def test_the_ranks_of_each_machine_compare_all_of_its_files(
    machines: int, on_machine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block once: machines may have copies of their own."""
    blocks = [Block("x.bin", 1024 * number, 1024, "00000000") for number in range(10)]
    for machine in range(machines):
        compared = []
        for local in range(on_machine):
            _as_rank(monkeypatch, machine * on_machine + local, machines * on_machine, local, on_machine)
            compared += datasets.share(blocks)
        assert sorted(compared, key=lambda block: block.first) == blocks, machine


@pytest.mark.parametrize("place", [0, 3 * 1024 + 6])
@pytest.mark.parametrize(("verify_data", "compares"), [("off", ()), ("background", (0,)), ("start", (0, 3 * 1024 + 6))])
def test_what_is_compared_before_the_first_step(
    verify_data: str, compares: tuple[int, ...], place: int, tmp_path: Path
) -> None:
    """All blocks, or eight from the first to the last."""
    prefix = _pair(tmp_path / "one")
    _damage(prefix, place)
    config = _verifying(verify_data, train_data_path=(prefix,))
    if place not in compares:
        datasets.check_before_the_first_step(config)
        return
    with pytest.raises(DataError, match=rf"one\.bin: bytes {place // 1024 * 1024} to .* have the checksum .*\. Copy"):
        datasets.check_before_the_first_step(config)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_names_what_has_no_checksums(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _as_rank(monkeypatch, rank, 2, rank, 2)
    prefix = _pair(tmp_path / "plain", with_manifest=False)
    datasets.check_before_the_first_step(_verifying("start", train_data_path=(prefix,)))
    told = f"--verify-data start: no manifest has checksums of {prefix}, which is not verified"
    assert (told in capsys.readouterr().err) == (rank == 0)
    datasets.check_before_the_first_step(_verifying("background", train_data_path=(prefix,)))
    assert capsys.readouterr().err == ""
