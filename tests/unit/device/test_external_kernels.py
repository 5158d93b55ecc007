"""apex and Transformer Engine stand in as packages beside the real engine: it takes their kernels only where asked."""

from pathlib import Path

import pytest

from tests.support.plain_process import plain_python

# What megatron-core imports of each when it is imported itself, with the names that it looks for.
STAND_INS = {
    "apex/__init__.py": "",
    "apex/optimizers.py": (
        "from torch.optim import AdamW, SGD\nclass FusedAdam(AdamW): pass\nclass FusedSGD(SGD): pass\n"
    ),
    "apex/multi_tensor_apply.py": "def multi_tensor_applier(*arguments): return arguments\n",
    "amp_C.py": "def multi_tensor_l2norm(*arguments): pass\ndef multi_tensor_scale(*arguments): pass\n",
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/pytorch/optimizers.py": (
        "from torch.optim import AdamW, SGD\nclass FusedAdam(AdamW): pass\nclass FusedSGD(SGD): pass\n"
        "def multi_tensor_applier(*arguments): pass\ndef multi_tensor_l2norm(*arguments): pass\n"
        "def multi_tensor_scale(*arguments): pass\ndef multi_tensor_scale_tensor(*arguments): pass\n"
    ),
}


PROGRAM = """
import sys

from megatron_ext import device
from megatron_ext.device.external_kernels import asked_for, kernels_text
from megatron_ext.config.schema import Config, ModelConfig

config = Config(model=ModelConfig(external_kernels=sys.argv[1]))
device.install("cpu", kernels=asked_for(config))
from megatron.core.optimizer import Adam, clip_grads, optimizer

for found in (Adam, clip_grads.l2_norm_impl, clip_grads.multi_tensor_applier, optimizer.multi_tensor_applier):
    print(found.__module__.partition(".")[0])
print(kernels_text())
"""


def engine_takes(folder: Path, packages: tuple[str, ...], *settings: str) -> list[list[str]]:
    """Import the engine where the packages are installed, with each of the settings of --external-kernels.

    Returns:
        For each setting, where its kernels are from, and what a run says of it.
    """
    for name, text in STAND_INS.items():
        if name.split("/")[0] in (*packages, *(["amp_C.py"] if "apex" in packages else [])):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    (folder / "program.py").write_text(PROGRAM)  # which finds what lies next to it
    said = []
    for asked in settings:
        ended = plain_python([str(folder / "program.py"), asked], folder)
        assert ended.code == 0, ended.output
        said.append(ended.output.splitlines()[-5:])
    return said


def test_what_is_installed_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    not_used, used = engine_takes(tmp_path, ("apex", "transformer_engine"), "none", "apex")
    said = (
        "Adam, norm and clipping are torch's; apex and Transformer Engine are installed and not used "
        "(--external-kernels apex or --external-kernels transformer_engine takes it)"
    )
    assert not_used == ["torch", "megatron", "megatron", "megatron", said]
    said = "Adam, norm and clipping are apex's, where it has them"
    assert used == ["apex", "amp_C", "apex", "apex", said]


@pytest.mark.slow  # as all other tests run
def test_without_packages_nothing_is_said_of_them(tmp_path: Path) -> None:
    assert engine_takes(tmp_path, (), "none") == [["torch", "megatron", "megatron", "megatron", "None"]]
