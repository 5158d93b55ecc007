"""Native checkpoints, in any layout: what tasks make of them, and what they generate, is what transformers does with
the export."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.evaluation_tasks import NEW_TOKENS, narrowed_alike, our_results, their_results, write_tasks
from tests.support.hf_models import quiet_transformers
from tests.support.plain_process import in_plain_process
from tests.support.terminal_session import at_terminal
from tests.support.trained_models import FAMILIES, TEXT, export, train_families, write_corpus

# Of the second tier: tests/plugins/tasks generates in one process.
pytestmark = pytest.mark.full

quiet_transformers()

STEPS = 110
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
FEW_TOKENS = 48


class Trained:
    """Trained models in a folder, task files, and what transformers makes of them."""

    def __init__(self, folder: Path, items: int, tokens: dict[str, int]):
        """tokens: what transformers generates of each family."""
        write_corpus(folder)
        [losses] = run_ranks(1, train_families, str(folder), list(tokens), STEPS)
        assert all(last < 0.6 * first for first, last in losses), "they have learned of the text"
        self.folder, self.files = folder, write_tasks(folder, items)
        exports: dict[str, str] = {family: export(folder, family) for family in tokens}
        self.theirs = in_plain_process(their_results, exports, self.files, tokens)

        for theirs in self.theirs.values():
            assert 0 < theirs["last"] < items, "what is compared is not the same for all items"
            assert len({token for tokens in theirs["generated"] for token in tokens}) > 8, "they write words"
        assert any(0 < theirs["strict"] < items for theirs in self.theirs.values())

    def task(self, family: str, layout: list[str], **more: Any) -> dict[str, Any]:
        flags = ["--load", str(self.folder / family), *layout]
        return {"flags": flags, "files": self.files, "iteration": STEPS, **more}

    def check(self, family: str, found: dict[str, Any]) -> None:
        """Compare with transformers: sums within rounding, counts and tokens exactly."""
        theirs = self.theirs[family]
        if "perplexity" in found:
            for name, nats in (("perplexity", "nats"), ("overlapping", "overlapping_nats")):
                assert found[name]["tokens"] == theirs["tokens"]
                assert found[name]["words"] == theirs["words"]
                assert found[name]["loss"] * theirs["tokens"] == pytest.approx(theirs[nats], rel=1e-6)
            assert found["lambada"]["correct"] == theirs["last"]
            assert found["strict"]["correct"] == theirs["strict"]
            assert found["choices"]["correct"] == theirs["best"]
            assert found["choices"]["correct_normalized"] == theirs["best_normalized"]
        if "generated" in found:
            length = len(found["generated"][0])
            assert length <= len(theirs["generated"][0])
            assert found["generated"] == [tokens[:length] for tokens in theirs["generated"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    tokens = {family: NEW_TOKENS if family == "Llama" else FEW_TOKENS for family in FAMILIES}
    return Trained(tmp_path_factory.mktemp("trained"), 20, tokens)


@pytest.fixture(scope="module")
def trained_for_all(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("all"), 500, dict.fromkeys(FAMILIES, NEW_TOKENS))


def _check(trained: Trained, ranks: int, cases: list[tuple[str, list[str], dict[str, Any]]]) -> None:
    tasks = [trained.task(family, layout, **more) for family, layout, more in cases]
    results = run_ranks(ranks, our_results, tasks)
    assert all(other == results[0] for other in results), "every rank has the same"
    for (family, _, _), found in zip(cases, results[0], strict=True):
        trained.check(family, found)


def test_one_process(trained: Trained) -> None:
    lengths = {family: len(theirs["generated"][0]) for family, theirs in trained.theirs.items()}
    assert lengths["Llama"] == NEW_TOKENS
    uncached = ("Llama", [], {"files": None, "generates": 24, "cached": False})
    _check(trained, 1, [*((family, [], {"generates": lengths[family]}) for family in FAMILIES), uncached])


def test_two_ranks(trained: Trained) -> None:
    """Data-parallel ranks divide what is asked, expert-parallel ones go along with each other."""
    dp2: list[str] = []
    _check(
        trained,
        2,
        [
            ("Llama", dp2, {"generates": 24}),
            ("Mixtral", EP2, {"generates": 24}),
            ("GPT-2", TP2, {"generates": 24}),
            ("Qwen3", PP2, {"generates": 24}),
        ],
    )


def test_tensor_and_pipeline_parallel(trained: Trained) -> None:
    _check(trained, 4, [("Llama", [*TP2, *PP2], {"generates": 48}), ("Mixtral", [*TP2, *PP2], {"generates": 12})])


_EVERY = [(1, []), (2, []), (2, TP2), (2, PP2), (4, [*TP2, *PP2]), (4, TP2)]
_EXPERTS = [(2, EP2), (4, [*EP2, *PP2]), (4, [*EP2, *TP2])]


@pytest.mark.slow  # all families on 500 items in all layouts; the tests above have each layout and each family once
@pytest.mark.parametrize(("ranks", "layout"), [*_EVERY, *_EXPERTS])
def test_every_layout(trained_for_all: Trained, ranks: int, layout: list[str]) -> None:
    families = ["Mixtral"] if EP2[0] in layout else list(FAMILIES)
    _check(trained_for_all, ranks, [(family, layout, {"generates": NEW_TOKENS}) for family in families])


def test_from_hugging_face(trained: Trained) -> None:
    """--load-hf, with the tokenizer that lies in the folder."""
    flags = ["--load-hf", str(trained.folder / "Llama-hf"), "--seq-length", "64"]
    [results] = run_ranks(1, our_results, [{"flags": flags, "files": trained.files, "generates": 24}])
    trained.check("Llama", results[0])


def test_what_sampling_leaves_out_is_what_transformers_does() -> None:
    assert in_plain_process(narrowed_alike, 8)


ASKED = [TEXT[:9], "naïve 数", TEXT[700:720]]
SAMPLED = "--temperature 0.9 --top-k 40 --top-p 0.97 --min-p 0.001 --repetition-penalty 1.1 --num-tokens-to-generate 24"


def _ways_to_ask(folder: str) -> tuple[list[str], list[list[Any]]]:
    """On ranks: what the screen shows, and what is made of prompts from a file and standard input."""
    from megatron_ext.parallel import groups
    from megatron_ext.plugins.tasks import trained_model
    from megatron_ext.plugins.tasks.commands.generate import main
    from megatron_ext.plugins.tasks.leader import Leader, follow
    from megatron_ext.plugins.tasks.scoring import Scorable, score

    model = trained_model.load_trained(["--load", f"{folder}/Llama", "--device", "cpu", *TP2])
    trained_model.load_trained = lambda _argv, **_: model  # for all calls
    groups.destroy = lambda: None
    flags = ["--load", f"{folder}/Llama", "--device", "cpu", *TP2, *SAMPLED.split()]
    place, screens = Path(folder), []

    def asked(name: str, *more: str) -> None:
        main([*flags, *more, "--output", f"{folder}/{name}.jsonl"])

    (place / "asked.txt").write_text("\n".join(ASKED))
    (place / "asked.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in ASKED))
    asked("of_file", "--prompt-file", f"{folder}/asked.txt")
    asked("of_lines", "--prompt-file", f"{folder}/asked.jsonl", "--max-batch-size", "2")
    asked("stopped", "--prompts", *ASKED, "--stop", "e", "zzz")
    asked("other", "--prompts", *ASKED, "--seed", "7")
    sys.stdin = io.StringIO("\n".join(ASKED))
    asked("of_input")
    if os.environ["RANK"] == "0":
        screens.append(at_terminal(lambda: asked("streamed", "--prompts", ASKED[0], "--stop", "e", "zzz")))
    else:
        asked("streamed", "--prompts", ASKED[0], "--stop", "e", "zzz")
    names = ("of_file", "of_lines", "of_input", "stopped", "other", "streamed")
    sequences = [Scorable(list(text.encode()), scored) for text, scored in (("a text", 2), ("another", 5))]
    plain = score(model, sequences, 2)
    if model.rank == 0:
        leads = Leader(model)
        assert leads.score(sequences, 2) == plain
        leads.close()
    else:
        follow(model)
    return screens, [
        [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()] for name in names
    ]


def test_prompts_from_everywhere(trained: Trained) -> None:
    """What is drawn depends on the seed and the number of the prompt, wherever it comes from."""
    [streamed], made = run_ranks(2, _ways_to_ask, str(trained.folder))[0]
    of_file, of_lines, of_input, stopped, other, alone = made
    assert of_file == of_lines == of_input
    assert [one["prompt"] for one in of_file] == ASKED
    assert all(len(one["tokens"]) == 24 and one["reason"] == "length" for one in of_file)
    assert [one["text"] for one in other] != [one["text"] for one in of_file]
    assert any(one["reason"] == "stop" for one in stopped)
    for one, whole in zip(stopped, of_file, strict=True):
        assert one["text"] == whole["text"].split("e")[0]
    assert streamed.startswith(f"{ASKED[0]}{alone[0]['text']}\n")
    assert alone == stopped[:1]
