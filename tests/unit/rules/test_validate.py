"""Every rule speaks where it should, names flags and values, and proposes a setting that works."""

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import rules
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options, options_by_name
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.device import hardware_queues
from megatron_ext.parts.catalogue import Parameter, parameters
from megatron_ext.parts.own_parameters import with_own_parameters
from megatron_ext.plugins.prove.compared_models import MODELS
from megatron_ext.rules import validate
from megatron_ext.rules.run_rules import values_are_in_range, values_have_what_they_need
from megatron_ext.rules.validate import RULES, problems
from megatron_ext.train.configure import configure, gather_facts
from tests.support import near_bounds
from tests.support.errors_page import answers, errors_page
from tests.support.golden_text import section
from tests.support.wrong_flags import BASE, EXAMPLES, SEVERAL, WRONG

ROOT = Path(__file__).resolve().parents[3]


def found(line: str, facts: Facts | None = None) -> list[str]:
    facts = facts or Facts()
    return problems(resolve(parse(shlex.split(f"{BASE} {line}")).values, facts), facts)


def test_the_base_launch_has_no_problem():
    assert found("") == answers("") == []


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_wrong_flag_is_named_and_what_the_message_says_puts_it_right(title: str, tmp_path: Path):
    wrong, right = EXAMPLES[title]
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    assert answers(wrong) != []
    assert answers(f"{wrong} {right.replace('EXISTING', str(tmp_path / 'corpus'))}") == []


def test_the_page_of_errors_is_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch):
    """With GPUs, with every package, without a compiler, under a launcher."""
    here = errors_page()
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", (ROOT,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert errors_page() == here


@pytest.mark.parametrize("line", WRONG)
def test_one_mistake_is_one_problem(line: str):
    """Its words are in tests/golden/problems.txt."""
    assert len([p for p in found(line) if not p.startswith("the vocabulary is unknown")]) == 1


@pytest.mark.parametrize(
    "line",
    [
        "--world-size 0 --num-virtual-stages-per-pipeline-rank 2",
        "--disable-bias-linear --num-experts 8 --world-size 8 --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2 --expert-model-parallel-size 0",
        "--pipeline-model-parallel-size 0 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24 "
        "--rampup-batch-size 4 4 100",
        "--bf16 --fp8-format e4m3 --context-parallel-size 0",
    ],
)
def test_a_size_of_zero_is_named_and_divides_nothing(line: str):
    assert any(" 0 is below 1; use 1 or more" in problem for problem in found(line))


def test_an_empty_command_line_lists_everything_that_is_needed():
    listed = problems(resolve({}, Facts()), Facts())
    assert len(listed) == 4
    for flag in ("--num-layers", "--hidden-size", "--seq-length", "--micro-batch-size", "--lr", "--train-iters"):
        assert any(flag in problem for problem in listed), flag


def test_no_rule_raises_whatever_the_numbers():
    """Each number of the base launch in turn is missing, zero and negative: rules report, they never fail."""
    base = parse(shlex.split(f"{BASE} --world-size 4 --tensor-model-parallel-size 2")).values
    numbers = [name for name, value in base.items() if not isinstance(value, bool | str)]
    derived = [
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "global_batch_size",
        "kv_channels",
    ]
    for name in [*numbers, *derived]:
        for wrong in (0, -1):
            allowed = name == "lr" and wrong == 0
            assert allowed or problems(resolve({**base, name: wrong}, Facts()), Facts()) != [], (name, wrong)
        assert isinstance(problems(resolve({k: v for k, v in base.items() if k != name}, Facts()), Facts()), list)


def test_absurd_sizes_are_answered_at_once():
    huge = 10**12
    for name in ("num_layers", "num_attention_heads", "global_batch_size", "world_size"):
        start = time.process_time()
        # Rules get such values from code alone: of flags and files they are refused as they are read.
        for line in (
            "--world-size 3 --tensor-model-parallel-size 2",
            "--pipeline-model-parallel-size 7 --world-size 7",
        ):
            values = parse(shlex.split(f"{BASE} {line}")).values | {name: huge}
            problems(resolve(values, Facts()), Facts())
        assert time.process_time() - start < 2, name


def test_layers_of_another_package_keep_nothing_that_is_gathered() -> None:
    line = "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --sequence-parallel-keep-gathered"
    facts = Facts(cuda_available=True, packages=frozenset({"transformer_engine"}))
    values = parse(shlex.split(f"{BASE} {line} --transformer-impl transformer_engine")).values
    assert problems(resolve(values, facts), facts) == [
        "--sequence-parallel-keep-gathered does not work with --transformer-impl transformer_engine; leave one of them "
        "out"
    ]


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    facts = gather_facts(parse(shlex.split(BASE)))
    assert found("--torch-compile", facts) == [
        "--torch-compile needs the C++ compiler no-such-compiler ($CXX); install it, or leave the switch out"
    ]


def _with_mix(optimizer: str, by_element: bool | None) -> Config:
    """Return a configuration whose layers have a parameter of a new part."""
    config = resolve(parse(shlex.split(f"{BASE} --optimizer {optimizer}")).values, Facts())
    mix = Parameter("mix", (8, 6), 0, "zeros", by_element=by_element)
    return with_own_parameters(config, lambda *_: [mix])


@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon", "adafactor", "adam"])
def test_a_matrix_with_no_rule_is_named_before_the_start(optimizer: str):
    said = problems(_with_mix(optimizer, None), Facts())
    name = (
        f"--optimizer {optimizer} updates whole matrices, and nothing says whether decoder.layers.0.mix [8, 6] is one"
    )
    assert said == [] if optimizer == "adam" else said[0].startswith(name)
    for by_element, update in (True, "element"), (False, "matrix"):
        config = _with_mix(optimizer, by_element)
        assert problems(config, Facts()) == []
        assert next(one.update for one in parameters(config) if one.name.endswith(".mix")) == update


@pytest.mark.parametrize("model", MODELS)
def test_each_matrix_of_our_parts_has_a_rule(model: str):
    config = resolve(parse(shlex.split(f"{BASE} {MODELS[model]}")).values, Facts())
    assert [one.name for one in parameters(config) if one.update_is_unknown] == []


PROGRAM = [sys.executable, str(ROOT / "pretrain_gpt.py")]


def timed(arguments: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Return the seconds of computing, which do not count what else the machine does, and what the program printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result


def test_an_embedding_may_decay_to_nothing_while_the_rest_does_not():
    assert found("--min-lr 1e-4 --decoupled-lr 5e-5 --decoupled-min-lr 0") == []
    assert len(found("--min-lr 1e-4 --decoupled-lr 5e-5")) == 1


@pytest.mark.parametrize("arguments", [["--help"], [*shlex.split(BASE), "--world-size", "8"]], ids=["help", "dry-run"])
def test_help_and_dry_run_answer_within_a_second_without_torch(arguments: list[str]):
    seconds, result = min((timed(arguments) for _ in range(2)), key=lambda run: run[0])  # the first may compile
    assert result.returncode == 0
    assert seconds < 1.0
    imports = subprocess.run(
        [sys.executable, "-X", "importtime", *PROGRAM[1:], *arguments], capture_output=True, text=True, check=True
    ).stderr
    assert "megatron_ext.config" in imports
    assert not any(line.split("|")[-1].strip() in ("torch", "numpy", "megatron.core") for line in imports.splitlines())


WRONG_LINES = [*(example.flags for example in EXAMPLES.values()), "--hiden-size 4", SEVERAL]


@pytest.mark.parametrize("line", WRONG_LINES[-1:])
def test_a_wrong_command_line_ends_the_process_with_64_in_two_seconds(line: str):
    seconds, result = timed(shlex.split(f"{BASE} {line}"))
    assert result.returncode == 64
    assert seconds < 2.0
    assert "Traceback" not in result.stderr


def test_each_wrong_line_ends_with_64_before_torch_is_loaded():
    """In one interpreter, for starting it takes longer than what is asked."""
    command = [sys.executable, "-m", "tests.support.command_line_exits"]
    lines = json.dumps([shlex.split(f"{BASE} {line}") for line in WRONG_LINES])
    done = subprocess.run(command, input=lines, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, (code, seconds, said) in zip(WRONG_LINES, json.loads(done.stdout), strict=True):
        assert code == 64, line
        assert seconds < 1.0, line  # torch alone takes longer
        assert "Traceback" not in said, line
        assert said, line


@pytest.mark.parametrize("switch", ["--no-position-embedding", "--no-position-embedding=true"])
def test_no_position_embedding_changes_nothing_with_rope(switch: str, tmp_path: Path):
    """As in Megatron, whose Mixtral script has the pair; the type may also come from a file."""
    (tmp_path / "run.yaml").write_text("position_embedding_type: rope\n")
    plain = configure(shlex.split(f"{BASE} --position-embedding-type rope"))
    assert plain.typed.warnings == ()
    for kind in ("--position-embedding-type rope", f"--config {tmp_path}/run.yaml"):
        both = configure(shlex.split(f"{BASE} {kind} {switch}"))
        assert replace(both.config.model, no_position_embedding=False) == plain.config.model
        [warning] = both.typed.warnings
        assert warning.startswith("--no-position-embedding changes nothing with --position-embedding-type rope")


def test_no_position_embedding_is_judged_as_by_megatrons_own_source():
    """The wheel's condition, read and evaluated for each type that we have."""
    source = (Path(importlib.util.find_spec("megatron.core").origin).parents[1] / "training/arguments.py").read_text()  # pyright: ignore
    [condition] = [
        ast.unparse(node.test)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and "--no-position-embedding is deprecated" in ast.unparse(node.body[0])
    ]
    for kind in options_by_name()["position_embedding_type"].choices or ():
        args = SimpleNamespace(add_position_embedding=False, position_embedding_type=kind)
        refused = eval(condition, {"args": args})
        assert bool(found(f"--no-position-embedding --position-embedding-type {kind}")) == refused, kind


@pytest.mark.parametrize("subject", near_bounds.SUBJECTS)
def test_the_whole_answer_on_both_sides_of_every_bound(subject: str) -> None:
    """The last value that works has no problem, and the first that does not has all of its words."""
    expected = section("problems.txt", subject)
    assert f"## {subject}\n\n{near_bounds.answers(subject)}" == expected, "python tests/golden/regenerate.py"


@pytest.mark.parametrize("name", [option.name for option in options() if option.at_least is not None])
def test_a_bound_is_the_least_value_that_works(name: str) -> None:
    """A bound of 0 is a bound."""
    option = options_by_name()[name]
    base = resolve(parse(shlex.split(BASE)).values, Facts())
    group = getattr(base, option.group)
    assert option.at_least is not None
    for value, refused in ((option.at_least, False), (option.at_least - 1, True), (option.at_least - 0.5, True)):
        config = replace(base, **{option.group: replace(group, **{name: value})})
        shown = f"{value:g}" if isinstance(value, float) else value
        said = f"{option.flag} {shown} is below {option.at_least}; use {option.at_least} or more"
        assert (said in list(values_are_in_range(config, Facts()))) == refused


@pytest.mark.parametrize("name", [option.name for option in options() if option.positive or option.share])
def test_a_share_is_below_1_and_what_must_be_above_0_is(name: str) -> None:
    option = options_by_name()[name]
    base = resolve(parse(shlex.split(BASE)).values, Facts())
    for value in (-0.5, 0.0, 1e-9, 0.999, 1.0):
        changed = replace(getattr(base, option.group), **{name: value})
        found = list(values_are_in_range(replace(base, **{option.group: changed}), Facts()))
        if option.positive:
            said = f"{option.flag} {value:g} is not above 0; use "
            assert [text.startswith(said) and text.endswith(", or another positive number") for text in found] == (
                [True] if value <= 0 else []
            )
        if option.share:
            said = f"{option.flag} {value:g} is not at least 0 and below 1; use {option.default:g}"
            assert (said in found) == (not 0 <= value < 1)


@pytest.mark.parametrize("name", [option.name for option in options() if option.needs])
def test_what_a_value_needs_is_named_with_what_there_is(name: str) -> None:
    option = options_by_name()[name]
    base = resolve(parse(shlex.split(BASE)).values, Facts())

    def answers_to(**values: Any) -> list[str]:
        config = base
        for field, value in values.items():
            group = options_by_name()[field].group
            config = replace(config, **{group: replace(getattr(config, group), **{field: value})})
        return [said for said in values_have_what_they_need(config, Facts()) if said.startswith(option.flag)]

    for value, need in option.needs:
        other = options_by_name()[need.field]
        given = option.flag if option.is_switch else f"{option.flag} {value}"
        assert not any(need.words in said for said in answers_to(**{name: value, need.field: need.value}))
        wrong = not need.value if other.is_switch else "other"
        if other.is_switch or need.value is None:
            fix = f"{given} needs {need.words}; {'add' if need.value else 'leave out'} {other.flag}"
        else:
            fix = f"{given} needs {need.words}, but {other.flag} is other; use {other.flag} {need.value}"
        assert fix in answers_to(**{name: value, need.field: wrong})
        assert answers_to(**{name: "neither", need.field: wrong}) == []


def test_what_was_not_read_is_neither_missing_nor_judged() -> None:
    """A flag whose name begins with that of another one is another flag."""
    empty = resolve({}, Facts(unread=frozenset({"hidden_size", "lr"})))
    [missing, *_] = problems(empty, Facts(unread=frozenset({"hidden_size", "lr"})))
    assert missing == (
        "missing: --num-layers, --num-attention-heads, --seq-length, --micro-batch-size; for example --num-layers 12 "
        "--num-attention-heads 12 --seq-length 1024 --micro-batch-size 4"
    )
    line = "--save a --save-interval 10 --save-retain-interval 11"
    for unread, silent in (("save", False), ("save_retain_interval", True), ("save_interval", True), ("load", False)):
        said = near_bounds.found(line, Facts(unread=frozenset({unread})))
        assert (said == []) == silent, unread


def test_each_rule_of_a_room_is_asked() -> None:
    """A rule that no list holds would never speak."""
    rooms = [importlib.import_module(f"{rules.__name__}.{one.name}") for one in pkgutil.iter_modules(rules.__path__)]
    for room in (one for one in rooms if hasattr(one, "RULES") and one.__name__ != validate.__name__):
        there = {
            name
            for name, value in vars(room).items()
            if inspect.isfunction(value)
            and value.__module__ == room.__name__
            and not name.startswith("_")
            and list(inspect.signature(value).parameters) == ["config", "facts"]
        }
        assert there - {"split_is_right"} == {rule.__name__ for rule in room.RULES}
        assert set(room.RULES) <= set(RULES)
    assert len(set(RULES)) == len(RULES)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_a_program_gives_is_a_time(minutes: float) -> None:
    """The command line takes no inf; a configuration that is made in Python has whatever it was given."""
    values = {**parse(shlex.split(BASE)).values, "distributed_timeout_minutes": minutes}
    said = f"--distributed-timeout-minutes {minutes:g} is not above 0; use --distributed-timeout-minutes 10"
    assert said in problems(resolve(values, Facts()), Facts())
