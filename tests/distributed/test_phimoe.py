"""Phi-3.5-MoE by the program: begun with --load-hf, resumed bit for bit, divided over ranks, exported."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from tests.support.hf_models import flags, logits_of_folder, quiet_transformers, write_model
from tests.support.plain_process import in_plain_process

# Of the second tier: its pieces are rows of tests/parity/test_matrix.py.
pytestmark = pytest.mark.full

quiet_transformers()

LAYOUTS = {
    "EP2": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "TP2 with experts whole": (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1"
    ),
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
}
NEAR = 1e-6
"""`router_jitter_noise` with which no second expert is near, so that nothing is drawn."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "hf", "Phi-3.5-MoE")
    return tmp_path / "hf"


def _losses(arguments: list[str]) -> list[float]:
    from megatron_ext.train.pretrain import pretrain

    return list(pretrain(arguments).losses)


def _run(ranks: int, folder: Path, line: str) -> list[float]:
    arguments = [*flags(["--load-hf", str(folder)]), "--global-batch-size", "4", "--train-iters", "4", *line.split()]
    return run_ranks(ranks, _losses, arguments)[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_resumed_bit_for_bit(layout: str, folder: Path, tmp_path: Path) -> None:
    """With the experts that are drawn."""
    whole = _run(2, folder, f"{LAYOUTS[layout]} --save {tmp_path}/saved --save-interval 2")
    rest = _run(2, folder, f"{LAYOUTS[layout]} --load {tmp_path}/saved --ckpt-step 2")
    assert len(whole) == 4
    assert rest == whole[2:]


def test_layouts_train_one_model_and_export_it(folder: Path, tmp_path: Path) -> None:
    """Where nothing is drawn."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "router_jitter_noise": NEAR}))
    expected, saved = _run(1, folder, ""), f"{tmp_path}/EP2"
    for name, layout in LAYOUTS.items():
        found = _run(2, folder, f"{layout} --save {saved}" if name == "EP2" else layout)
        assert found == pytest.approx(expected, rel=1e-5), name
    written = tmp_path / "written"
    assert convert(["to-hf", "--load", saved, "--save", str(written)]) == 0, "it compares logits with transformers'"
    before, after = (_tensors(one) for one in (folder, written))
    assert before.keys() == after.keys()
    assert any((before[name] - after[name]).abs().max() > 1e-4 for name in before), "it was trained"
    assert in_plain_process(logits_of_folder, str(written)).isfinite().all()


def _tensors(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
