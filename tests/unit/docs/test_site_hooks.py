"""The site is built from the pages without a warning: no dead link or anchor, no page outside of the navigation."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.plugins.pages.commands import api
from tools.make_docs import PAGES

# Of the second tier: tests/checks follows the links of pages.

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None,
        reason="mkdocs-material is not installed; pip install -r requirements-dev.txt",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in ROOT.glob("docs/**/*.md")}
    pages |= {Path(name).stem for name in PAGES} | {f"api/{room}" for room in api.rooms()}
    pages |= {"contributing", "benchmarks", "api"}
    assert [page for page in pages if page != "index" and not (site / page / "index.html").is_file()] == []


def test_links_to_files_of_the_repository_lead_to_copies(site: Path) -> None:
    for page in site.rglob("index.html"):
        for link in re.findall(r'href="((?:\.\./)*files/[^"#]+)"', page.read_text()):
            assert (page.parent / link).is_file(), (page, link)
    assert (site / "files/examples/slurm/pretrain.sbatch.txt").is_file()


def test_nothing_is_fetched_from_elsewhere_and_no_list_or_block_is_left_as_text(site: Path) -> None:
    for page in site.rglob("index.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="(?:https?:)?//[^"]*"', text), page
        article = text.split("<article", 1)[-1].split("</article>")[0]
        if "api" not in page.parts:  # docstrings are no Markdown
            assert "```" not in article, page
            for paragraph in re.findall(r"<p>(.*?)</p>", article, re.DOTALL):
                assert not re.search(r"\n\s*(?:- |\d\. |\|)", paragraph), (page, paragraph[:100])
