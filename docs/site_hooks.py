"""What `mkdocs build` does beyond Markdown: makes the reference, and takes files of the repository that pages link to.

Nothing is written into docs/. A link that leads out of docs/ becomes one to a copy in the site, README.md's become
links to the first page, CONTRIBUTING.md is a page, and so is the list of the recorded results.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ext.plugins.pages.commands import api  # noqa: E402
from tools.make_docs import PAGES  # noqa: E402

_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s:]+)\)")
_MADE_OF = {"contributing.md": "CONTRIBUTING.md", "benchmarks.md": "benchmarks/results/README.md"}
_PAGE_OF = {file: page for page, file in _MADE_OF.items()} | {
    "README.md": "index.md",
    "benchmarks/results": "benchmarks.md",
}


def on_config(config: Any) -> Any:
    """Put a page of each room under the list of the API."""
    [reference] = [part["Reference"] for part in config.nav if "Reference" in part]
    for entry in reference:
        if "API" in entry:
            entry["API"] = ["api/index.md", *({room: f"api/{room}.md"} for room in api.rooms())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that code makes, and every file of the repository to which a page links."""
    made = {name: page() for name, page in PAGES.items()}
    made |= {"api/index.md": api.index(), **{f"api/{room}.md": api.page(room) for room in api.rooms()}}
    made |= {page: _moved((ROOT / file).read_text(), file, page) for page, file in _MADE_OF.items()}
    for name, text in made.items():
        if name in files.src_uris:  # tools/make_docs.py has written it into docs/
            files.remove(files.src_uris[name])
        files.append(File.generated(config, name, content=text))
    for file in list(files.documentation_pages()):
        for _, target in _LINK.findall(file.content_string):
            outside = _outside(target, file.src_uri)
            if outside and outside not in _PAGE_OF and (ROOT / outside).is_file():
                copy = _copy_of(outside)
                if copy not in files.src_uris:
                    files.append(File.generated(config, copy, abs_src_path=str(ROOT / outside)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that lead out of docs/ into links within the site, and leave fences their language alone."""

    def within(found: re.Match[str]) -> str:
        outside = _outside(found[2], page.file.src_uri)
        if outside is None:
            return found[0]
        if outside not in _PAGE_OF and (ROOT / outside).is_dir():
            return found[1]  # a site has no page of a folder
        target = _PAGE_OF.get(outside, _copy_of(outside))
        anchor = found[2].partition("#")[2] if outside != "README.md" else ""
        return f"[{found[1]}]({_relative(target, page.file.src_uri)}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"^(\s*```\w+) .*$", r"\1", _LINK.sub(within, markdown), flags=re.MULTILINE)


def _outside(target: str, page: str) -> str | None:
    """Return the path in the repository of a link's target that is not in docs/, else None."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
    return None if not target.partition("#")[0] or path.startswith("docs/") else path


def _copy_of(file: str) -> str:
    """Return the place of a copy: a page of Markdown would have to be in the navigation."""
    return f"files/{file}.txt" if file.endswith((".md", ".py", ".sbatch", ".sh", ".yaml")) else f"files/{file}"


def _relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def _moved(text: str, file: str, page: str) -> str:
    """Return the text of a page that lies elsewhere, with links as they are from docs/."""
    folder = posixpath.dirname(file)

    def from_docs(found: re.Match[str]) -> str:
        name, _, anchor = found[2].partition("#")
        path = posixpath.normpath(posixpath.join(folder, name)) if name else ""
        where = posixpath.relpath(path, "docs") if path else ""
        return f"[{found[1]}]({where}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(from_docs, text)
