"""A built wheel, installed into an empty environment and used outside of the checkout, as a user's machine has it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

# Of the second tier: what the wheel holds, nobody changes by accident.
pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --num-workers 0 --split 100,0,0 --device cpu"
)

# `megatron-ext` with each of the command lines of a JSON list, until one fails: processes that are forked once torch
# is there, for importing it takes longer than what they do.
COMMANDS = """
import json, os, sys
import torch._dynamo

for line in json.loads(sys.argv[1]):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        from megatron_ext.cli.main import start

        sys.argv = ["megatron-ext", *line]
        start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(code)
"""


class Installed:
    """An environment that has the wheel, and of what it needs the packages that the tests run with."""

    def __init__(self, folder: Path, wheel: Path):
        self.wheel = wheel
        self.home = folder / "home"
        self.home.mkdir()
        environment = folder / "environment"
        run(sys.executable, "-m", "venv", "--without-pip", environment)
        self.bin = environment / "bin"
        install = ("install", "--no-index", "--no-deps", "--no-compile", wheel)
        run(sys.executable, "-m", "pip", "--python", self.bin / "python", *install)
        self.site = next((environment / "lib").glob("python*/site-packages"))
        (self.site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def __call__(self, *words: str | Path, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in a folder that has nothing to do with the checkout."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return run(self.bin / words[0], *words[1:], cwd=self.home, env={**kept, "OMP_NUM_THREADS": "1"}, codes=codes)


def run(*words: str | Path, codes: tuple[int, ...] = (0,), **options: object) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert ended.returncode in codes, f"{words}: exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy, so that nothing is built into the checkout; without the network, by the setuptools of the tests.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megatron_ext", source / "megatron_ext", ignore=shutil.ignore_patterns("__pycache__"))
    # What `pip wheel` starts three interpreters for.
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=source)
    return Installed(folder, next(folder.glob("*.whl")))


def test_the_wheel_has_every_file_of_the_package_and_no_other_package(installed: Installed) -> None:
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_ext").rglob("*") if path.is_file()}
    recipes = {f"megatron_ext/recipes/{path.name}" for path in (ROOT / "examples/recipes").glob("*.yaml")}
    assert len(recipes) > 60
    with zipfile.ZipFile(installed.wheel) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {name for name in own if "__pycache__" not in name and "/recipes/" not in name} | recipes


def test_preprocess_pretrain_and_convert_outside_of_the_checkout(installed: Installed) -> None:
    texts = [{"text": f"line {number} of a small corpus"} for number in range(200)]
    (installed.home / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    tokenizer = ("--tokenizer-type", "ByteTokenizer")
    where = installed("python", "-c", "import megatron_ext; print(megatron_ext.__file__)").stdout
    assert where.startswith(str(installed.site)), "the test has run the checkout's package"

    preprocess = ["preprocess", "--input", "text.jsonl", "--output-prefix", "data", "--append-eod", *tokenizer]
    data = ("--data-path", "data_text_document", *tokenizer)
    pretrain = ["pretrain", *MODEL.split(), *data, "--train-iters", "2", "--save", "run", "--log-interval", "1"]
    # Transformers takes longer to import than all of this.
    convert = ["convert", "to-hf", "--load", "run", "--save", "hf", "--no-verify", "--skip-tokenizer-check"]
    output = installed("python", "-c", COMMANDS, json.dumps([preprocess, pretrain, convert])).stdout
    assert "iteration        2/       2" in output
    rows = [json.loads(line) for line in (installed.home / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]

    assert "LlamaForCausalLM" in output
    assert (installed.home / "hf" / "model.safetensors").is_file()


def test_a_recipe_is_judged_outside_of_the_checkout(installed: Installed) -> None:
    dry = installed("megatron-ext", "pretrain", "--recipe", "llama3.1-8b", "--dry-run")
    assert "world size 8 = TP 1 x PP 1 x CP 1 x DP 8" in dry.stdout
    assert "parameters           8,030,261,248 " in dry.stdout
    assert "on h100              fits" in dry.stdout
    said = "--recipe llama3.1-8b is judged with synthetic tokens on 8 x H100, which it is made for (--world-size 8)"
    assert said in dry.stderr
    listed = installed("megatron-ext", "recipes", "mixtral").stdout
    assert listed.startswith("mixtral-8x7b  ")


def test_the_doctor_knows_the_versions_without_the_checkout(installed: Installed) -> None:
    said = installed("megatron-ext", "doctor", "--nproc-per-node", "1", codes=(0, 64, 74)).stdout  # as the machine is
    assert "torch" in said
    assert said.splitlines()[-1].endswith("warnings")


def test_the_module_and_the_command_are_one_program(installed: Installed) -> None:
    dry = ("pretrain", *MODEL.split(), "--mock-data", "--vocab-size", "64", "--train-iters", "2", "--dry-run")
    assert installed("megatron-ext", *dry).stdout == installed("python", "-m", "megatron_ext", *dry).stdout
    assert installed("megatron-ext", "--version").stdout == "megatron-ext 0.2.0\n"
