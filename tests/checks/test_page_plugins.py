"""Each plugin has a page of the documentation, which the site lists."""

from pathlib import Path

import pytest
import yaml

from megatron_ext.registry import Plugin, plugins

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("plugin", plugins().values(), ids=lambda plugin: plugin.name)
def test_a_plugin_has_a_page(plugin: Plugin) -> None:
    page = ROOT / plugin.page
    assert plugin.page
    assert page.is_file()
    if page.parent.name == "plugins":
        assert page.stem == plugin.name
        assert f"plugins/{plugin.name}/" in page.read_text()


def test_the_site_lists_the_pages_of_plugins() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = _pages(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    assert {plugin.page.removeprefix("docs/") for plugin in plugins().values()} <= listed


def _pages(entry: object) -> set[str]:
    if isinstance(entry, str):
        return {entry}
    inner = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
    return {page for one in inner for page in _pages(one)}
