"""What one layout saves, every other loads, to the bit, and the next losses are the same."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.support.resaving import FLAGS, Saved, assert_same_tensors, saved_by
from tests.support.selection import marked

TP2_PP2_VPP2 = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer"
)
BUCKETS = "--use-distributed-optimizer --ddp-bucket-size 3000"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one process": (1, ""),
    "TP4": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "PP2, uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "DP4, distributed optimizer": (4, BUCKETS),
    "DP4, without distributed optimizer": (4, ""),
    "HSDP 2 x 2, FSDP2": (4, "--use-torch-fsdp2 --num-distributed-optimizer-instances 2"),
    "TP2 x DP2 without distributed optimizer": (4, "--tensor-model-parallel-size 2"),
}
# More or fewer parts of what others divide as well: left to --all.
REPEATED = {
    "TP4",
    "PP2, uneven",
    "DP4, without distributed optimizer",
    "TP2 x DP2 without distributed optimizer",
}


@pytest.fixture(scope="module")
def divided(pytestconfig: pytest.Config) -> tuple[int, str]:
    """What the others load: with --all two copies, which divide the optimizer's state."""
    return 8 if pytestconfig.getoption("--all") else 4, TP2_PP2_VPP2


@pytest.fixture(scope="module")
def saved(divided: tuple[int, str], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_by(divided, FLAGS, None, tmp_path_factory.mktemp("saved"))


def _optimizer_bytes(folder: str) -> dict[str, int]:
    """By file: the bytes of the optimizer's state in it."""
    metadata = FileSystemReader(f"{folder}/iter_0000002").read_metadata()
    found: dict[str, int] = {}
    for index, place in (metadata.storage_data or {}).items():
        if index.fqn.startswith("optimizer.state."):
            found[place.relative_path] = found.get(place.relative_path, 0) + place.length
    return found


@pytest.fixture(scope="module")
def saved_again(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """What a layout, which has loaded it, saves."""
    return functools.cache(
        lambda layout: saved_by(LAYOUTS[layout], FLAGS, saved.folder, tmp_path_factory.mktemp("again"))
    )


@pytest.mark.parametrize("layout", marked(LAYOUTS, slow=REPEATED))
def test_layouts_share_checkpoints(
    layout: str, divided: tuple[int, str], saved: Saved, saved_again: Callable[[str], Saved]
) -> None:
    found = saved_again(layout)
    assert_same_tensors(found, saved)
    assert found.losses == pytest.approx(saved.losses, rel=1e-6)
    if BUCKETS in LAYOUTS[layout][1]:
        # Every rank writes its share of the sharded state, as whole weights.
        for ranks, folder in ((4, found.folder), (divided[0], saved.folder)):
            written = _optimizer_bytes(folder)
            assert len(written) == ranks
            assert max(written.values()) < 2 * sum(written.values()) / ranks


def test_and_back(divided: tuple[int, str], saved: Saved, saved_again: Callable[[str], Saved], tmp_path: Path) -> None:
    """In the layout that saved it, the losses are the same to the bit, after a stay in another layout too."""
    back = saved_by(divided, FLAGS, saved_again("PP4").folder, tmp_path)
    assert_same_tensors(back, saved)
    assert back.losses == saved.losses


@pytest.mark.full
def test_the_fp32_copies_of_bf16_weights_go_along(tmp_path: Path) -> None:
    flags = [*FLAGS, "--bf16"]
    saved = saved_by((4, "--tensor-model-parallel-size 2 " + BUCKETS), flags, None, tmp_path / "saved", steps=0)
    assert any(key.startswith("optimizer.state.param.") for key in saved.tensors)
    for number, layout in enumerate(((1, ""), (2, BUCKETS))):
        assert_same_tensors(saved_by(layout, flags, saved.folder, tmp_path / str(number), steps=0), saved)


@pytest.mark.slow  # test_sharded_schemes.py does it within each scheme
def test_what_shards_saved_goes_to_one_process_and_back_to_others(tmp_path: Path) -> None:
    """Three ranks do not divide the rows evenly; SwiGLU's first matrix is cut in the middle of gate and up, and of the
    two rows of a query norm the last rank has none."""
    batch = ["--micro-batch-size", "1", "--global-batch-size", "6"]
    flags = [*FLAGS, "--bf16", *batch, "--qk-layernorm", "--kv-channels", "2"]
    saved = saved_by((3, "--use-torch-fsdp2"), flags, None, tmp_path / "shards", steps=0)
    whole = saved_by((1, ""), flags, saved.folder, tmp_path / "whole", steps=0)
    assert_same_tensors(whole, saved)
    other = "--use-torch-fsdp2 --tensor-model-parallel-size 2 --sequence-parallel"
    assert_same_tensors(saved_by((4, other), flags, whole.folder, tmp_path / "other", steps=0), saved)


_TWO_DEPTHS = "--position-embedding-type rope --mtp-num-layers 2"
_OF_ONE_LAYER = f"{_TWO_DEPTHS} --mtp-use-repeated-layer"
_OF_LETTERS = (
    "--position-embedding-type none --hybrid-layer-pattern M-M*/M-/M- --mamba-state-dim 6 --mamba-head-dim 8 "
    "--mamba-num-groups 2 --mamba-num-heads 4"
)


# Without a common matrix only what is divided in another way than by layers is another case.
@pytest.mark.full
@pytest.mark.parametrize(
    ("depths", "others"),
    [
        (_TWO_DEPTHS, [(1, ""), (2, "--use-torch-fsdp2"), (2, "--pipeline-model-parallel-size 2")]),
        (f"{_TWO_DEPTHS} --untie-embeddings-and-output-weights", [(2, "--use-torch-fsdp2")]),
        (_OF_LETTERS, [(1, ""), (2, "--use-torch-fsdp2"), (2, "--pipeline-model-parallel-size 2")]),
        (_OF_ONE_LAYER, [(1, ""), (2, "--use-torch-fsdp2"), (2, "--pipeline-model-parallel-size 2")]),
    ],
)
def test_depths_of_multi_token_prediction_are_shared_by_layouts(
    depths: str, others: list[tuple[int, str]], tmp_path: Path
) -> None:
    """Both ends of the pipeline have the word embeddings, of which the checkpoint has one copy."""
    flags = [*FLAGS, *depths.split()]
    first = (4, TP2_PP2_VPP2)
    saved = saved_by(first, flags, None, tmp_path / "saved")
    layer = "mtp_model_layer.layers.1" if depths == _OF_LETTERS else "transformer_layer"
    assert "mtp.layers.0.eh_proj.weight" in saved.tensors
    assert (f"mtp.layers.1.{layer}.mlp.linear_fc1.weight" in saved.tensors) == (depths != _OF_ONE_LAYER)
    folder = saved.folder
    for number, layout in enumerate(others):
        found = saved_by(layout, flags, folder, tmp_path / str(number))
        assert_same_tensors(found, saved)
        assert found.losses == pytest.approx(saved.losses, rel=1e-6)
        folder = found.folder
    back = saved_by(first, flags, folder, tmp_path / "back")
    assert_same_tensors(back, saved)
    assert back.losses == saved.losses


@pytest.mark.full
def test_what_tensor_parallel_ranks_share_of_an_activation_is_saved_once(tmp_path: Path) -> None:
    """xIELU's two numbers of a layer are on every tensor-parallel rank, and once in a checkpoint."""
    flags = [*(flag for flag in FLAGS if flag != "--swiglu"), "--xielu"]
    saved = saved_by((2, "--tensor-model-parallel-size 2 --sequence-parallel"), flags, None, tmp_path / "saved")
    assert saved.tensors.keys() >= {f"decoder.layers.mlp.xielu.{name}" for name in ("alpha_p", "alpha_n")}
    assert_same_tensors(saved_by((1, ""), flags, saved.folder, tmp_path / "alone"), saved)
