"""Takes what a problem advises at its word: reads the fixes that its text prints, and applies them to a command line.

    for fixed in fixes("--num-layers 9 is not divisible by ...; use --num-layers 8 or 10", command_line):
        ...

A command line is flag -> its words. Pronouns mean what a reader takes them for: "it" is the flag that the problem
begins with, "that" the one that it misses, "them" all that it begins with.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from megatron_ext.config.parse.options import Option, options_by_flag, read_texts

CommandLine = Mapping[str, tuple[str, ...]]

_FLAG = re.compile(r"--[a-z][\w-]*")
_WORD = r"(?:'[^']*'|(?:[^\s,;()]|,(?=\d))+)"
_LIST = re.compile(rf"({_WORD}(?:, (?!or ){_WORD})*(?: or (?!--)(?!(?:more|less)\b){_WORD})?)")
_ONE_OF = ("keep one", "leave one", "give one", "give both or neither")
ONLY_A_USER_HAS = {
    "--load": ("/dev",),
    "--tokenizer-type": ("ByteTokenizer",),
    "--vocab-size": ("1000",),
    "--data-path": ("README.md",),
    "--train-data-path": ("README.md",),
    "--valid-data-path": ("README.md",),
    "--tokenizer-model": ("README.md",),
    "--sample-prompts": ("README.md",),
    "--skip-samples": ("5",),
    "--ddp-bucket-size": ("1000",),
    "--embedding-init-method-std": ("0.02",),
    "--save": ("checkpoints",),
    "--hybrid-layer-pattern": ("M*M*",),
    "--save-interval": ("10",),
    "--ckpt-step": ("5",),
}
"""Flags that a fix names without a value, or with a word in capitals, and a value."""


def command_line(text: str) -> dict[str, tuple[str, ...]]:
    """Return a command line as flag -> words; of a repeated flag the last counts."""
    found: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in shlex.split(text):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = (value,) if equals else ()
        else:
            found[flag] = (*found[flag], word)
    return found


def words(line: CommandLine) -> list[str]:
    """Return the words of a command line."""
    return [
        word
        for flag, values in line.items()
        for word in ([f"{flag}={values[0]}"] if len(values) == 1 and flag in options_by_flag() else [flag, *values])
    ]


def fixes(problem: str, line: CommandLine) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
    """Return every fix that a problem prints, in words, with the command line that it makes; the flag of a problem
    that says "is not supported" is left out in each."""
    refused, _, reason = problem.partition(" is not supported: ")
    if reason:
        line = _without(line, [refused.split(" ")[0]])
    what, mark, advice = problem.rpartition("; ")
    if not mark:
        what, _, advice = problem.rpartition(": ")
    advice = re.sub(r" \([^)]*\)|, which .*?(?=, or |$)", "", advice)
    subject = [flag for flag in dict.fromkeys(_FLAG.findall(what)) if flag in line]
    found = []
    for part in re.split(r", or (?=use |leave |add |give |keep |--|stages|start)|, (?=start |to train)", advice):
        for text in re.split(r"(?<=\S) or (?=--)", part) if part.startswith("stages") else [part]:
            found += [(text, fixed) for fixed in _followed(text, what, subject, line)]
    return found


def _followed(text: str, what: str, subject: Sequence[str], line: CommandLine) -> Iterator[dict[str, tuple[str, ...]]]:
    example = re.match(r".*for example ([^-].*)", text)
    if text.startswith(_ONE_OF):
        for flag in subject:
            yield _without(line, [flag])
    elif text == "swap them":
        one, other = subject[:2]
        yield {**line, one: line[other], other: line[one]}
    elif example:
        yield {**line, subject[0]: tuple(shlex.split(example[1]))}
    elif match := re.match(r"use an increment of ([\d, or]+)|use a start of (\d+)", text):
        start, increment, samples = line[subject[0]]
        if match[2]:
            yield {**line, subject[0]: (match[2], increment, samples)}
        yield from ({**line, subject[0]: (start, n, samples)} for n in re.findall(r"\d+", match[1] or ""))
    elif text == "leave the virtual stages out":
        yield _without(line, [flag for flag in subject if "-virtual-" in flag])
    elif re.search(r"leave (it|the \w+) out", text):
        left = _without(line, subject[:1])
        yield from _set(text, left) if _FLAG.search(text) else [left]
    elif text.startswith("leave them out"):
        yield _without(line, subject)
    elif text.startswith("leave "):
        yield _without(line, _FLAG.findall(text))
    elif re.match(r"add (it|that|one of them)\b", text):
        yield from _added(re.split(r"belongs? to |needs? |without ", what, maxsplit=1)[-1], line, "one of" in text)
    elif match := re.match(r"start ([\d, or]+) ranks", text):
        yield from ({**line, "--world-size": (n,)} for n in re.findall(r"\d+", match[1]))
    elif match := re.fullmatch(r"add (--\S+(?:, --\S+)* or --\S+)", text):
        yield from ({**line, flag: ()} for flag in _FLAG.findall(match[1]))
    elif " alone" in text or text.startswith("keep "):
        kept = _FLAG.findall(text) or subject[:1]
        yield _without(line, [flag for flag in subject if flag not in kept])
    elif _FLAG.search(text):
        yield from _set(text, line)
    elif not subject:
        return  # "use a GPT" is no fix of these flags
    elif match := re.match(r"use (?:(\d+) to (\d+)|ranks from (\d+) to (\d+))", text):
        yield from ({**line, subject[0]: (n,)} for n in match.groups() if n is not None)
    elif match := re.match(rf"use (?!a ){_LIST.pattern}", text):
        yield from ({**line, subject[0]: (value,)} for value in _values(match[1]))


def _without(line: CommandLine, flags: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {name: values for name, values in line.items() if name not in flags}


def _added(needed: str, line: CommandLine, one_of: bool) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the command line with the first flag of what is needed, or with each."""
    for match in list(_FLAG.finditer(needed))[: None if one_of else 1]:
        flag, option = match[0], options_by_flag()[match[0]]
        value = re.match(rf" ({_WORD})", needed[match.end() :])
        yield {**line, flag: () if option.is_switch else (value[1],) if value else _example(option)}


def _set(text: str, line: CommandLine) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the command line with the flags of a text, once for each value that it lists; those after "instead of" are
    left out."""
    text, _, instead = text.partition(" instead of ")
    choices: list[list[tuple[str, tuple[str, ...]]]] = []
    for match in _FLAG.finditer(text):
        flag, option = match[0], options_by_flag().get(match[0])
        if option is None:
            return  # of the program itself: a file, or --dry-run, which is no fix
        after = _LIST.match(text[match.end() + 1 :])
        listed = [value for value in _values(after[1] if after else "") if _is_one(option, value)]
        if option.is_switch:
            choices.append([(flag, ())])
        else:
            choices.append([(flag, (value,)) for value in listed] or [(flag, _example(option))])
    for chosen in product(*choices):
        yield {**_without(line, _FLAG.findall(instead)), **dict(chosen)}


def _example(option: Option) -> tuple[str, ...]:
    """Return a value of an option that is named without one: a user's own, or the usual one.

    Raises:
        KeyError: there is none, so that the fix says too little.
    """
    usual = option.default if option.default is not None else option.required
    return ONLY_A_USER_HAS[option.flag] if usual is None else (str(usual),)


def _is_one(option: Option, text: str) -> bool:
    """Return whether a word is a value of an option, and no prose or placeholder."""
    placeholder = text.isalpha() and text.isupper() and text not in (option.choices or ())
    if not text or placeholder or text in ("and", "together", "with", "which", "as"):
        return False
    try:
        read_texts(option, [text])
    except ValueError:
        return False
    return True


def _values(listed: str) -> list[str]:
    return [value.strip("'") for value in re.split(r", | or ", listed)]
