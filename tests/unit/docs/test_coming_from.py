"""The commands of docs/coming_from are taken as they stand, and are what its configuration files mean."""

import re
from pathlib import Path

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options_by_flag
from megatron_ext.plugins.migrate.translate import read, translate
from tests.support.command_blocks import DOCS, blocks
from tests.support.guide_launches import dry_run, launches, make_hf_folder

PAGES = {page.stem: page for page in sorted((DOCS / "coming_from").glob("*.md"))}
CONFIGURED = [name for name, page in PAGES.items() if any(each.language in ("json", "yaml") for each in blocks(page))]


def launch(name: str) -> tuple[list[str], list[str]]:
    """The one training of a page."""
    [found] = [each for block in blocks(PAGES[name]) if block.language == "bash" for each in launches(block.text)]
    return found


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders that --load-hf names, below the working directory."""
    monkeypatch.chdir(tmp_path)
    for page in PAGES.values():
        for name in re.findall(r"--load-hf (\S+\d[bB]\S*)", page.read_text()):
            make_hf_folder(Path(name))


def test_every_program_has_a_page() -> None:
    linked = re.findall(r"^\| \[.+?\]\(coming_from/(\w+)\.md\)", (DOCS / "coming_from.md").read_text(), re.MULTILINE)
    assert sorted(linked) == sorted(PAGES)
    assert len(PAGES) == 10


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("name", PAGES)
def test_its_command_is_taken(name: str) -> None:
    launcher, flags = launch(name)
    assert launcher[0] == "torchrun"
    assert not parse(flags).warnings
    assert dry_run(launcher, flags).layout.world_size in (4, 8, 16, 64)


@pytest.mark.parametrize("name", CONFIGURED)
def test_its_configuration_means_the_flags_of_the_command(name: str, tmp_path: Path) -> None:
    [block] = [each for each in blocks(PAGES[name]) if each.language in ("json", "yaml")]
    file = tmp_path / f"file.{block.language}"
    file.write_text(block.text)
    launcher, flags = launch(name)
    ranks = int(launcher[launcher.index("--nproc-per-node") + 1]) if block.kind == "deepspeed" else None
    result = translate(block.kind, read(str(file)), ranks)
    assert not [key.name for key in result.keys if key.became == "unknown"]
    meant, written = parse(result.words()).values, parse(flags).values
    assert meant
    assert {name: written.get(name) for name in meant} == meant


def test_every_page_has_a_table_of_flags_that_exist() -> None:
    of_others = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"}
    of_tools = {"--data-format", "--data-path", "--world-size", "--from", "--ckpt-convert-format"}
    for name, page in PAGES.items():
        rows = re.findall(r"^\| .* \| (.*) \|$", page.read_text(), re.MULTILINE)
        here = {word for row in rows for word in re.findall(r"--[\w-]+", row)}
        assert len(here) >= 3, name
        assert here - set(options_by_flag()) - of_others - of_tools == set(), name
