"""What the guides send their reader to is there: pages, headings and files; launches on machines that only a reader has
are taken as they stand. What can run here runs in tests/distributed/test_guide_commands.py."""

import re
from pathlib import Path

import pytest

from tests.support.command_blocks import DOCS, blocks
from tests.support.guide_launches import dry_run, launches, make_hf_folder
from tools import make_docs

ROOT = Path(__file__).resolve().parents[3]
GENERATED = {ROOT / "docs" / name for name in make_docs.PAGES}  # which a new checkout does not have
GUIDES = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md")} - GENERATED)
FOLDERS = (ROOT, ROOT / "megatron_ext", ROOT / "tests")
OF_OTHERS = {"config/train_gpt2.py"}  # nanoGPT's


def headings(page: Path) -> set[str]:
    """The names by which a page's headings are linked to."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_links_lead_somewhere(guide: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", guide.read_text()):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        page = guide.parent / name if name else guide
        assert page.exists(), link
        assert page.resolve() not in GENERATED, f"{link} is not there before tools/make_docs.py has run"
        assert not heading or heading in headings(page), link


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_files_that_are_named_exist(guide: Path) -> None:
    named = set(re.findall(r"`(\w+/[\w./-]+\.(?:py|sh|yaml|json|jsonl|txt))`", guide.read_text())) - OF_OTHERS
    ours = {name for name in named if any((folder / name.split("/")[0]).is_dir() for folder in FOLDERS)}
    assert [name for name in ours if not any((folder / name).exists() for folder in FOLDERS)] == []


@pytest.mark.parametrize("guide", sorted({*DOCS.rglob("*.md")} - GENERATED), ids=lambda guide: guide.name)
def test_what_a_reader_types_is_fenced_as_bash(guide: Path) -> None:
    """A block without a language, or of text, is what a program prints."""
    for block in blocks(guide):
        assert block.language != "bash" or block.kind in ("", "slow", "cluster"), block
        if block.language in ("", "text", "console"):
            assert not re.match(r"(?:python|torchrun|bash|pip|megatron-ext) \S+(?: [^<]*)?$", block.text.split("\n")[0])


@pytest.mark.parametrize("guide", sorted({*DOCS.rglob("*.md")} - GENERATED), ids=lambda guide: guide.name)
def test_launches_on_clusters_are_taken(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = (
        "num_layers: 24\nhidden_size: 2048\nnum_attention_heads: 16\nseq_length: 2048\nmicro_batch_size: 2\nlr: 1e-4\n"
    )
    (tmp_path / "run.yaml").write_text(small + "train_iters: 100\n")
    for block in blocks(guide):
        if (block.language, block.kind) != ("bash", "cluster"):
            continue
        for name in re.findall(r"--load-hf (\S+\d[bB]\S*)", block.text):
            make_hf_folder(Path(name))
        for launcher, flags in launches(block.text):
            assert dry_run(launcher, flags).layout.world_size >= 1
        for name in re.findall(r"(?:python|bash) (\w+/[\w/.]+)", block.text):
            assert (ROOT / name).is_file(), name
