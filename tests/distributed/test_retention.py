"""Old checkpoints go, the last valid one never does."""

from pathlib import Path

from megatron_ext.checkpoint.native import save
from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, saved_iterations
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import FLAGS, flip, load, save_at


def _save_with_a_bad_disk(folder: str, iterations: list[int], flags: list[str]) -> None:
    """Save; the disk turns a byte of the last checkpoint as soon as it is written."""
    genuine = save.publish

    def publish(folder: str, iteration: int) -> Path:
        path = genuine(folder, iteration)
        if iteration == iterations[-1]:
            flip(path / "__0_0.distcp")
        return path

    save.publish = publish
    save_at(folder, iterations, flags)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    run_ranks(2, save_at, str(tmp_path), [1, 2, 3, 4], [*FLAGS, "--save", "x", "--keep-last-checkpoints", "2"])
    assert saved_iterations(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "iter_0000004", TRACKER]


def test_the_last_valid_one_is_never_removed(tmp_path: Path) -> None:
    flags = [*FLAGS, "--save", "x", "--keep-last-checkpoints", "1"]
    run_ranks(2, _save_with_a_bad_disk, str(tmp_path), [1, 2, 3], flags)
    assert saved_iterations(tmp_path) == [2, 3]
    assert run_ranks(1, load, str(tmp_path), flags) == [(2, 2)]


def test_links_are_left_alone(tmp_path: Path) -> None:
    save, elsewhere = tmp_path / "save", tmp_path / "elsewhere"
    run_ranks(1, save_at, str(save), [1], FLAGS)
    (save / "iter_0000001").rename(elsewhere)
    (save / "iter_0000001").symlink_to(elsewhere)
    run_ranks(1, save_at, str(save), [2, 3], [*FLAGS, "--save", "x", "--save-retain-interval", "3"])
    assert saved_iterations(save) == [1, 3]
    assert (elsewhere / "manifest.json").exists()
