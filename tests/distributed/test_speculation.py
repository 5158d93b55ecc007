"""Drafts of multi-token prediction change no token of a trained model, in any layout that generation has."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.launched import ROOT
from tests.support.several_models import in_turn
from tests.support.trained_models import TEXT, write_corpus

# Of the second tier: tests/distributed/test_inference.py generates.
pytestmark = pytest.mark.full

STEPS = 80
FLAGS = f"""
    --num-layers 2 --hidden-size 48 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --mtp-num-layers 2
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --window-size 15,0 --window-attn-skip-freq 2
    --tokenizer-type ByteTokenizer --split 100,0,0 --micro-batch-size 8 --global-batch-size 8 --lr 5e-3
    --lr-decay-style constant --train-iters {STEPS} --eval-interval 0 --device cpu --num-workers 0
    --seq-length 64 --attention-dropout 0 --hidden-dropout 0
"""
PROMPTS = [
    list(TEXT[start : start + length].encode()) for start, length in ((0, 9), (700, 20), (300, 3), (40, 1), (1200, 12))
]


def _train(folder: str, depths: str) -> None:
    from megatron_ext.train.pretrain import pretrain

    pretrain([*shlex.split(f"{FLAGS} {depths}"), "--data-path", f"{folder}/corpus", "--save", f"{folder}/model"])


def _generate(task: tuple[str, str]) -> tuple[list[tuple[list[int], str]], list[tuple[list[int], str]], list[int]]:
    """On ranks: what is generated without and with drafts, and how many of these there were and were right."""
    from megatron_ext.plugins.tasks.generation import generate
    from megatron_ext.plugins.tasks.sampling import Sampling
    from megatron_ext.plugins.tasks.trained_model import load_trained

    folder, layout = task
    model = load_trained(["--load", f"{folder}/model", "--device", "cpu", *layout.split()], depths=True)
    sampling = Sampling(max_new_tokens=40, stop=("self.",))
    plain, drafted = (generate(model, PROMPTS, sampling, rows=2, speculative=drafts) for drafts in (False, True))
    counts = [sum(getattr(one, name) for one in drafted) for name in ("drafted", "accepted")]
    tokens = [[(one.tokens, one.reason) for one in made] for made in (plain, drafted)]
    return tokens[0], tokens[1], counts


@pytest.fixture(scope="module", params=["", "--mtp-use-repeated-layer"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("drafts")
    write_corpus(made)
    run_ranks(1, _train, str(made), request.param)
    return str(made)


TP2, PP2, EP2 = (f"--{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline", "expert"))
LAYOUTS = {1: [""], 2: ["", TP2, PP2, EP2], 4: [f"{TP2} {PP2}", f"{EP2} {PP2}"]}


@pytest.fixture(scope="module")
def one_process(folder: str) -> Any:
    [[found]] = run_ranks(1, in_turn, _generate, [(folder, "")])
    return found


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_tokens_are_those_without_drafts(ranks: int, folder: str, one_process: Any) -> None:
    expected, _, counts = one_process
    assert len({len(tokens) for tokens, _ in expected}) > 1, "some end before others"
    for of_rank in run_ranks(ranks, in_turn, _generate, [(folder, layout) for layout in LAYOUTS[ranks]]):
        for plain, drafted, found in of_rank:
            assert plain == drafted == expected
            assert found == counts
    drafts, right = counts
    assert 0.3 * drafts < right < drafts


def test_the_program_says_how_many_drafts_were_right(folder: str, one_process: Any) -> None:
    """A process of its own, as a user starts it: it installs the device before anything of the engine is imported."""
    command = [sys.executable, "tasks/generate.py", "--load", f"{folder}/model", "--device", "cpu", "--speculative"]
    command += ["--prompts", TEXT[:9], TEXT[700:720], "--num-tokens-to-generate", "40"]
    command += ["--output", f"{folder}/answers.jsonl"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout
    answers = [json.loads(line) for line in Path(f"{folder}/answers.jsonl").read_text().splitlines()]
    words = said.splitlines()[-1].split()
    assert words[0] == "drafts:"
    assert 0 < int(words[1]) < int(words[3])
    assert words[5] == f"({int(words[1]) / int(words[3]):.1%})"
    for answer, (tokens, _) in zip(answers, one_process[0], strict=False):
        assert answer["tokens"][: len(tokens)] == tokens
