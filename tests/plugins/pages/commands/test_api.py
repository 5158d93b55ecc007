"""The reference has a page for each room, and every public name on it with its signature and docstring."""

import ast
import inspect
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.pages.commands.api import index, main, page, rooms
from megatron_ext.registry import functions, load
from tests.support.syntax import source, tree_of

ROOT = Path(__file__).resolve().parents[4]
PACKAGE = ROOT / "megatron_ext"


@pytest.mark.parametrize("room", rooms())
def test_a_page_has_every_public_name_of_its_room(room: str) -> None:
    text = page(room)
    assert text.startswith(f"# {room}\n")
    for path in rooms()[room]:
        for node in tree_of(source(path)).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert f"\n### {node.name}\n" in text
                assert f"*{path.relative_to(ROOT)}:{node.lineno}*\n" in text
                assert (ast.get_docstring(node) or "") in text


def test_an_entry_has_signature_fields_and_methods() -> None:
    text = page("train")
    assert "def pretrain(config: Configured | Sequence[str], status: RunStatus | None=None, *, callbacks: " in text
    assert "#### Callback.on_step_end\n\n```python\ndef on_step_end(self, trainer: Trainer, result: StepResult)" in text
    assert "- `tokens: int`: Number of tokens that counted in the loss.\n" in text


def test_the_functions_of_the_package_have_a_page() -> None:
    text = page("python")
    for name, place in functions().items():
        function = load(place)
        assert f"\n### {name}\n\n```python\ndef {name}(" in text
        assert (inspect.getdoc(function) or "no docstring") in text
        assert f"- `megatron_ext.{name}`: " in index()


def test_every_module_is_listed_once() -> None:
    rooms_listed = index().partition("\n## [base]")[2]
    listed = [line.split("`")[1] for line in rooms_listed.splitlines() if line.startswith("- `")]
    files = PACKAGE.rglob("*.py")
    assert sorted(listed) == sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files
    )


def test_the_pages_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "api")]) == 0
    written = {path.stem for path in (tmp_path / "api").glob("*.md")}
    assert written == {*rooms(), "python", "README"}
    assert capsys.readouterr().out == f"wrote {len(written)} files to {tmp_path / 'api'}\n"
    with pytest.raises(ConfigurationError, match="attic is no room; there are python, base, checkpoint, cli"):
        main(["attic"])
