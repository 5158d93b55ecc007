"""What one part of a run hands to the next: seeds of dropout, what a rank reads of its samples, what the engine is
told."""

import dataclasses
import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.data.samples import Source
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.train import build
from megatron_ext.train.datasets import Splits
from tests.support.small_models import small_config


def _groups(**ranks: tuple[int, int]) -> Any:
    """Groups of one, but for those that are given as (rank, size)."""
    names = ("tp", "pp", "dp", "cp", "ep", "expt_tp")
    places = {name: ranks.get(name, (0, 1)) for name in names}
    return SimpleNamespace(
        **{
            name: SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
            for name, (rank, size) in places.items()
        }
    )


def _seeded(monkeypatch: pytest.MonkeyPatch, groups: Any, seed: int = 5) -> tuple[int, dict[str, Any]]:
    seeds: list[int] = []
    told: list[tuple[int, dict[str, Any]]] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(build, "model_parallel_cuda_manual_seed", lambda given, **ranks: told.append((given, ranks)))
    build.seed_dropout(small_config(training={"seed": seed}), groups)
    [(given, ranks)] = told
    assert seeds == [given]
    return given, ranks


def test_each_rank_draws_a_dropout_of_its_own_but_tensor_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold whole gets one mask; the engine makes another seed of the rank for what they divide."""
    places = list(itertools.product(range(3), range(3), range(2)))
    seeds = {
        (pp, dp, cp): {
            _seeded(monkeypatch, _groups(pp=(pp, 3), dp=(dp, 3), cp=(cp, 2), tp=(tp, 2)))[0] for tp in range(2)
        }
        for pp, dp, cp in places
    }
    assert all(len(of_place) == 1 for of_place in seeds.values())
    assert len(set().union(*seeds.values())) == len(places)
    assert all(0 <= seed < 2**31 for of_place in seeds.values() for seed in of_place)
    alone = {_seeded(monkeypatch, _groups(pp=(pp, 3), dp=(dp, 3)))[0] for pp in range(3) for dp in range(3)}
    other = {_seeded(monkeypatch, _groups(pp=(pp, 3), dp=(dp, 3)), seed=6)[0] for pp in range(3) for dp in range(3)}
    assert len(alone | other) == 18
    _, ranks = _seeded(monkeypatch, _groups(tp=(1, 2), ep=(2, 4), expt_tp=(3, 5)))
    assert ranks == {"tp_rank": 1, "ep_rank": 2, "etp_rank": 3, "force_reset_rng": True}


@pytest.mark.parametrize(("asked", "called"), [(True, [True]), (False, [])])
def test_precision_and_determinism_of_kernels(asked: bool, called: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", seen.append)
    products, convolutions = SimpleNamespace(allow_tf32=not asked), SimpleNamespace(allow_tf32=not asked)
    monkeypatch.setattr(torch.backends.cuda, "matmul", products)
    monkeypatch.setattr(torch.backends, "cudnn", convolutions)
    here: Any = SimpleNamespace(kind="cpu")
    build.set_kernels(small_config(training={"tf32": asked, "deterministic_mode": asked}), here)
    assert seen == called
    assert (products.allow_tf32, convolutions.allow_tf32) == (asked, asked)


def _mock(samples: int, split: int, sources: int = 1) -> Any:
    dataset = MockDataset(vocab_size=250, seq_length=16, num_samples=samples, seed=1, split=split)
    if sources > 1:  # as many of each, one after another
        dataset.sources = [Source(f"source {number}", samples) for number in range(sources)]
        dataset.counts = lambda samples: [samples // sources] * sources
    return dataset


def _loaders(
    monkeypatch: pytest.MonkeyPatch,
    groups: Any,
    *,
    data: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    kind: str = "cpu",
    valid: Any = None,
) -> tuple[Any, list[tuple[Any, dict[str, Any]]]]:
    made: list[tuple[Any, dict[str, Any]]] = []

    def loader(dataset: Any, **settings: Any) -> Any:
        made.append((dataset, settings))
        return SimpleNamespace(dataset=dataset)

    monkeypatch.setattr(build, "BatchLoader", loader)
    monkeypatch.setattr(build, "tokenizer_of_run", lambda config: SimpleNamespace(vocab_size=250, eod=7))
    valid = _mock(12, 1) if valid is None else valid
    monkeypatch.setattr(build, "datasets_of_run", lambda *_: Splits(_mock(40, 0), valid, _mock(0, 2)))
    monkeypatch.setattr(build, "samples_of_run", lambda config: Splits(40, 8, 0))
    training = {"eval_micro_batch_size": 3, "eval_global_batch_size": 6, **(training or {})}
    config = small_config(training=training, layout=layout)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, num_workers=3, **(data or {})))
    return build.build_loaders(config, SimpleNamespace(kind=kind), groups), made  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("stage", "first", "last"), [(0, True, False), (1, False, False), (2, False, True)])
def test_what_a_rank_reads_of_its_samples(stage: int, first: bool, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = _groups(pp=(stage, 3), dp=(1, 4), cp=(2, 3))
    loaders, made = _loaders(monkeypatch, groups, data={"skip_samples": ("9-11",)}, kind="cuda")
    for (dataset, settings), micro_batch in zip(made, (2, 3), strict=True):
        view = settings.pop("view")
        assert (view.is_first_stage, view.is_last_stage) == (first, last)
        assert (view.cp_rank, view.cp_size, view.eod) == (2, 3, 7)
        assert (view.restarts_positions, view.separates_documents, view.documents_are_whole) == (False, False, False)
        describe, skipped = settings.pop("describe"), settings.pop("skipped", None)
        assert settings == {
            "vocab_size": 250,
            "seq_length": 16,
            "micro_batch_size": micro_batch,
            "dp_rank": 1,
            "dp_size": 4,
            "num_workers": 3,
            "pin_memory": True,
            "reads_ahead": False,
        }
        is_training = micro_batch == 2
        assert describe(5) == ("sample 5 of mock.bin" if is_training else "held-out sample 5 of mock.bin")
        assert [sample in skipped for sample in (8, 9, 11, 12)] == (
            [False, True, True, False] if is_training else [False] * 4
        )
        assert len(dataset) == (40 if is_training else 8)
    assert (loaders.train.dataset, loaders.samples) == (made[0][0], made[0][0])
    assert (9 in loaders.skipped, loaders.test) == (True, None)


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask"])
def test_how_documents_are_kept_apart(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kinds, whole in ((("a2a",), True), (("p2p",), False), (("all_gather",), False)):
        _, made = _loaders(monkeypatch, _groups(), data={flag: True}, layout={"cp_comm_type": kinds})
        view = made[0][1]["view"]
        assert view.restarts_positions == (flag == "reset_position_ids")
        assert view.separates_documents == (flag == "reset_attention_mask")
        assert view.documents_are_whole == whole
        assert not made[0][1]["pin_memory"]


@pytest.mark.parametrize(
    ("training", "ranges"),
    [
        ({}, [range(4), range(4, 8)]),
        ({"full_validation": True}, [range(6), range(6, 12)]),
        ({"multiple_validation_sets": True}, [range(6), range(6, 12)]),
        ({"validation_set_names": ("one",)}, [range(4), range(4, 8)]),
    ],
)
def test_which_samples_of_which_source_are_held_out(
    training: dict[str, Any], ranges: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 are wanted of 12 from two sources; of each where each is a set of its own."""
    loaders, _ = _loaders(monkeypatch, _groups(), training=training, valid=_mock(12, 1, sources=2))
    parts = loaders.valid.parts
    assert [part.positions for part in parts] == ranges
    assert [part.name for part in parts] == ["source 0", "source 1"]
    assert [part.suffix for part in parts] == ["one" if "validation_set_names" in training else "0", "1"]


@pytest.mark.parametrize("level", [0, 2])
def test_what_the_engine_is_told_of_the_run(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of the loss, how gradients are finished, and timers where they are asked for."""
    config = small_config()
    config = dataclasses.replace(config, logging=dataclasses.replace(config.logging, timing_log_level=level))
    core: Any = SimpleNamespace(timers=None, grad_scale_func=None, finalize_model_grads_func=None)
    part: Any = SimpleNamespace(config=SimpleNamespace(timers=None))
    optimizer = SimpleNamespace(chained_optimizers=[part], scale_loss="the scale of the loss")
    chunk = SimpleNamespace(own_loss=None)
    calls: list[Any] = []
    sharding = SimpleNamespace(
        lives_on_host=False,
        builds_on_meta=False,
        shard=lambda chunks, *_: [("wrapped", *chunks)],
        optimizer=lambda *_: optimizer,
        weights_in_place=lambda wrapped: nullcontext(),
        parts=lambda optimizer: ["part"],
    )
    groups = _groups()
    for name, value in (
        ("sharding_of", lambda config: sharding),
        ("process_groups", SimpleNamespace(initialize=lambda *given, **named: calls.append(named) or groups)),
        ("set_kernels", lambda config, device: calls.append("kernels")),
        ("seed_dropout", lambda config, groups: calls.append("seed")),
        ("transformer_config", lambda *given, **named: calls.append("settings") or core),
        ("build_model", lambda *given, **named: calls.append("model") or [chunk]),
        ("check_weight_decay", lambda *given: calls.append(("decay", given[0], given[1]))),
        ("build_loaders", lambda *_: SimpleNamespace(samples=None)),
        ("P2PCommunicator", lambda **named: named),
        ("GradientWatch", lambda chunks, sharding, alone: ("watch", chunks, alone)),
        ("record_of_run", lambda *_: None),
    ):
        monkeypatch.setattr(build, name, value)
    device: Any = SimpleNamespace(kind="cpu", synchronize=lambda: None)
    run = build.build_run(config, device)
    assert core.grad_scale_func == "the scale of the loss"
    assert core.finalize_model_grads_func is build.finalize_model_grads
    timers = run.timers if level else None
    assert (core.timers, part.config.timers) == (timers, timers)
    wrapped = [("wrapped", chunk)]
    assert (run.chunks, run.gradient_watch) == (wrapped, ("watch", wrapped, True))
    assert calls == [{"from_host": False}, "kernels", "seed", "settings", "model", ("decay", ["part"], wrapped)]
    assert run.p2p == {"pp_group": groups.pp, "config": core}
