"""Every fix that a problem prints is taken at its word: the problem goes, and some fixes later the flags are taken."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.config.parse.arguments import read
from megatron_ext.config.parse.other_flags import OtherOption
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.megatron_lm.megatron_options import earlier_options, megatron_options
from megatron_ext.rules.validate import RULES, problems
from megatron_ext.train.configure import configure
from tests.support.fixes import CommandLine, command_line, fixes, words
from tests.support.guide_launches import make_hf_folder
from tests.support.near_bounds import NEAR
from tests.support.near_flags import FACTS, MORE
from tests.support.wrong_flags import BASE, EXAMPLES, WRONG

# Of the second tier: tests/unit/rules/test_validate.py compares the sentences with the golden ones.
pytestmark = pytest.mark.full

BASES = {"dense": BASE, "experts": f"{BASE} --disable-bias-linear --num-experts 8"}
LINES = (
    *(example.flags for example in EXAMPLES.values()),
    *WRONG,
    *MORE,
    *(flags for lines in NEAR.values() for flags in lines),
)
"""Flags that are added to a base; each of the rules refuses some of them."""

ROUNDS = 5
"""Fixes, one after another, within which a command line is put right."""

ONLY_A_USER_KNOWS = {
    "blends_are_well_formed": "which files are meant, and in which shares",
    "named_files_exist": "where the files are",
    "load_names_checkpoints": "where the checkpoint is",
    "samples_to_skip_can_be_read": "which samples are meant",
    "tasks_can_be_done": "what the file of tasks should say",
}
"""Rules with problems that no flag mends, and what the user knows alone."""


def _problems(line: CommandLine, facts: Facts) -> list[str]:
    typed = read(words(line))
    if typed.problems:
        return list(typed.problems)
    found = dataclasses.replace(
        facts,
        global_batch_is_given="global_batch_size" in typed.values,
        missing_checkpoint=facts.missing_checkpoint if "exit_on_missing_checkpoint" in typed.values else None,
    )
    return problems(resolve(typed.values, found), found)


def _speakers(line: CommandLine, facts: Facts) -> dict[str, str]:
    """Return every problem of the rules, with the rule that says it."""
    config = resolve(read(words(line)).values, facts)
    return {text: rule.__name__ for rule in RULES for text in rule(config, facts)}


def _is_put_right(line: CommandLine, facts: Facts, rounds: int, seen: set[tuple]) -> bool:
    """Return whether one fix after another leads to flags that are taken."""
    found = _problems(line, facts)
    for problem in found if rounds else ():
        for _, fixed in fixes(problem, line):
            key = tuple(sorted(fixed.items()))
            if key not in seen:
                seen.add(key)
                if _is_put_right(fixed, facts, rounds - 1, seen):
                    return True
    return not found


def _wrong_fixes(line: CommandLine, facts: Facts) -> Iterator[str]:
    """Yield each fix of each problem that leaves the problem where it is, or from which no fixes lead on."""
    speakers = _speakers(line, facts)
    for problem in _problems(line, facts):
        if speakers.get(problem) in ONLY_A_USER_KNOWS:
            continue
        printed = fixes(problem, line)
        if not printed:
            yield f"{problem}: prints no fix"
        for text, fixed in printed:
            if facts.world_size is not None and text.startswith("start "):
                continue  # another launch
            if problem in _problems(fixed, facts):
                yield f"{problem}: {text!r} leaves it as it is"
            elif not _is_put_right(fixed, facts, ROUNDS, set()) and not _waits_for_the_user(fixed, facts):
                yield f"{problem}: {text!r} leads to {_problems(fixed, facts)}"
    yield from circles(line, facts)


def circles(line: CommandLine, facts: Facts) -> Iterator[str]:
    """Yield each fix after which the fix of another problem brings the first problem back."""
    first = _problems(line, facts)
    for problem in first:
        for text, fixed in fixes(problem, line):
            found = _problems(fixed, facts)
            for new in found if problem not in found else ():
                for next_text, next_line in fixes(new, fixed) if new not in first else ():
                    if problem in _problems(next_line, facts):
                        yield f"{problem}: {text!r} leads to {new}, and {next_text!r} back again"


def _waits_for_the_user(line: CommandLine, facts: Facts) -> bool:
    speakers = _speakers(line, facts)
    return any(speakers.get(problem) in ONLY_A_USER_KNOWS for problem in _problems(line, facts))


@pytest.mark.parametrize("model", BASES)
def test_every_printed_fix_works(model: str) -> None:
    spoken, wrong = set(), []
    for flags in LINES:
        line = command_line(f"{BASES[model]} {flags}")
        spoken |= set(_speakers(line, Facts()).values()) if not read(words(line)).problems else set()
        wrong += [f"{flags}: {text}" for text in _wrong_fixes(line, Facts())]
    assert wrong == []
    silent = {rule.__name__ for rule in RULES} - spoken
    assert silent <= OF_FACTS | (OF_DENSE_MODELS if model == "experts" else set())


OF_DENSE_MODELS = {"expert_flags_need_experts", "transformer_engine_is_installed"}


OF_FACTS = {
    "plugins_are_installed",
    "matrices_have_a_rule",
    "nothing_needed_is_missing",
    "named_files_exist",
    "samples_to_skip_can_be_read",
    "vocabulary_covers_the_tokenizer",
    "model_is_the_one_to_load",
    "model_can_be_exported",
    "load_names_checkpoints",
    "model_is_that_of_the_checkpoint",
    "moments_are_kept_as_in_the_checkpoint",
    "states_are_in_the_checkpoint",
    "ranks_are_those_of_the_launch",
}
"""Rules that speak of what is found outside of the flags (a user's own layers), or of flags that every base has."""


@pytest.mark.parametrize("case", range(len(FACTS)), ids=[flags for flags, _ in FACTS])
def test_every_printed_fix_works_with_what_is_found_outside_of_the_flags(case: int) -> None:
    flags, found = FACTS[case]
    assert list(_wrong_fixes(command_line(f"{BASE} {flags}"), Facts(**found))) == []


def test_what_is_missing_is_named_with_values_that_work() -> None:
    line = command_line("--mock-data --vocab-size 1000 --device cpu --train-iters 3")
    [problem] = _problems(line, Facts())
    assert [_problems(fixed, Facts()) for _, fixed in fixes(problem, line)] == [[]]


def test_flags_that_a_folder_contradicts_can_be_left_out(tmp_path: Path) -> None:
    """As the problem says: they are taken from the folder, the vocabulary of NullTokenizer, too."""
    make_hf_folder(tmp_path / "Llama-8B")
    base = "--seq-length 64 --micro-batch-size 1 --lr 1e-3 --train-iters 3 --mock-data --device cpu --dry-run"
    line = command_line(f"{base} --load-hf {tmp_path}/Llama-8B --tokenizer-type NullTokenizer --vocab-size 511")
    with pytest.raises(ConfigurationError, match=r"--vocab-size is 511 and there 128256\. Leave these flags out"):
        configure(words(line))
    del line["--vocab-size"]
    assert configure(words(line)).config.data.vocab_size == 128256


REFUSED = [option for option in (*megatron_options().values(), *earlier_options().values()) if not option.accepted]


@pytest.mark.parametrize("model", BASES)
def test_the_fix_of_a_refused_flag_works(model: str) -> None:
    """Of Megatron's flags that are refused: whatever the reason says to use is taken, or mended by its own fix."""
    wrong, printed = [], 0
    for option in REFUSED:
        line = {**command_line(BASES[model]), option.flag: _words(option)}
        for problem in _problems(line, Facts()):
            for text, fixed in fixes(problem, line):
                printed += 1
                if not _is_put_right(fixed, Facts(), ROUNDS, set()):
                    wrong.append(f"{problem}: {text!r} leads to {_problems(fixed, Facts())}")
        wrong += circles(line, Facts())
    assert wrong == []
    assert printed > 200  # fewer with everything that is built


def _words(option: OtherOption) -> tuple[str, ...]:
    """Return words for a flag that do not ask for nothing."""
    return ("7",) if option.most_values else ()


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ("--moe-aux-loss-coeff 1.0", "add --num-experts 8 --disable-bias-linear"),
        ("--mrope-section 1", "use --position-embedding-type rope --use-rope-scaling"),
        ("--rl-persist-cuda-graphs", "use --cuda-graph-impl full_iteration for CUDA graphs of training"),
        ("--world-size 4 --expert-model-parallel-size 4", "add --num-experts 8 --disable-bias-linear"),
    ],
)
def test_these_fixes_are_whole(flags: str, fix: str) -> None:
    """One application is enough."""
    line = command_line(f"{BASE} {flags}")
    [problem] = _problems(line, Facts())
    assert _problems(dict(fixes(problem, line))[fix], Facts()) == []
