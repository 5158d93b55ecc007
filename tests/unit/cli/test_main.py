"""`megatron-ext` and the scripts in tools/ are the same functions, and each shows an example."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.cli.main import COMMANDS, command, help_text
from megatron_ext.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]
# What belongs to the repository and not to a user: they compare commits, and write its docs and its corpus.
OF_THE_CHECKOUT = {
    "command",
    "draw_techniques",
    "loss_compare",
    "make_docs",
    "parity_table",
    "python_corpus",
    "recipes",
}
OF_THE_COMMAND = {"new", "torchrun", "pretrain", "api", "recipes"}
# What one does with a trained model lies in tasks/: script by command.
IN_TASKS = {"tasks": "main", "generate": "generate"}
TOOLS = [name for name in COMMANDS if name not in OF_THE_COMMAND]


def test_every_tool_is_a_command_and_thin() -> None:
    scripts = {path.stem: path for path in (ROOT / "tools").glob("*.py") if path.stem not in OF_THE_CHECKOUT}
    scripts |= {name: ROOT / "tasks" / f"{script}.py" for name, script in IN_TASKS.items()}
    command_of = {
        module.rpartition(".")[2]: name for name, (module, _) in COMMANDS.items() if name not in OF_THE_COMMAND
    }
    assert command_of.keys() == scripts.keys()
    for name, path in scripts.items():
        text = path.read_text()
        assert f"from {COMMANDS[command_of[name]][0]} import main\n" in text or f'start("{command_of[name]}")\n' in text
        assert len(text.splitlines()) < 20


@pytest.mark.parametrize("name", TOOLS)
def test_help_ends_with_examples(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"megatron-ext {name}"])
    if name == "prepare-cache":  # takes the flags of the training; its text is its docstring
        assert command(name)(["--help"]) == 0
        return
    with pytest.raises(SystemExit, match="0"):
        command(name)(["--help"])
    shown = capsys.readouterr().out
    assert f"usage: megatron-ext {name} " in shown
    assert re.search(rf"\nexamples:\n  .*megatron-ext {name} ", shown), shown


def test_the_commands_are_listed() -> None:
    listed = re.findall(r"^  ([a-z-]+)  ", help_text(), re.MULTILINE)
    assert listed == list(COMMANDS)


def test_a_wrong_command_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigurationError, match="plon is not a command; did you mean plan"):
        command("plon")
    ended = subprocess.run([sys.executable, "-m", "megatron_ext", "plon"], cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == 64


NAMED = re.compile(r"(?:`|^ *|\| )megatron-ext ([a-z]+(?:-[a-z]+)*)\b", re.MULTILINE)
LAUNCHED = re.compile(r"-m megatron_ext ([a-z]+(?:-[a-z]+)*)\b")


def test_every_command_that_a_page_or_a_message_names_is_there() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "megatron_ext").rglob("*.py")}
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "examples").rglob("*.sh")}
    named = {name: set(NAMED.findall(text)) | set(LAUNCHED.findall(text)) for name, text in texts.items()}
    unknown = {name: words - COMMANDS.keys() for name, words in named.items() if words - COMMANDS.keys()}
    assert unknown == {}
    found = set().union(*named.values())
    assert COMMANDS.keys() - found <= {"replay-step"}, "a command that nobody tells of"


def test_no_page_or_message_sends_a_user_to_a_script_that_is_a_command() -> None:
    pages = {path: path.read_text() for path in (*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"))}
    scripts = "|".join(path.stem for path in (ROOT / "tools").glob("*.py") if path.stem not in OF_THE_CHECKOUT)
    for path, text in pages.items():
        if path.name not in ("tour.md", "decisions.md"):
            found = re.search(rf"python (?:tools/(?:{scripts})|tasks/(?:main|generate)|pretrain_gpt)\.py", text)
            assert found is None, (path, found)
            found = re.search(rf"`(?:{scripts})(?:\.py)? (?:--|to-|from-)|(?<![/\w`])(?:{scripts})\.py\b", text)
            assert found is None or path.parts[-2] == "coming_from", (path, found)


def _messages(path: Path) -> list[str]:
    """The strings of a module but for docstrings and the comments on attributes."""
    tree = ast.parse(path.read_text())
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in comments]
    return [node.value for node in texts if isinstance(node.value, str)]


def test_messages_name_commands_that_a_wheel_has() -> None:
    """A wheel has no tools/ and no tasks/, and a program has one name. Megatron-LM's own scripts are its own."""
    scripts = "|".join(path.stem for path in (ROOT / "tools").glob("*.py") if path.stem not in OF_THE_CHECKOUT)
    for path in sorted((ROOT / "megatron_ext").rglob("*.py")):
        if path.name in ("reference.py", "commandline.py"):
            continue  # one writes a page of the repository, the other reads the examples of docstrings
        for text in _messages(path):
            assert re.search(r"(tools|tasks)/\w+\.py", text) is None, (path, text)
            assert re.search(rf"(?<!Megatron-LM's )\b(?:{scripts})\.py", text) is None, (path, text)
            assert "python pretrain_gpt.py" not in text, (path, text)
            for name in re.findall(r"(?<![\w/`])megatron-ext ([a-z]+(?:-[a-z]+)*) (?=--|\{|to-|from-|again)", text):
                assert name in COMMANDS, (path, text)
