"""The mixer of docs/own_mixer.md, as it stands there, by a script and as a plugin of another distribution: it trains in
layouts as in one process, is saved and resharded, and each wrong try is answered with the page."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_blocks import DOCS, blocks, commands

# Of the second tier: tests/unit/parts/test_kinds.py and tests/unit/model/test_own_layers.py hold what is refused.
pytestmark = pytest.mark.full

ROOT = DOCS.parent
PAGE = DOCS / "own_mixer.md"
FLAGS = shlex.split("""
    --hybrid-layer-pattern *-R- --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 64
    --position-embedding-type rope --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --device cpu --num-workers 0
    --hidden-dropout 0 --attention-dropout 0 --eval-interval 0 --log-interval 1 --save run --load run --train-iters 4
""")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the files of the page, and the metadata that `pip install` would write of its pyproject.toml."""
    for block in blocks(PAGE):
        if block.language in ("python", "toml"):
            file = tmp_path / block.text.split("\n")[0].removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
    (tmp_path / "causal_mean/__init__.py").touch()
    return tmp_path


def installed(package: Path) -> None:
    metadata = package / "causal_mean-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: causal_mean\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[megatron_ext.plugins]\ncausal_mean = causal_mean\n")


def run(package: Path, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return launched(package, "-m", "megatron_ext", *words, ranks=ranks)


def launched(package: Path, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, *words]
    return subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)


def parity_of(command: str) -> list[str]:
    return command.replace("'", "").split()[1:]


def test_the_commands_of_the_page_find_no_difference(package: Path) -> None:
    by_script, by_plugin = [one for block in blocks(PAGE) if block.language == "bash" for one in commands(block.text)]
    for command in (by_script, by_plugin):
        if command is by_plugin:
            installed(package)
        ended = run(package, *parity_of(command))
        assert "verdict: they agree within 1e-05" in ended.stdout, ended.stdout + ended.stderr


def test_what_the_script_trains_is_saved_in_one_layout_and_goes_on_in_another(package: Path) -> None:
    """Its layers differ: one has attention, and one the mixer."""
    flags = [*["--num-layers", "2", "--log-interval", "1"], *FLAGS[2:]]

    def train(*more: str, ranks: int = 1) -> list[float]:
        ended = launched(package, "train.py", *flags, *more, ranks=ranks)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return [float(loss) for loss in re.findall(r"lm loss: (\S+)", ended.stdout)]

    whole = train("--save", "whole", "--load", "whole")
    first = train("--exit-interval", "2", "--tensor-model-parallel-size", "2", ranks=2)
    assert first + train("--pipeline-model-parallel-size", "2", ranks=2) == pytest.approx(whole, rel=1e-5)


def test_the_plugin_is_saved_in_one_layout_and_goes_on_in_another(package: Path) -> None:
    installed(package)
    whole = run(package, "pretrain", *FLAGS, "--save", "whole", "--load", "whole")
    assert whole.returncode == 0, whole.stderr
    assert "own layers are causal on the first batch: CausalMean (compute.py:" in whole.stdout
    first = run(package, "pretrain", *FLAGS, "--exit-interval", "2", "--tensor-model-parallel-size", "2", ranks=2)
    assert first.returncode == 0, first.stderr
    rest = run(package, "pretrain", *FLAGS)
    assert rest.returncode == 0, rest.stderr
    losses = [re.findall(r"lm loss: (\S+)", one.stdout) for one in (whole, first, rest)]
    found = [float(loss) for loss in losses[1] + losses[2]]
    assert found == pytest.approx([float(loss) for loss in losses[0]], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (
            ("compute.py", 'reads = "share"', "pass"),
            "--sequence-parallel",
            "reads whole sequences, of which --sequence",
        ),
        (("compute.py", 'reads = "share"', 'reads = "token"'), "", "declares reads = 'token', but its output"),
        (("compute.py", "return self.out_proj(", "return hidden_states, None, ("), "", "returned 3 values, the first"),
        (
            ("describe.py", 'yield place.vector("scale"', 'yield place.vector("factor"'),
            "",
            "which the own layer does not",
        ),
        (("describe.py", '"scale", self.hidden', '"scale", 2 * self.hidden'), "", "scale has shape [32] on this rank"),
        (("describe.py", 'LETTER = "R"', 'LETTER = "M"'), "", "has the letter 'M' of"),
        (("describe.py", ".compute:mixer_spec", ".compute"), "", "which is no function of a module"),
        (("describe.py", 'LETTER = "R"', 'LETTER = "Q"'), "", "'R' is no letter; known are"),
    ],
    ids=["no reads", "wrong reads", "wrong output", "wrong name", "wrong shape", "letter", "builder", "unknown letter"],
)
def test_a_wrong_try_is_answered_with_the_page(
    change: tuple[str, str, str], more: str, said: str, package: Path
) -> None:
    installed(package)
    name, old, new = change
    file = package / "causal_mean" / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    ranks = 2 if more else 1
    layout = [more, "--tensor-model-parallel-size", "2"] if more else []
    ended = run(package, "pretrain", *FLAGS, *layout, ranks=ranks)
    told = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert said in told
    assert "docs/own_mixer.md" in told
