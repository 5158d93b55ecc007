"""How many samples a run reads, and for how many its order is made: what the flags say, and what a checkpoint does."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint.native.resume import Resume
from megatron_ext.config.derived.batch import evaluation_batch
from megatron_ext.config.schema import Config, DataConfig, TrainingConfig
from megatron_ext.data.accounting import use_of_sources
from megatron_ext.data.corpus import Splits
from megatron_ext.data.manifest import Judged
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.train import datasets
from megatron_ext.train.build import _held_out_counts
from megatron_ext.train.datasets import samples_of_order, samples_of_run, samples_of_step


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


@pytest.mark.parametrize(("vocab_size", "size"), [(None, 0), (0, 0), (31, 31)])
def test_synthetic_data_without_a_tokenizer_has_ids_alone(vocab_size: int | None, size: int) -> None:
    config = dataclasses.replace(_config(), data=DataConfig(vocab_size=vocab_size))
    assert datasets.tokenizer_of_run(config).vocab_size == size


def _split(names: list[str], flag: str) -> Any:
    return SimpleNamespace(flag=flag, blend=SimpleNamespace(prefixes=names))


@pytest.mark.parametrize(
    ("rank", "flags", "warns"),
    [
        ("0", {}, True),
        (None, {}, True),
        ("1", {}, False),
        ("0", {"assistant_only_loss": True}, False),
        ("0", {"mock_data": True}, False),
    ],
)
def test_a_mask_that_nobody_reads_is_told_of(
    rank: str | None,
    flags: dict[str, Any],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once for each file that has one, under the flag that names it last."""
    splits = {"train": _split(["a", "b"], "--train-data-path"), "valid": _split(["c"], "--valid-data-path")}
    monkeypatch.setattr(datasets, "SPLITS", ["train", "valid", "test"])
    monkeypatch.setattr(datasets, "split_files", lambda config, split: splits.get(split))
    monkeypatch.setattr(datasets, "exists", lambda prefix, suffix: (prefix, suffix) in (("b", ".mask"), ("c", ".mask")))
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    datasets._warn_of_masks_that_are_not_read(dataclasses.replace(_config(), data=DataConfig(**flags)))
    said = [line.partition(" has a mask")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == (["warning: --train-data-path b", "warning: --valid-data-path c"] if warns else [])


WRONG, OTHER = Judged("a was made by another", True), Judged("b may have been", False)


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("of_ranks", "refused", "told"),
    [
        ([[], [], []], None, []),
        ([[], [OTHER], []], None, [OTHER]),
        # What is wrong on one node counts more than how much there is to say on another.
        ([[OTHER, OTHER], [WRONG], []], WRONG, [WRONG]),
        ([[], [], [WRONG, OTHER]], WRONG, [WRONG, OTHER]),
        ([[OTHER], [OTHER, OTHER], []], None, [OTHER, OTHER]),
    ],
)
def test_another_tokenizer_than_the_datas_is_told_on_all_ranks(
    of_ranks: list[list[Judged]],
    refused: Judged | None,
    told: list[Judged],
    rank: str,
    accepts: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def gather(ranks: list[Any], own: list[Judged]) -> None:
        assert (own, len(ranks)) == (of_ranks[0], 3)
        ranks[:] = of_ranks

    monkeypatch.setattr(datasets, "_judged_tokenizers", lambda config, tokenizer: of_ranks[0])
    monkeypatch.setattr(datasets.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(datasets.torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(datasets.torch.distributed, "all_gather_object", gather)
    monkeypatch.setenv("RANK", rank)
    config = dataclasses.replace(_config(), data=DataConfig(accept_other_tokenizer=accepts))
    tokenizer: Any = None
    if refused is not None and not accepts:
        with pytest.raises(DataError, match=rf"^{refused.text}\. Give the tokenizer that made the data, preprocess"):
            datasets._check_tokenizer_made_the_data(config, tokenizer)
    else:
        datasets._check_tokenizer_made_the_data(config, tokenizer)
        said = [f"warning: {one.text}" for one in told] if rank == "0" else []
        assert capsys.readouterr().err.splitlines() == said
    monkeypatch.setattr(datasets.torch.distributed, "is_initialized", lambda: False)


def test_each_file_is_judged_once_under_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without a manifest are not, nor is synthetic data."""
    splits = {"train": _split(["a", "b"], "--data-path"), "valid": _split(["b", "c"], "--data-path")}
    monkeypatch.setattr(datasets, "SPLITS", ["train", "valid", "test"])
    monkeypatch.setattr(datasets, "split_files", lambda config, split: splits.get(split))
    monkeypatch.setattr(datasets, "made_with", lambda prefix: None if prefix == "a" else f"made {prefix}")
    monkeypatch.setattr(
        datasets, "judge", lambda what, made, tokenizer: None if made == "made c" else (what, made, tokenizer)
    )
    tokenizer: Any = "tokenizer"
    assert datasets._judged_tokenizers(_config(), tokenizer) == [("--data-path b", "made b", "tokenizer")]
    synthetic = dataclasses.replace(_config(), data=DataConfig(mock_data=True))
    assert datasets._judged_tokenizers(synthetic, tokenizer) == []


@pytest.mark.parametrize(("rank", "records"), [(None, True), ("0", True), ("1", False)])
def test_one_rank_of_each_node_reads_the_record_of_the_data(
    rank: str | None, records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would read the same files."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(datasets, "data_record", lambda *given: given)
    train: Any = "samples"
    config = _config()
    found: Any = datasets.record_of_run(config, train, None)
    assert found == ((config, "samples", 80) if records else None)


@pytest.mark.parametrize("own", [None, "own"])
def test_datasets_are_checked_before_they_are_made(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the samples of the order, and those of an evaluation; own ones take the place of the flags'."""
    heard: list[Any] = []
    for name in ("_check_tokenizer_made_the_data", "check_before_the_first_step", "_warn_of_masks_that_are_not_read"):
        monkeypatch.setattr(datasets, name, lambda *given, name=name: heard.append(name))
    monkeypatch.setattr(datasets, "build_datasets", lambda *given: heard.append(given) or "ours")
    extensions: Any = SimpleNamespace(own_datasets=lambda *given: heard.append(given) or own)
    config, tokenizer = _config(), "tokenizer"
    resume = Resume(Path("iter_0000001"), 1, None, None, {"num_samples": 500})
    found: Any = datasets.datasets_of_run(config, tokenizer, resume, extensions)  # pyright: ignore[reportArgumentType]
    assert found == (own or "ours")
    numbers = Splits(500, 24, 24)
    checks = ["_check_tokenizer_made_the_data", "check_before_the_first_step", "_warn_of_masks_that_are_not_read"]
    assert heard == [*checks, *[(config, tokenizer, numbers)] * (1 if own else 2)]
