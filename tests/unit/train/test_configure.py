"""How a command line becomes a checked configuration: what is told of files, checkpoints and restarts."""

import dataclasses
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.train import configure as module
from megatron_ext.train.configure import configure, configure_for
from megatron_ext.train.pretrain import pretrain
from tests.support.small_models import config_with
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
    found = module._forgetful_restarts(config_with(checkpoint={"save": save, "load": load}))
    assert len(found) == (told is not None)
    assert all(f"torchrun may start the ranks {told}" in text for text in found)


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
