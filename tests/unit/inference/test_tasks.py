"""How texts are cut into sequences to score: every token once, in any stride and length."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_ext import inference
from megatron_ext.cli import tasks as cli_tasks
from megatron_ext.cli.generate import encoder
from megatron_ext.config.parse.eval_tasks import EvalTask
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.inference import leader
from megatron_ext.inference.sampling import Sampler, Sampling
from megatron_ext.inference.scoring import Scorable, _batches
from megatron_ext.inference.tasks import _last_word, continuation, plain_text, prepare_task, windows
from megatron_ext.tokenizer.byte import ByteTokenizer
from megatron_ext.tokenizer.huggingface import HuggingFaceTokenizer
from megatron_ext.train import trained_model
from megatron_ext.train.callbacks.tasks import Samples, Tasks
from tests.support.instructions import write_tokenizer


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_score_each_token_once(count: int, stride: int) -> None:
    tokens = list(range(count))
    found = list(windows(tokens, 99, 8, stride))
    assert [token for window in found for token in window.tokens[-window.scored :]] == tokens
    assert all(len(window.tokens) <= 9 for window in found)
    assert all(len(window.tokens) == 9 for window in found[1:]), "later windows are given all that there is room for"
    assert found[0].tokens[0] == 99


def test_blanks_before_a_continuation_belong_to_it() -> None:
    found = continuation(ByteTokenizer(), "ab ", "cd", 100, "x")
    assert (bytes(found.tokens), found.scored) == (b"ab cd", 3)
    assert continuation(ByteTokenizer(), "", "cd", 100, "x") == Scorable([256, *b"cd"], 2)
    assert continuation(ByteTokenizer(), " ", "cd", 100, "x") == Scorable([256, *b" cd"], 3)
    assert continuation(ByteTokenizer(), "é", "ü", 100, "x") == Scorable(list("éü".encode()), 2)


def test_what_is_too_long_loses_its_beginning_and_nothing_that_is_scored() -> None:
    cut = continuation(ByteTokenizer(), "abcdef", "gh", 4, "x")
    assert (bytes(cut.tokens), cut.scored) == (b"defgh", 2)
    assert bytes(continuation(ByteTokenizer(), "abcdef", "ghij", 4, "x").tokens) == b"fghij"
    with pytest.raises(DataError, match=r"a\.jsonl:3: choice 1 has 5 tokens to score, .* given 4 at once"):
        continuation(ByteTokenizer(), "abcdef", "ghijk", 4, "a.jsonl:3: choice 1")
    with pytest.raises(DataError, match="has no token of its own to score"):
        continuation(ByteTokenizer(), "abc", "", 4, "a.jsonl:3: choice 1")


def test_a_token_that_begins_texts_stands_before_whole_ones_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())
    begin = next(token["id"] for token in model["added_tokens"] if token["content"] == "<|im_start|>")
    pieces = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    named = {"<|im_start|>": {"id": "<|im_start|>", "ids": [begin], "tokens": ["<|im_start|>"]}}
    model["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": named}
    (folder / "tokenizer.json").write_text(json.dumps(model))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|im_start|>"}))
    tokenizer = HuggingFaceTokenizer(str(folder))

    word = [token for token in tokenizer.encode(" sum") if token != begin]
    assert tokenizer.encode(" sum") == [begin, *word]
    assert continuation(tokenizer, "", " sum", 100, "x") == Scorable([begin, *word], len(word))
    assert continuation(tokenizer, "", "<|im_start|> sum", 100, "x") == Scorable([begin, *word], len(word))
    assert continuation(tokenizer, "the", " sum", 100, "x") == Scorable([*tokenizer.encode("the"), *word], len(word))
    strict = _last_word(tokenizer, "x", "the sum", 100)
    assert strict == Scorable([*tokenizer.encode("the"), *word], len(word))
    assert plain_text(tokenizer, [begin, *word]) == " sum"
    chat = encoder(SimpleNamespace(tokenizer=tokenizer), "chatml")("the sum")
    assert chat.count(begin) == 2, "of the user and of the answer, which the template has written"


def test_perplexity_begins_a_text_with_the_end_of_a_document(tmp_path: Path) -> None:
    """As training does, whatever token begins a text of a conversation."""
    tokenizer: Any = ByteTokenizer()
    tokenizer.bos = 255
    model: Any = SimpleNamespace(
        tokenizer=tokenizer, longest=None, config=SimpleNamespace(model=SimpleNamespace(seq_length=8))
    )
    (tmp_path / "text.jsonl").write_text('{"text": "ab"}\n')
    prepared = prepare_task(model, EvalTask("task", "PERPLEXITY", (str(tmp_path / "text.jsonl"),)))
    assert prepared.sequences == [Scorable([256, 97, 98], 2)]


ITEMS = {
    "LAMBADA": ['{"text": "abc defgh"}', '{"text": "a"}'],
    "MULTIPLE_CHOICE": [
        '{"prompt": "abc", "choices": ["d", "e"], "answer": 0}',
        '{"prompt": "abc", "choices": ["d", "efghijklm"], "answer": 0}',
    ],
    "PERPLEXITY": ['{"text": "abc"}', '{"txt": "d"}'],
}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_that_cannot_be_used_are_named_before_the_first_step(kind: str, tmp_path: Path) -> None:
    model: Any = SimpleNamespace(
        tokenizer=ByteTokenizer(), longest=None, config=SimpleNamespace(model=SimpleNamespace(seq_length=8))
    )
    path = tmp_path / "items.jsonl"
    task = EvalTask("task", kind, (str(path),))
    path.write_text(ITEMS[kind][0] + "\n\n")
    Tasks(model, [task], 1)
    path.write_text("\n".join(ITEMS[kind]))
    with pytest.raises(DataError, match=r"items\.jsonl:2: "):
        Tasks(model, [task], 1)


def test_prompts_that_cannot_be_used_are_named_before_the_first_step() -> None:
    model: Any = SimpleNamespace(tokenizer=ByteTokenizer(), longest=8, vocab_size=257)
    Samples(model, ["abc"], 1, 5)
    assert Samples(model, ["", "a"], 1, 5)._ids == [[model.tokenizer.eod], [97]], "nothing is the end of a document"
    with pytest.raises(ConfigurationError, match="prompt 2 has 4 tokens"):
        Samples(model, ["abc", "abcd"], 1, 5)
    with pytest.raises(ConfigurationError, match="no prompt"):
        Samples(model, [], 1, 5)


@pytest.mark.parametrize(("count", "rows", "replicas"), [(1, 4, 1), (7, 2, 3), (13, 4, 2), (5, 1, 4), (24, 3, 2)])
def test_batches_hold_each_sequence_once_in_equal_shapes(count: int, rows: int, replicas: int) -> None:
    sequences = [Scorable(list(range(3 + 3 * (number % 5))), 1 + number % 2) for number in range(count)]
    dealt = [list(_batches(sequences, rows, replica, replicas, torch.device("cpu"))) for replica in range(replicas)]
    members = [number for batches in dealt for batch in batches for number in batch.members]
    assert sorted(members) == list(range(count))
    for same_round in zip(*dealt, strict=True):
        assert len({(batch.tokens_BS.shape, batch.wanted_N.shape) for batch in same_round}) == 1
    for batch in (batch for batches in dealt for batch in batches):
        for place, target, owner in zip(batch.wanted_N, batch.targets_N, batch.owners_N, strict=True):
            if owner >= 0:
                row = batch.members.index(int(owner))
                position, same_row = divmod(int(place), len(batch.tokens_BS))
                assert same_row == row
                assert sequences[int(owner)].tokens[position + 1] == int(target)


def test_what_is_drawn_depends_on_the_prompt_and_not_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    sampling = Sampling(temperature=1.0, seed=5)

    def drawn(rows: list[int]) -> list[list[int]]:
        sampler = Sampler(sampling, [[0] for _ in rows], rows, 20)
        return [sampler.next(logits[rows]).tolist() for _ in range(6)]

    together = drawn([0, 1, 2])
    for row in range(3):
        assert [chosen[row] for chosen in together] == [chosen[0] for chosen in drawn([row])]
    assert len({tuple(chosen) for chosen in together}) > 1


def test_all_that_is_wrong_with_a_sampling_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Sampling(temperature=-1, top_k=-1, top_p=0, min_p=2, repetition_penalty=0, max_new_tokens=0, stop=("",)).check()
    assert len(caught.value.problems) == 7


def test_flags_of_the_tool_reach_what_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's batch comes after the default; the harness is told how many examples, and how many questions."""
    given: list[Any] = []

    def configured(flags: list[str]) -> None:
        given.append(flags)
        raise DataError("enough")

    monkeypatch.setattr(trained_model, "configure_trained", configured)
    monkeypatch.setattr(cli_tasks, "_tasks", lambda options: [])
    with pytest.raises(DataError, match="enough"):
        cli_tasks.main(["--task", "LAMBADA", "--load", "ckpt", "--micro-batch-size", "3"])
    assert given == [["--micro-batch-size", "8", "--load", "ckpt", "--micro-batch-size", "3"]]
    harness = SimpleNamespace(evaluate=lambda *given: given[1:])  # the module needs lm_eval
    monkeypatch.setitem(sys.modules, "megatron_ext.inference.harness", harness)
    monkeypatch.setattr(leader, "Leader", lambda model: SimpleNamespace(close=lambda: None))
    line = "--task LM_EVAL --lm-eval-tasks arc --include-path folder --num-fewshot 5 --limit 70"
    options = cli_tasks._parser().parse_args(line.split())
    model: Any = SimpleNamespace(rank=0, config=SimpleNamespace(training=SimpleNamespace(micro_batch_size=3)))
    assert cli_tasks._harness(model, options) == (["arc"], 3, "folder", 5, 70)


def test_results_of_the_harness_are_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones too; names, and what it could not compute, are texts and are left out."""
    asked: list[dict[str, Any]] = []
    metrics = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": "N/A", "sample_len": 70}

    def simple_evaluate(**named: Any) -> dict[str, Any]:
        asked.append(named)
        return {"results": {"arc": metrics}}

    parts: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.instance": {"Instance": object},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.tasks": {"TaskManager": lambda include_path: ("tasks of", include_path)},
    }
    for name, held in parts.items():  # as the module is, where it is installed
        monkeypatch.setitem(sys.modules, name, cast(ModuleType, SimpleNamespace(**held)))
    spec = importlib.util.spec_from_file_location("of_a_stand_in", Path(inference.__file__).with_name("harness.py"))
    assert spec is not None
    assert spec.loader is not None
    harness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)
    monkeypatch.setattr(harness, "HarnessModel", lambda leader, rows: (leader, rows))
    found = harness.evaluate("leader", ("arc",), 3, include_path="folder", shots=5, limit=70)
    assert found == {"arc": {"acc,none": 0.5, "sample_len": 70}}
    [named] = asked
    assert (named["model"], named["tasks"], named["task_manager"]) == (("leader", 3), ["arc"], ("tasks of", "folder"))
    assert (named["num_fewshot"], named["limit"]) == (5, 70)
