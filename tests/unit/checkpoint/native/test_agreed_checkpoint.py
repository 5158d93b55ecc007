"""Which checkpoint a run of one process goes on from. tests/distributed has more ranks and damage of every kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext import device
from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.agreed_checkpoint import agree
from megatron_ext.checkpoint.native.checkpoint_folder import SavedCheckpoint
from megatron_ext.checkpoint.native.resume import Search
from megatron_ext.config.schema import CheckpointConfig
from megatron_ext.errors import DataError, StorageError
from megatron_ext.parallel import groups
from tests.support.small_models import small_config


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A process group of this process alone."""
    groups.initialize(small_config().layout, device.current())
    yield
    groups.destroy()


def _checkpoint(path: Path, state: str) -> Path:
    path.mkdir()
    for number in range(7):
        (path / f"f{number}").touch()
    if state != "without a manifest":
        checkpoint_manifest.write(path, checkpoint_manifest.describe(path, checkpoint_manifest.all_files(path)))
    if state == "damaged":
        for number in range(7):
            (path / f"f{number}").unlink()
    return path


@pytest.mark.parametrize(
    ("states", "place"),
    [
        (("whole", "damaged", "damaged"), 0),
        (("damaged", "whole", "damaged"), 1),
        (("damaged", "without a manifest", "whole"), 1),
        (("damaged", "damaged", "damaged"), None),
    ],
)
@pytest.mark.parametrize("no_fallback", [False, True])
def test_the_first_whole_checkpoint_is_gone_on_from(
    states: tuple[str, ...], place: int | None, no_fallback: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with those before it is said, of the first five files, or --no-fallback forbids it."""
    paths = [_checkpoint(tmp_path / f"iter_{3 - number}", state) for number, state in enumerate(states)]
    found = tuple(SavedCheckpoint(path, 3 - number, f"warning {3 - number}") for number, path in enumerate(paths))
    flags = CheckpointConfig(no_fallback=no_fallback)
    bad = [f"the checkpoint {path} is damaged ({', '.join(f'f{n} is missing' for n in range(5))})" for path in paths]
    if place is None or (no_fallback and place):
        expected = f"{bad[0]}; leave --no-fallback out to use another: 2, 1."
        if not no_fallback:
            expected = f"{'; '.join(bad)}; there is no whole checkpoint in here. Give another folder with --load."
        with pytest.raises(DataError) as caught:
            agree(Search("here", found), flags)
        assert str(caught.value) == expected
        return
    chosen = agree(Search("here", found), flags)
    assert chosen is not None
    assert (chosen.path, chosen.iteration, chosen.damaged) == (paths[place], 3 - place, tuple(bad[:place]))
    said = [f"warning: warning {3 - number}" for number in range(place + 1)]
    if states[place] == "without a manifest":
        said.append(f"warning: {paths[place]} has no manifest: whether it is damaged is not known")
    if place:
        said.append(f"warning: {'; '.join(bad[:place])}; using the next whole checkpoint, {paths[place]}")
    assert capsys.readouterr().err.splitlines() == said


def test_an_empty_folder_is_no_error_and_what_the_search_met_is() -> None:
    flags = CheckpointConfig()
    assert agree(Search("here"), flags) is None
    with pytest.raises(DataError, match=r"^none there$"):
        agree(Search("here", (), DataError("none there")), flags)
    with pytest.raises(StorageError, match=r"^--load here: Permission denied\. Fix the folder, or give another one\.$"):
        agree(Search("here", (), PermissionError(13, "Permission denied")), flags)
