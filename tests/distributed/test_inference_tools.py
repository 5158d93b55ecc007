"""tasks/generate.py and tasks/main.py on a small checkpoint: each flag, changed alone, changes what they write."""

import itertools
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parallel import groups
from megatron_ext.plugins.tasks.commands import generate, tasks
from megatron_ext.plugins.tasks.scoring import Scorable, score
from megatron_ext.plugins.tasks.trained_model import _saved_flags, load_trained
from tests.support.checkpoints import save_at

# Of the second tier: tests/distributed/test_inference.py generates.
pytestmark = pytest.mark.full

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --mock-data
    --position-embedding-type rope --init-method-std 0.3 --tokenizer-type ByteTokenizer --micro-batch-size 1 --lr 1e-2
    --train-iters 1 --eval-interval 0 --device cpu --make-vocab-size-divisible-by 16
"""
ANSWERS = "--prompts one three --num-tokens-to-generate 8 --temperature 1 --seed 3"
OTHER_ANSWERS = {
    "--prompts": "--prompts two three",
    "--prompt-file": "--prompts one seven",
    "--chat-template": "--chat-template alpaca",
    "--num-tokens-to-generate": "--num-tokens-to-generate 9",
    "--temperature": "--temperature 0.1",
    "--top-k": "--top-k 1",
    "--top-p": "--top-p 0.01",
    "--min-p": "--min-p 0.999",
    "--repetition-penalty": "--repetition-penalty 9",
    "--seed": "--seed 4",
}
SAME_ANSWERS = {"--max-batch-size": "--max-batch-size 1"}
SCORES = {
    "perplexity": "--task PERPLEXITY --valid-data TEXTS",
    "of two files": "--task PERPLEXITY --valid-data TEXTS ITEMS",
    "overlapping": "--task PERPLEXITY --valid-data TEXTS --overlapping-eval 3 --seq-length 8",
    "not overlapping": "--task PERPLEXITY --valid-data TEXTS --seq-length 8",
    "last token": "--task LAMBADA --valid-data TEXTS",
    "last word": "--task LAMBADA --valid-data TEXTS --strict-lambada",
    "choices": "--task MULTIPLE_CHOICE --valid-data CHOICES",
    "listed": "--eval-tasks LIST",
    "fewer rows": "--task PERPLEXITY --valid-data TEXTS --micro-batch-size 1",
}


def _answer_and_score(folder: str) -> dict[str, Any]:
    """On one rank: what both tools write, by the flags that they are given."""
    place, number = Path(folder), itertools.count()
    save_at(f"{folder}/model", [0], shlex.split(MODEL))
    groups.destroy()
    loaded = ["--load", f"{folder}/model", "--device", "cpu"]

    def answers(*words: str) -> list[dict[str, Any]]:
        path = place / f"answers{next(number)}.jsonl"
        assert generate.main([*loaded, *words, "--output", str(path)]) == 0
        return [json.loads(line) for line in path.read_text().splitlines()]

    def scores(line: str) -> dict[str, Any]:
        path = place / f"scores{next(number)}.json"
        for name in ("TEXTS", "ITEMS", "CHOICES", "LIST"):
            line = line.replace(name, f"{folder}/{name}.{'yaml' if name == 'LIST' else 'jsonl'}")
        assert tasks.main([*loaded, *shlex.split(line), "--results", str(path)]) == 0
        return json.loads(path.read_text())

    base = shlex.split(ANSWERS)
    found = {flag: answers(*base, *shlex.split(more)) for flag, more in (OTHER_ANSWERS | SAME_ANSWERS).items()}
    found["base"] = answers(*base)
    (place / "prompts.txt").write_text("one\nthree\n")
    found["from a file"] = answers(*base[3:], "--prompt-file", f"{folder}/prompts.txt")
    found["streamed"] = answers("--prompts", "one", *base[3:], "--stream")
    stop = found["base"][0]["text"][2:4]
    found["--stop"] = answers(*base, "--stop", "never written", stop)
    found["greedy"] = answers("--prompts", "one", "three", "--num-tokens-to-generate", "30", "--ignore-eod")
    many = ["--prompts", *map(str, range(60)), "--num-tokens-to-generate", "30", "--temperature", "2"]
    found["until the end"], found["--ignore-eod"] = answers(*many), answers(*many, "--ignore-eod")
    scored = {name: scores(line) for name, line in SCORES.items()}
    model = load_trained([*loaded, "--attention-dropout", "0.5"])
    modules = [module for chunk in model.chunks for module in chunk.modules()]
    weights = [weight for chunk in model.chunks for weight in chunk.parameters()]
    trains = any(module.training for module in modules) or any(weight.requires_grad for weight in weights)
    return {"answers": found, "stop": stop, "scores": scored, "trains": trains, "iteration": model.iteration}


def _score_in_two_parts(folder: str, sequences: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    """On two ranks, each of which has half of the vocabulary."""
    layout = ["--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "16"]
    model = load_trained(["--load", f"{folder}/model", "--device", "cpu", *layout])
    assert model.config.model.padded_vocab_size == 288, "a half has 144"
    scores = score(model, [Scorable(*sequence) for sequence in sequences], 4)
    return [(one.log_likelihood, one.greedy) for one in scores]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tools")
    texts = ["the first of two texts", "and another one with more words in it"]
    (folder / "TEXTS.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "ITEMS.jsonl").write_text(json.dumps({"text": "a third text"}) + "\n")
    choice = {"prompt": "one or two?", "choices": [" one", " two"], "answer": 0}
    (folder / "CHOICES.jsonl").write_text(json.dumps(choice) + "\n")
    one, two = (f'{{task: {kind}, valid_data: "{folder}/TEXTS.jsonl"}}' for kind in ("PERPLEXITY", "LAMBADA"))
    (folder / "LIST.yaml").write_text(f"first: {one}\nsecond: {two}\n")
    [found] = run_ranks(1, _answer_and_score, str(folder))
    return {**found, "folder": str(folder)}


@pytest.mark.parametrize("flag", OTHER_ANSWERS)
def test_another_value_gives_other_answers(flag: str, found: dict[str, Any]) -> None:
    answers = found["answers"]
    assert [one["tokens"] for one in answers[flag]] != [one["tokens"] for one in answers["base"]]
    assert len(answers[flag]) == 2


def test_answers_do_not_depend_on_where_prompts_come_from_or_how_many_are_at_work(found: dict[str, Any]) -> None:
    answers = found["answers"]
    assert [one["prompt"] for one in answers["base"]] == ["one", "three"]
    assert answers["--max-batch-size"] == answers["from a file"] == answers["base"]
    assert answers["streamed"] == answers["base"][:1]


def test_an_answer_ends_before_a_stop_string_or_with_its_document(found: dict[str, Any]) -> None:
    answers = found["answers"]
    assert answers["--stop"][0]["reason"] == "stop"
    assert answers["--stop"][0]["text"] == answers["base"][0]["text"].partition(found["stop"])[0]
    ended = [one["reason"] == "eod" for one in answers["until the end"]]
    assert any(ended)
    assert {one["reason"] for one in answers["--ignore-eod"]} == {"length"}
    for is_ended, short, long in zip(ended, answers["until the end"], answers["--ignore-eod"], strict=True):
        assert long["tokens"][: len(short["tokens"])] == short["tokens"]
        assert not is_ended or long["tokens"][len(short["tokens"])] == 256


def test_a_model_that_is_loaded_has_neither_dropout_nor_gradients(found: dict[str, Any]) -> None:
    assert (found["trains"], found["iteration"]) == (False, 0)


def test_length_and_precision_are_the_checkpoints_unless_they_are_given(found: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(Path(found["folder"]) / "model", tmp_path / "model")
    config = tmp_path / "model" / "iter_0000000" / "config.yaml"
    config.write_text(config.read_text().replace("fp16: false", "fp16: true"))
    load = {"load": str(tmp_path / "model")}
    lengths = ["--seq-length", "256", "--max-position-embeddings", "256"]
    assert _saved_flags(load) == [*lengths, "--fp16"]
    assert _saved_flags({**load, "bf16": True}) == lengths
    assert _saved_flags({**load, "fp16": False, "seq_length": 8}) == []


def test_the_likeliest_tokens_are_found_in_every_part_of_the_vocabulary(found: dict[str, Any]) -> None:
    """What one rank chooses greedily, two ranks with half of the vocabulary each find the likeliest as well."""
    greedy = [[*one["prompt"].encode(), *one["tokens"]] for one in found["answers"]["greedy"]]
    assert {token // 144 for tokens in greedy for token in tokens[6:]} == {0, 1}, "tokens of both halves, of 288 ids"
    other = [*greedy[0][:-1], (greedy[0][-1] + 1) % 257]
    sequences = [(greedy[0], 30), (greedy[1], 30), (other, 30)]
    first, second = run_ranks(2, _score_in_two_parts, found["folder"], sequences)
    assert first == second
    assert [is_greedy for _, is_greedy in first] == [True, True, False]
    assert first[2][0] < first[0][0] < 0.0


def test_results_say_what_was_asked_of_which_model(found: dict[str, Any]) -> None:
    written = dict(found["scores"]["perplexity"])
    results = written.pop("results")
    assert written == {
        "model": f"{found['folder']}/model", "iteration": 0, "world_size": 1, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1, "precision": "float32", "seq_length": 256,
    }  # fmt: skip
    assert list(results) == ["perplexity"]
    assert results["perplexity"]["tokens"] == len("the first of two texts" + "and another one with more words in it")


def test_each_task_and_each_flag_of_a_task_counts(found: dict[str, Any]) -> None:
    def results(name: str) -> dict[str, Any]:
        return found["scores"][name]["results"]

    perplexity = results("perplexity")["perplexity"]
    assert results("of two files")["perplexity"]["tokens"] == perplexity["tokens"] + len("a third text")
    overlapping, apart = (results(name)["perplexity"] for name in ("overlapping", "not overlapping"))
    assert overlapping["tokens"] == apart["tokens"] == perplexity["tokens"]
    assert len({overlapping["loss"], apart["loss"], perplexity["loss"]}) == 3
    token, word = (results(name)["lambada"] for name in ("last token", "last word"))
    assert token["items"] == word["items"] == 2
    assert word["perplexity"] > 1.5 * token["perplexity"], "of several tokens"
    assert results("choices")["multiple_choice"]["items"] == 1
    assert results("listed") == {"first": perplexity, "second": token}
    assert results("fewer rows")["perplexity"]["loss"] == pytest.approx(perplexity["loss"], rel=1e-6)
