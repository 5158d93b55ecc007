"""How a command line becomes a checked configuration: what is told of files, checkpoints and restarts."""

import dataclasses
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.train import configure as module
from megatron_ext.train.configure import configure, configure_for
from megatron_ext.train.pretrain import pretrain
from tests.support.small_models import small_config
from tests.support.small_runs import MODEL


def _problems(*flags: str, **named: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as error:
        configure([*MODEL, *flags], **named)
    return error.value.problems


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """Those of words first, then of values and of files."""
    missing = str(tmp_path / "nothing")
    first, *others = _problems("--no-such-flag", "--hidden-size", "33", "--load-hf", missing)
    assert "--no-such-flag" in first
    assert others


def test_a_configuration_is_for_the_ranks_that_are_asked_about() -> None:
    assert configure([*MODEL, "--dry-run"], believing=True, world_size=2).config.layout.world_size == 2


def test_another_checkpoint_means_other_flags(tmp_path: Path) -> None:
    """What was found is what will be loaded, in any case."""
    pretrain([*MODEL, "--eval-iters", "0", "--save", str(tmp_path)])
    configured = configure([*MODEL, "--load", str(tmp_path), "--use-checkpoint-args"])
    resume = configured.resume
    assert resume is not None
    assert resume.saved is not None
    damaged = dataclasses.replace(resume, damaged=("iter_0000004",))
    same = configure_for(configured, damaged)
    assert same.config is configured.config
    assert same.resume is damaged
    other = dataclasses.replace(resume, saved={**resume.saved, "ffn_hidden_size": 256})
    again = configure_for(configured, other)
    assert (again.config.model.ffn_hidden_size, again.resume) == (256, other)
    afresh = configure_for(configured, None)
    assert afresh.resume is None
    assert any("--use-checkpoint-args changes nothing" in text for text in afresh.typed.warnings)


def test_why_there_is_nothing_to_load(tmp_path: Path) -> None:
    """Where it is asked for."""
    configure([*MODEL, "--load", str(tmp_path)])
    (tmp_path / "file").touch()
    for folder, why in (
        (tmp_path, "it holds no checkpoint"),
        (tmp_path / "file", "is a file, not a folder of checkpoints"),
    ):
        [problem] = _problems("--load", str(folder), "--exit-on-missing-checkpoint")
        assert why in problem
        assert str(folder) in problem


@pytest.mark.parametrize(
    ("named", "there", "missing"),
    [(None, "g++", None), (None, "clang++", "g++"), ("icpx", "g++", "icpx"), ("icpx", "icpx", None)],
)
def test_the_compiler_that_torch_would_call(
    named: str | None, there: str, missing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / there).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    assert module._missing_compiler() == missing


def _config(**groups: dict[str, Any]) -> Config:
    config = small_config()
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


@pytest.mark.parametrize(
    ("save", "load", "restarts", "told"),
    [
        (
            "runs/a",
            None,
            "2",
            "2 times more, and each restart begins afresh, not with what --save runs/a holds by then; add",
        ),
        (
            "runs/a",
            "runs/b",
            "1",
            "1 times more, and each restart begins with --load runs/b again, not with what --save",
        ),
        ("runs/a", "runs/a", "2", None),
        ("runs/a", "runs/../runs/a/", "2", None),
        ("runs/a", "linked", "2", None),
        ("runs/a", None, "0", None),
        ("runs/a", None, None, None),
        (None, None, "2", None),
        (None, "runs/b", "2", None),
    ],
)
def test_restarts_that_do_not_go_on_are_told(
    save: str | None,
    load: str | None,
    restarts: str | None,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "runs" / "a")
    for name in ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    if restarts is not None:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    found = module._forgetful_restarts(_config(checkpoint={"save": save, "load": load}))
    assert len(found) == (told is not None)
    assert all(f"torchrun may start the ranks {told}" in text for text in found)


CURVES: dict[str, Any] = {"lr": 1.0, "global_batch_size": 4, "train_iters": 10}


@pytest.mark.parametrize(
    ("saved", "flags", "different"),
    [
        (CURVES, {}, None),
        ({**CURVES, "lr": 2.0}, {}, "--lr 1.0 instead of 2.0"),
        ({**CURVES, "min_lr": 0.5}, {}, "--min-lr 0.0 instead of 0.5"),
        ({**CURVES, "train_iters": 20}, {}, "decay in samples 40 instead of 80"),
        ({**CURVES, "lr_warmup_iters": 2}, {}, "warmup in samples 0 instead of 8"),
        (
            {**CURVES, "lr": 2.0, "min_lr": 0.5},
            {},
            "--lr 1.0 instead of 2.0, --min-lr 0.0 instead of 0.5",
        ),
        ({**CURVES, "weight_decay": 0.5}, {}, "weight decay 0.01 to 0.01 in 40 samples instead of 0.5 to 0.5 in 40"),
        ({**CURVES, "lr_group": ("*=2", "a=1")}, {}, "--lr-group none instead of *=2 a=1"),
        ({**CURVES, "lr": 2.0}, {"finetune": True}, None),
        ({**CURVES, "lr": 2.0}, {"no_load_optim": True}, None),
        ({**CURVES, "lr": 2.0}, {"override_opt_param_scheduler": True}, None),
        ({**CURVES, "lr": 2.0}, {"use_checkpoint_opt_param_scheduler": True}, None),
        (None, {}, None),
        ({"lr": 2.0, "train_iters": 10}, {}, None),
        ({"lr": 2.0, "global_batch_size": 4}, {}, None),
        ({"global_batch_size": 4, "train_iters": 10}, {}, None),
    ],
)
def test_other_curves_than_the_checkpoints_are_refused(
    saved: dict[str, Any] | None, flags: dict[str, Any], different: str | None
) -> None:
    """Unless they are chosen, or nothing of the optimizer is loaded. Only a run's configuration has any."""
    config = _config(
        optimizer={"lr": 1.0},
        training={"train_iters": 10, "global_batch_size": 4},
        checkpoint={"load": "ckpt", **flags},
    )
    found = module._other_curves(config, Facts(saved=saved))
    assert len(found) == (different is not None)
    for text in found:
        assert text.startswith(
            "the curves of learning rate and weight decay are not those of the checkpoint in --load ckpt: "
        )
        assert f": {different}" in text
        assert "; add --override-opt-param-scheduler to follow the flags, or" in text


_STYLES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "inverse-square-root": {},
    "WSD": {"lr_wsd_decay_iters": 4},
    "power": {"lr_power_scale": 1e-3, "lr_power_exponent": -0.5},
}


def _differences(then: dict[str, Any], now: dict[str, Any], iters: tuple[int, int], iteration: int) -> list[str]:
    """What is said of a run of 20 iterations that goes on along the curves `now` after `iteration` of `then`."""
    saved = {**CURVES, **then, "train_iters": iters[0], "seq_length": 8}
    config = _config(
        model={"seq_length": 8},
        optimizer={"lr": 1.0, **now},
        training={"train_iters": iters[1], "global_batch_size": 4},
        checkpoint={"load": "ckpt"},
    )
    return module._other_curves(config, Facts(saved=saved), iteration)


@pytest.mark.parametrize("style", _STYLES)
def test_a_longer_run_is_refused_where_a_value_to_come_is_another(style: str) -> None:
    """Also where the shorter one was at its end: a rate that has decayed would rise again."""
    flags = {"lr_decay_style": style, "lr_warmup_iters": 2, **_STYLES[style]}
    follows_the_length = style in ("linear", "cosine", "WSD")
    for iteration in (1, 5, 10):
        assert bool(_differences(flags, flags, (10, 20), iteration)) == follows_the_length
        decay = {**flags, "lr_decay_iters": 10}
        assert _differences(decay, decay, (10, 20), iteration) == []
        assert _differences(decay, {**decay, "lr_decay_iters": 15}, (20, 20), iteration) != [] or style == "constant"


def test_a_warmup_that_is_over_is_not_compared() -> None:
    flags = {"lr_decay_style": "constant", "lr_warmup_iters": 2}
    assert _differences(flags, {**flags, "lr_warmup_iters": 3}, (10, 20), 3) == []
    [told] = _differences(flags, {**flags, "lr_warmup_iters": 3}, (10, 20), 2)
    assert ": warmup in samples 12 instead of 8, " in told
    [told] = _differences(flags, {**flags, "decoupled_lr": 0.5}, (10, 20), 3)
    assert ": --decoupled-lr 0.5 instead of None; add" in told


def test_a_weight_decay_that_has_grown_may_stay_there() -> None:
    growing = {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.0, "end_weight_decay": 0.5}
    flags = {"lr_decay_style": "constant"}
    assert "weight decay 0.0 to 0.5 in 80" in _differences(flags | growing, flags | growing, (10, 20), 10)[0]
    assert _differences(flags | growing, {**flags, "weight_decay": 0.5}, (10, 20), 10) != []
    assert _differences({**flags, "weight_decay": 0.5}, {**flags, "weight_decay": 0.5}, (10, 20), 10) == []


def test_a_constant_weight_decay_is_the_same_in_a_longer_run() -> None:
    """Its length changes nothing; that of one which grows does."""
    saved = {**CURVES, "lr_decay_iters": 10, "weight_decay": 0.5}
    flags = {"lr": 1.0, "lr_decay_iters": 10, "weight_decay": 0.5}
    growing = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.5}
    training = {"train_iters": 20, "global_batch_size": 4}
    checkpoint = {"load": "ckpt"}
    config = _config(optimizer=flags, training=training, checkpoint=checkpoint)
    assert module._other_curves(config, Facts(saved=saved)) == []
    config = _config(optimizer={**flags, **growing}, training=training, checkpoint=checkpoint)
    [told] = module._other_curves(config, Facts(saved={**saved, **growing}))
    assert ": weight decay 0.0 to 0.5 in 80 samples instead of 0.0 to 0.5 in 40; add" in told


@pytest.mark.parametrize(
    ("values", "dry_run", "world_size", "given"),
    [
        ({}, False, 3, False),
        ({"world_size": 8}, True, None, False),
        ({"world_size": 8}, False, 3, False),
        ({}, True, 3, False),
        ({"global_batch_size": 4}, False, 3, True),
        ({"micro_batch_size": 4}, False, 3, False),
    ],
)
def test_facts_of_the_launch(
    values: dict[str, Any], dry_run: bool, world_size: int | None, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of ranks is the launcher's, unless a dry run asks about another one."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    facts = module.gather_facts(Typed(values, dry_run=dry_run))
    assert (facts.world_size, facts.global_batch_is_given) == (world_size, given)


@pytest.mark.parametrize(
    ("flags", "typed", "saved", "told"),
    [
        ({}, {}, None, []),
        (
            {"checkpoint": {"use_checkpoint_args": True, "load": "ckpt"}},
            {},
            None,
            ["--use-checkpoint-args changes nothing"],
        ),
        ({"checkpoint": {"use_checkpoint_args": True, "load": "ckpt"}}, {}, {}, []),
        ({"model": {"no_position_embedding": True}}, {}, None, ["--no-position-embedding changes nothing"]),
        (
            {"layout": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}},
            {},
            None,
            ["--attention-dropout 0 with context parallelism"],
        ),
        ({"layout": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}}, {"cp_comm_type": ("a2a",)}, None, []),
        ({"layout": {"context_parallel_size": 2, "cp_comm_type": ("p2p",)}}, {}, None, []),
        ({"layout": {"context_parallel_size": 1, "cp_comm_type": ("a2a",)}}, {}, None, []),
        (
            {"layout": {"device": "cpu"}},
            {"check_before_update": True, "no_triton_kernels": True},
            None,
            [
                "--check-before-update changes nothing here: with --device cpu numbers",
                "--no-triton-kernels changes nothing here: with --device cpu no Triton kernel",
            ],
        ),
        ({"layout": {"device": "cuda"}}, {"check_before_update": True, "no_triton_kernels": True}, None, []),
        ({"layout": {"device": "cpu"}}, {"check_before_update": False}, None, []),
        (
            {"layout": {"tp_comm_overlap": True}, "training": {"fp8_format": "hybrid"}},
            {},
            None,
            ["--tp-comm-overlap changes nothing here: products in FP8"],
        ),
        (
            {"layout": {"tp_comm_overlap": True}, "model": {"transformer_impl": "transformer_engine"}},
            {"transformer_impl": "transformer_engine"},
            None,
            ["--tp-comm-overlap changes nothing here: with --transformer-impl transformer_engine"],
        ),
        (
            {},
            {"transformer_impl": "transformer_engine"},
            None,
            ["--transformer-impl transformer_engine changes nothing here"],
        ),
        ({"model": {"transformer_impl": "transformer_engine"}}, {"transformer_impl": "transformer_engine"}, None, []),
    ],
)
def test_flags_that_change_nothing_are_told(
    flags: dict[str, dict[str, Any]],
    typed: dict[str, Any],
    saved: dict[str, Any] | None,
    told: list[str],
) -> None:
    found = module.warnings_of_flags(Typed(typed), _config(**flags), Facts(saved=saved))
    assert [text.startswith(begin) for text, begin in zip(found, told, strict=True)] == [True] * len(told)


def test_a_field_holds_a_value_unless_its_type_says_that_it_may_hold_none() -> None:
    """In every layout of docs/parity.md."""
    groups = [getattr(Config(), group.name) for group in dataclasses.fields(Config)]
    hints = {name: hint for group in groups for name, hint in get_type_hints(type(group)).items()}
    for case in CASES.values():
        flags = [*f"{RECIPE} {MODELS[case.model]} --seq-length 32 --mock-data --vocab-size 257".split(), *case.flags]
        config = configure(flags, world_size=case.world_size).config
        values = {name: value for group in dataclasses.asdict(config).values() for name, value in group.items()}
        empty = [name for name, value in values.items() if value is None and NoneType not in get_args(hints[name])]
        assert not empty, (case.name, empty)
