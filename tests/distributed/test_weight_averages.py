"""--ema-decay: averages of the weights as plain torch has them, in every scheme, resumed, evaluated and exported."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from tests.support.resaving import FLAGS, assert_same_tensors, saved_by
from tests.support.several_models import end_layout

# Of the second tier: a row of tests/parity/test_matrix.py keeps averages.
pytestmark = pytest.mark.full

BASE = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-2 --eval-interval 0 --init-method-std 0.2 "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0"
)
DECAY = 0.7
LAYOUTS = {
    "DDP": "",
    "DDP, bf16": "--bf16",
    "distributed optimizer, overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "distributed optimizer, bf16": "--use-distributed-optimizer --bf16",
    "in host memory": "--use-distributed-optimizer --bf16 --optimizer-cpu-offload",
    "FSDP2": "--use-torch-fsdp2",
    "FSDP2 in host memory, bf16": "--use-torch-fsdp2 --torch-fsdp2-cpu-offload --bf16",
    "ZeRO-3": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "Muon": "--optimizer muon --use-distributed-optimizer",
    "Lion": "--optimizer lion",
    "averages in 16 bits": "--exp-avg-dtype bf16",
}


def _averages(layouts: dict[str, str]) -> dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """By layout, name, average and what it should be by the weights after each step, of what this rank updates."""
    from megatron_ext import device

    here = device.install("cpu")
    from megatron_ext.config.derived.optimizer_traits import AVERAGE
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    found = {}
    for layout, flags in layouts.items():
        config = configure(shlex.split(f"{BASE} {flags} --ema-decay {DECAY}")).config
        run = build_run(config, here)
        trainer = Trainer(run, [])

        def mains(run: Any = run) -> list[torch.Tensor]:
            parts = run.sharding.parts(run.optimizer)
            return [part.updater.master_of(main).clone() for part in parts for _, main in part.main_parameters()]

        expected = mains()
        for _ in range(3):
            trainer.step()
            expected = [DECAY * one + (1 - DECAY) * new for one, new in zip(expected, mains(), strict=True)]
        kept = []
        for part in run.sharding.parts(run.optimizer):
            for _, main in part.main_parameters():
                optimizer, key = part.updater.updated_by(main)
                kept.append(optimizer.state[key][AVERAGE])
        found[layout] = list(zip(kept, expected, mains(), strict=True))
        end_layout()
    return found


@pytest.fixture(scope="module")
def averages() -> list[dict[str, Any]]:
    return run_ranks(2, _averages, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_follow_the_weights(layout: str, averages: list[dict[str, Any]]) -> None:
    for of_rank in averages:
        for average, expected, _ in of_rank[layout]:
            torch.testing.assert_close(average.view_as(expected), expected, rtol=1e-6, atol=1e-7)
        assert any(not torch.equal(average.view_as(weight), weight) for average, _, weight in of_rank[layout])


def _train(flags: list[str]) -> tuple[list[float], dict[int, float]]:
    from megatron_ext.train.pretrain import pretrain

    result = pretrain(flags)
    return list(result.losses), dict(result.validation_losses)


def _words(save: Path, flags: str) -> list[str]:
    rest = f"--save {save} --exit-interval 4 --ema-decay {DECAY} --eval-interval 1 --eval-iters 1"
    return shlex.split(f"{BASE} {flags} {rest}")


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    tensors = Tensors(folder / "iter_0000004")
    return {name: tensors.read(name) for name in tensors.names()}


@pytest.mark.parametrize(
    "flags",
    ["--bf16", "--use-torch-fsdp2 --bf16", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"],
)
def test_a_run_goes_on_bit_for_bit_and_evaluates_its_averages(flags: str, tmp_path: Path) -> None:
    """What is evaluated changes no training; averages of a resumed run are those of one that was not interrupted."""
    whole, of_weights = run_ranks(2, _train, _words(tmp_path / "whole", f"{flags} --save-interval 2"))[-1]
    goes_on = f"{flags} --eval-ema --load {tmp_path}/whole --ckpt-step 2"
    then, of_averages = run_ranks(2, _train, _words(tmp_path / "run", goes_on))[-1]
    assert then == whole[2:]
    assert of_averages.keys() == {3, 4}
    assert all(of_averages[iteration] != of_weights[iteration] for iteration in of_averages)
    one, other = _saved(tmp_path / "whole"), _saved(tmp_path / "run")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    averages = {name for name in one if name.startswith("optimizer.state.average.")}
    assert len(averages) == len({name for name in one if name.startswith("optimizer.state.exp_avg.")}) > 0


def test_averages_go_to_other_layouts(tmp_path: Path) -> None:
    flags = [*FLAGS, "--ema-decay", str(DECAY)]
    saved = saved_by((2, "--use-distributed-optimizer"), flags, None, tmp_path / "saved")
    assert any(key.startswith("optimizer.state.average.") for key in saved.tensors)
    for number, layout in enumerate([(1, ""), (2, "--use-torch-fsdp2"), (2, "--pipeline-model-parallel-size 2")]):
        assert_same_tensors(saved, saved_by(layout, flags, saved.folder, tmp_path / str(number)))


def test_averages_begin_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    """They begin as its weights, and with one step more are between these and the new ones."""
    saved = saved_by((1, ""), FLAGS, None, tmp_path / "saved")
    again = saved_by((2, ""), [*FLAGS, "--ema-decay", "0.5"], saved.folder, tmp_path / "again")
    for name, tensor in saved.tensors.items():
        if not name.startswith("optimizer."):
            assert torch.equal(again.tensors[f"optimizer.state.average.{name}"], tensor)


def test_averages_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    words = f"{model} --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --bf16"
    run_ranks(2, _train, _words(tmp_path / "run", f"{words} --use-distributed-optimizer"))
    saved = _saved(tmp_path / "run")
    for name, flags in (("weights", []), ("averages", ["--ema", "--dtype", "fp32"])):
        assert convert(["to-hf", "--load", str(tmp_path / "run"), "--save", str(tmp_path / name), *flags]) == 0
    assert "largest difference of logits to transformers" in capsys.readouterr().out
    found = {name: load_file(tmp_path / name / "model.safetensors") for name in ("weights", "averages")}
    key = "embedding.word_embeddings.weight"
    exported = found["averages"]["model.embed_tokens.weight"]
    assert torch.equal(exported, saved[f"optimizer.state.average.{key}"][: len(exported)])
    assert torch.equal(found["weights"]["model.embed_tokens.weight"], saved[key][: len(exported)])


def test_no_averages_to_export(tmp_path: Path) -> None:
    saved = saved_by((1, ""), FLAGS, None, tmp_path / "saved")
    with pytest.raises(ConfigurationError, match="holds no averages of the weights"):
        convert(["to-hf", "--load", saved.folder, "--save", str(tmp_path / "out"), "--ema"])
