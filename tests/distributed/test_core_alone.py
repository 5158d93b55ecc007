"""The core is a program without any plugin: it trains, saves and resumes in another layout, with the same numbers."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import reproducible_rows

# Of the second tier: tests/checks holds that the core imports no plugin; here it trains without them.
pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
FLAGS = shlex.split("""
    --device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --position-embedding-type rope
    --tokenizer-type ByteTokenizer --mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3
    --eval-interval 4 --eval-iters 1 --log-interval 1 --hidden-dropout 0 --attention-dropout 0 --bf16
    --use-distributed-optimizer --tensor-model-parallel-size 2
""")
TWO_CHUNKS = shlex.split("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2")


def ended(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run([sys.executable, *words], cwd=tree, env=env, capture_output=True, text=True, check=False)


def rows_of_a_life(tree: Path, save: Path) -> list[dict[str, object]]:
    """Train two steps with TP2 DP2, go on with TP2 PP2 VPP2, and return what the metrics say of all four."""
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "pretrain_gpt.py", *FLAGS, "--save", str(save))
    for more in (("--exit-interval", "2"), (*TWO_CHUNKS, "--load", str(save))):
        run = ended(tree, *launch, *more)
        assert run.returncode == 0, run.stderr
    return reproducible_rows(save / "metrics.jsonl")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("core")
    shutil.copytree(
        ROOT / "megatron_ext", tree / "megatron_ext", ignore=shutil.ignore_patterns("plugins", "__pycache__")
    )
    shutil.copy(ROOT / "pretrain_gpt.py", tree)
    return tree


def test_it_answers(core: Path) -> None:
    shown = ended(core, "pretrain_gpt.py", "--help")
    assert (shown.returncode, "--tensor-model-parallel-size" in shown.stdout) == (0, True)
    commands = ended(core, "-m", "megatron_ext", "--help").stdout
    assert "  pretrain  " in commands
    assert "  convert  " not in commands
    dry = ended(core, "pretrain_gpt.py", *FLAGS, "--dry-run", "--world-size", "4")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout == ended(ROOT, "pretrain_gpt.py", *FLAGS, "--dry-run", "--world-size", "4").stdout


def test_it_trains_and_resumes_as_the_whole_does(core: Path, tmp_path: Path) -> None:
    alone = rows_of_a_life(core, tmp_path / "alone")
    assert alone == rows_of_a_life(ROOT, tmp_path / "whole")
    assert [row["iteration"] for row in alone if "lm_loss" in row] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optimizer lion", "--optimizer: 'lion' is not one of adam, sgd, muon"),
        ("--multi-latent-attention", "unknown flag --multi-latent-attention"),
        ("--experimental-attention-variant kda", "'kda' needs a plugin that is not installed"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1 needs a plugin that is not installed"),
        ("--wandb-project p", "--wandb-project p needs a plugin that is not installed"),
        ("--log-straggler", "--log-straggler needs a plugin that is not installed"),
        ("--spike-threshold 3", "unknown flag --spike-threshold"),
        ("--non-persistent-save-interval 2", "unknown flag --non-persistent-save-interval"),
        ("--use-mcore-models", "unknown flag --use-mcore-models"),
        ("--hybrid-layer-pattern M*M*", "'M' is no letter; known are *, - and E, and | between chunks of the pipeline"),
    ],
)
def test_what_a_plugin_would_bring_is_refused_by_name(flags: str, said: str, core: Path) -> None:
    refused = ended(core, "pretrain_gpt.py", *FLAGS, "--world-size", "4", "--dry-run", *flags.split())
    assert refused.returncode == 64
    assert said in refused.stderr
