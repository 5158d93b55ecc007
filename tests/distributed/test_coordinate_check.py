"""tools/coordinate_check.py: activations keep their size under --use-mup, and grow with the width without."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.commands.coordinate_check import main

MODEL = (
    "--num-layers 1 --seq-length 16 --mock-data --vocab-size 61 --micro-batch-size 2 --global-batch-size 2 "
    "--train-iters 9 --lr-decay-style constant --eval-interval 0 --hidden-dropout 0 --attention-dropout 0 "
    "--init-method-std 0.1 --untie-embeddings-and-output-weights"
)
MUP = "--use-mup --mup-base-hidden-size 32 --mup-base-head-dim 16"
MUON = "--optimizer muon --lr 0.05 --muon-scale-mode"


@pytest.mark.parametrize(
    ("flags", "grows"),
    [
        ("--lr 0.03", True),
        (f"--lr 0.03 {MUP}", False),
        (f"{MUON} spectral", True),
        (f"{MUON} unit_rms_norm {MUP}", False),
    ],
)
def test_what_grows_with_the_width(flags: str, grows: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    own = ["--widths", "32", "64", "128", "--steps", "3", "--html", str(page)]
    assert main([*own, "--", *shlex.split(f"{MODEL} {flags}")]) == int(grows)
    said = capsys.readouterr().out
    assert ("grows the most" in said) == grows
    powers = {line.split()[0]: float(line.split()[-1]) for line in said.splitlines()[1:-1]}
    assert next(iter(powers)) == "embedding"
    assert (powers["decoder.layers.0"] > 0.5) == grows
    assert page.read_text().count("<svg") == len(powers)


@pytest.mark.parametrize("words", ["--widths 64 -- --lr 1", "--widths 20 40 -- --lr 1", "--steps 0 -- --lr 1", ""])
def test_what_it_cannot_measure(words: str) -> None:
    with pytest.raises(ConfigurationError, match="--widths"):
        main(words.split())
