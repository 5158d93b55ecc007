"""What a model writes is what a plain loop over a model that is a table writes, however many prompts are at work; and
what the first rank asks for is what all ranks do."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.inference import leader, tasks
from megatron_ext.inference.generation import Generated, generate
from megatron_ext.inference.model import Model
from megatron_ext.inference.sampling import Sampling, narrowed, penalized
from megatron_ext.inference.scoring import Scorable
from megatron_ext.inference.streaming import Stream
from megatron_ext.tokenizer.byte import ByteTokenizer
from tests.support.scripted_model import EOD, group_of, logits_of, scripted_model

YES_NO = (False, True)
PROMPTS = [list(text) for text in (b"a", b"bca", b"ab", b"edcbaedc", b"c")]


def _plain(prompt: list[int], sampling: Sampling) -> Generated:
    """Generate by a loop, one token after the other."""
    tokens: list[int] = []
    while True:
        text = [*prompt, *tokens]
        tokens.append(int(logits_of(text[-1], len(text) - 1)[:257].argmax()))
        if tokens[-1] == EOD and not sampling.ignore_eod:
            tokens.pop()
            reason = "eod"
            break
        written = bytes(token for token in tokens if token != EOD).decode()
        if any(stop in written for stop in sampling.stop):
            reason = "stop"
            break
        if len(tokens) == sampling.max_new_tokens:
            reason = "length"
            break
    written = bytes(token for token in tokens if token != EOD).decode()
    ends = [written.index(stop) for stop in sampling.stop if stop in written]
    return Generated(tokens, written[: min(ends)] if ends else written, reason)


@pytest.mark.parametrize("cached", YES_NO)
@pytest.mark.parametrize("ignore_eod", YES_NO)
@pytest.mark.parametrize("stop", [(), ("b",), ("zz", "ca"), ("dd", "a", "cb")])
def test_texts_are_those_of_a_plain_loop(cached: bool, ignore_eod: bool, stop: tuple[str, ...]) -> None:
    """However many prompts are at work at once; and what is told of each token grows by one."""
    for most, rows in ((1, 2), (7, 1), (7, 3), (9, 16)):
        sampling = Sampling(max_new_tokens=most, stop=stop, ignore_eod=ignore_eod)
        told: dict[int, list[list[int]]] = {number: [] for number in range(len(PROMPTS))}
        found = generate(
            scripted_model(),
            PROMPTS,
            sampling,
            rows=rows,
            cached=cached,
            on_token=lambda number, tokens, told=told: told[number].append(tokens),
        )
        expected = [_plain(prompt, sampling) for prompt in PROMPTS]
        assert found == expected
        for number, one in enumerate(expected):
            growing = [one.tokens[:count] for count in range(1, len(one.tokens) + 1)]
            assert told[number] == growing + ([one.tokens] if one.reason == "eod" else [])


def test_what_is_drawn_is_the_prompts_own() -> None:
    """By its number and the seed, however the prompts are batched."""
    sampling = Sampling(temperature=0.9, max_new_tokens=6, seed=3, ignore_eod=True)
    together = generate(scripted_model(), PROMPTS, sampling)
    for rows, cached in itertools.product((1, 2, 3), YES_NO):
        assert generate(scripted_model(), PROMPTS, sampling, rows=rows, cached=cached) == together
    others = generate(scripted_model(), PROMPTS, dataclasses.replace(sampling, seed=4))
    assert all(one != other for one, other in zip(together, others, strict=True))
    same = generate(scripted_model(), [PROMPTS[0]] * 4, sampling)
    assert len({tuple(one.tokens) for one in same}) > 1


def test_what_the_leader_asks_for_is_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is given reaches the others, in its place; the listener alone stays with the first."""
    said: list[Any] = []
    done: dict[str, list[Any]] = {"first": [], "other": []}
    who = "first"

    def tell(what: Any) -> Any:
        if who == "first":
            said.append(what)
            return what
        return said.pop(0)

    def recorded(name: str) -> Any:
        def call(model: Any, *given: Any, **named: Any) -> Any:
            assert model.name == who
            done[who].append((name, given, named))
            return f"{name} of {who}"

        call.__name__ = name
        return call

    monkeypatch.setattr(leader, "_tell", tell)
    for name in ("generate", "score"):
        monkeypatch.setattr(leader, name, recorded(name))
    leads = leader.Leader(SimpleNamespace(rank=0, name="first"))  # pyright: ignore[reportArgumentType]
    sampling, listener = Sampling(seed=7), print
    assert leads.score([Scorable([1, 2], 1)], 3) == "score of first"
    assert leads.generate([(1, 2)], sampling, 4, listener) == "generate of first"  # pyright: ignore
    assert leads.generate([[3]], sampling, 6) == "generate of first"
    leads.close()
    who = "other"
    leader.follow(SimpleNamespace(name="other"))  # pyright: ignore[reportArgumentType]
    scored = ("score", ([Scorable([1, 2], 1)], 3), {})
    assert done["first"] == [
        scored,
        ("generate", ([(1, 2)], sampling), {"rows": 4, "on_token": listener}),
        ("generate", ([[3]], sampling), {"rows": 6, "on_token": None}),
    ]
    assert done["other"] == [
        scored,
        ("generate", ([[1, 2]], sampling), {"rows": 4}),
        ("generate", ([[3]], sampling), {"rows": 6}),
    ]
    with pytest.raises(AssertionError, match="the first rank leads"):
        leader.Leader(SimpleNamespace(rank=1))  # pyright: ignore[reportArgumentType]


def test_numbers_of_a_model_by_its_configuration() -> None:
    for kind, length, positions in itertools.product(("learned_absolute", "rope"), (16, 32), (16, 64)):
        model = scripted_model(position_embedding_type=kind, seq_length=length, max_position_embeddings=positions)
        learned = kind == "learned_absolute"
        assert model.longest == (positions if learned else None)
        assert tasks.length_of(model) == (min(length, positions) if learned else length)
        assert (model.vocab_size, model.eod) == (257, 256)
    none = dataclasses.replace(scripted_model(), tokenizer=None)
    assert none.eod is None
    for stages, rank in ((1, 0), (4, 0), (4, 3)):
        groups: Any = SimpleNamespace(pp=group_of(stages, rank), dp_cp=group_of(5, 2))
        divided = dataclasses.replace(scripted_model(), groups=groups)
        assert (divided.is_last_stage, divided.replica, divided.replicas) == (rank == stages - 1, 2, 5)


def _kept(scores: Sequence[float], sampling: Sampling) -> set[int]:
    """Return the tokens that are drawn from, by sorting: the likeliest k, of these until p is reached, of these those
    that are likely enough."""
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = order[: sampling.top_k] if sampling.top_k else order

    def probabilities() -> dict[int, float]:
        weights = {token: math.exp(scores[token] / sampling.temperature) for token in kept}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    if sampling.top_p < 1.0:
        together, narrower = 0.0, []
        for token, probability in probabilities().items():
            if together >= sampling.top_p:
                break
            narrower.append(token)
            together += probability
        kept = narrower
    likely = probabilities()
    return {token for token in kept if likely[token] >= sampling.min_p * likely[kept[0]]}


def test_what_is_drawn_from_by_all_settings_together() -> None:
    rows = [[1.0, 3.0, 2.5, -1.0, 0.2, 2.9], [0.1, 0.0, 0.3, 0.2, -0.1, 4.0]]
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.5, 1.0, 2.0), (0, 1, 2, 4, 9), (0.33, 0.77, 1.0), (0.0, 0.15, 0.62, 1.0)
    ):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        found = narrowed(torch.tensor(rows), sampling)
        for row, values in zip(rows, found.tolist(), strict=True):
            assert {token for token, value in enumerate(values) if value > -math.inf} == _kept(row, sampling), sampling
            assert all(
                value in (-math.inf, pytest.approx(row[token] / temperature)) for token, value in enumerate(values)
            )


def test_used_tokens_alone_are_penalized() -> None:
    scores = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    used = torch.tensor([[True, True, False, False, True]])
    assert penalized(scores, used, 4.0).tolist() == [[0.5, -8.0, 2.0, -2.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "wrong", "flag"),
    [
        ("temperature", -0.1, "--temperature -0.1"),
        ("top_k", -1, "--top-k -1"),
        ("top_p", 0.0, "--top-p 0.0"),
        ("top_p", 1.1, "--top-p 1.1"),
        ("min_p", -0.1, "--min-p -0.1"),
        ("min_p", 1.1, "--min-p 1.1"),
        ("repetition_penalty", 0.0, "--repetition-penalty 0.0"),
        ("max_new_tokens", 0, "--num-tokens-to-generate 0"),
        ("stop", ("a", ""), "--stop has"),
    ],
)
def test_each_wrong_setting_is_named_alone(name: str, wrong: Any, flag: str) -> None:
    given: Any = {name: wrong}
    with pytest.raises(ConfigurationError) as caught:
        Sampling(**given).check()
    [problem] = caught.value.problems
    assert problem.startswith(f"{flag} ")


@pytest.mark.parametrize(("stage", "chunks"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_pass_goes_through_all_stages_and_chunks(stage: int, chunks: int) -> None:
    """Of three stages: every chunk but the first of all is given something, and every one but the last gives on."""
    log: list[Any] = []

    def chunk(number: int) -> Any:
        def call(tokens: Any, positions: Any, inference: Any) -> str:
            log.append((number, tokens, positions, inference))
            return f"output of {number}"

        made: Any = call
        made.set_input_tensor = lambda given: log.append((number, given))
        return made

    def receive(shapes: Any, is_first_stage: bool) -> str:
        log.append(("shape", shapes, is_first_stage))
        return "received"

    p2p = SimpleNamespace(
        recv_forward=receive, send_forward=lambda given, is_last_stage: log.append(("sent", given, is_last_stage))
    )
    model = dataclasses.replace(scripted_model(), p2p=p2p, chunks=[chunk(number) for number in range(chunks)])  # pyright: ignore
    model.groups.pp = group_of(3, stage)
    tokens: Any = SimpleNamespace(shape=(2, 5))
    found = Model.forward(model, tokens, "positions", "inference")  # pyright: ignore
    expected: list[Any] = []
    for number in range(chunks):
        if (stage, number) != (0, 0):
            expected += [("shape", [(5, 2, 64)], False), (number, "received")]
        expected.append((number, tokens, "positions", "inference"))
        if (stage, number) != (2, chunks - 1):
            expected.append(("sent", [f"output of {number}"], False))
    assert log == expected
    assert found == (f"output of {chunks - 1}" if stage == 2 else None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_the_first_rank_says_goes_to_all(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    monkeypatch.setattr(
        torch.distributed,
        "broadcast_object_list",
        lambda said, src: told.append((list(said), src)) or said.__setitem__(0, 7),
    )
    assert leader._tell("close") == ("close" if world_size == 1 else 7)
    assert told == ([] if world_size == 1 else [(["close"], 0)])


def test_a_stream_is_the_text_that_is_returned() -> None:
    """Whatever stop strings begin with themselves or with each other: nothing of them is written, and nothing twice."""
    for stop in ((), ("aab",), ("aaa",), ("aba", "bb"), ("abab",), ("b",)):
        for letters in itertools.product("ab", repeat=6):
            whole = "".join(letters)
            ends = [whole.index(one) + len(one) for one in stop if one in whole]
            made = whole[: min(ends)] if ends else whole
            places = [made.index(one) for one in stop if one in made]
            final = made[: min(places)] if places else made
            written: list[str] = []
            stream = Stream(ByteTokenizer(), [*b"x"], stop, written.append)
            for count in range(1, len(made) + 1):
                stream(0, [*made[:count].encode()])
                assert final.startswith("".join(written)), (stop, whole)
            stream.finish(final)
            assert "".join(written) == final
            assert "" not in written
