"""What is asked of a model is what all ranks do: texts and scores against a plain loop over a model that is a table,
and each setting by itself."""

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.eval_tasks import EvalTask
from megatron_ext.durable import replacing
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.inference import files, leader, tasks
from megatron_ext.inference.generation import Generated, generate
from megatron_ext.inference.model import Model
from megatron_ext.inference.sampling import Sampling, narrowed, penalized
from megatron_ext.inference.scoring import Scorable, Score, _Scored, score
from megatron_ext.inference.streaming import Stream
from megatron_ext.tokenizer.byte import ByteTokenizer
from megatron_ext.untrusted.folder import file_inside, is_plain
from megatron_ext.untrusted.text import DEPTH, ExcessiveError, TextError, load_json, read_file
from megatron_ext.untrusted.yaml_text import load_yaml
from tests.support.small_models import small_config

YES_NO = (False, True)
EOD, WIDTH = 256, 264
LETTERS = [*b"abcde", EOD]
DRAWN = torch.Generator().manual_seed(5)
TABLE = torch.full((5, 16, WIDTH), -50.0)
TABLE[:, :, LETTERS] = torch.randn(5, 16, 6, generator=DRAWN)
TABLE[:, :, 257:] = 100.0  # padding of the vocabulary is no token


def _logits(token: int, position: int) -> torch.Tensor:
    return TABLE[token % 5, position % 16]


class Scripted(Model):
    """A model that is a table: what comes next depends on the last token and on its position."""

    def forward(self, tokens_BS: torch.Tensor, positions: torch.Tensor, inference: Any) -> torch.Tensor:
        rows, length = tokens_BS.shape
        places = positions.expand(rows, length)
        found = [
            torch.stack([_logits(int(tokens_BS[row, s]), int(places[row, s])) for row in range(rows)])
            for s in range(length)
        ]
        return inference.read(torch.stack(found), lambda hidden: hidden)


def _group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def _model(tokenizer: Any = None, **model: Any) -> Scripted:
    config = small_config({"position_embedding_type": "rope", "padded_vocab_size": WIDTH, **model}, vocab_size=257)
    groups: Any = SimpleNamespace(tp=_group(), pp=_group(), dp_cp=_group())
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    return Scripted(config, device, groups, None, [], tokenizer or ByteTokenizer())  # pyright: ignore


PROMPTS = [list(text) for text in (b"a", b"bca", b"ab", b"edcbaedc", b"c")]


def _plain(prompt: list[int], sampling: Sampling) -> Generated:
    """Generate by a loop, one token after the other."""
    tokens: list[int] = []
    while True:
        text = [*prompt, *tokens]
        tokens.append(int(_logits(text[-1], len(text) - 1)[:257].argmax()))
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
            _model(),
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
    """By its number in the session and the seed, however the prompts are batched."""
    sampling = Sampling(temperature=0.9, max_new_tokens=6, seed=3, ignore_eod=True)
    together = generate(_model(), PROMPTS, sampling)
    for rows, cached in itertools.product((1, 2, 3), YES_NO):
        assert generate(_model(), PROMPTS, sampling, rows=rows, cached=cached) == together
        assert generate(_model(), PROMPTS[2:], sampling, rows=rows, cached=cached, first=2) == together[2:]
    others = generate(_model(), PROMPTS, dataclasses.replace(sampling, seed=4))
    assert all(one != other for one, other in zip(together, others, strict=True))
    same = generate(_model(), [PROMPTS[0]] * 4, sampling)
    assert len({tuple(one.tokens) for one in same}) > 1


def test_scores_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of all lengths, of which one token or more are scored."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    letters, drawn = torch.tensor(LETTERS), torch.Generator().manual_seed(7)
    sequences = [
        Scorable(letters[torch.randint(6, (length,), generator=drawn)].tolist(), scored)
        for length, scored in ((2, 1), (5, 4), (9, 2), (3, 1), (12, 11), (9, 8), (2, 1))
    ]
    for begun in sequences[:3]:  # those that the model finds likeliest, too
        tokens = list(begun.tokens[:1])
        while len(tokens) < 6:
            tokens.append(int(_logits(tokens[-1], len(tokens) - 1)[:257].argmax()))
        sequences.append(Scorable(tokens, 3))
    expected = []
    for one in sequences:
        nats, greedy = 0.0, True
        for place in range(len(one.tokens) - one.scored, len(one.tokens)):
            logits = _logits(one.tokens[place - 1], place - 1)[:257]
            nats += float(logits.log_softmax(-1)[one.tokens[place]])
            greedy = greedy and int(logits.argmax()) == one.tokens[place]
        expected.append((pytest.approx(nats, rel=1e-6), greedy))
    assert {greedy for _, greedy in expected} == {False, True}
    for rows in (1, 2, 3, 16):
        found = score(_model(), sequences, rows)
        assert [(one.log_likelihood, one.greedy) for one in found] == expected
    assert score(_model(), [], 2) == []


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
    leads.wait()
    assert leads.generate([(1, 2)], sampling, 4, listener, 5) == "generate of first"  # pyright: ignore
    assert leads.generate([[3]], sampling, 6) == "generate of first"
    leads.close()
    who = "other"
    leader.follow(SimpleNamespace(name="other"))  # pyright: ignore[reportArgumentType]
    scored = ("score", ([Scorable([1, 2], 1)], 3), {})
    assert done["first"] == [
        scored,
        ("generate", ([(1, 2)], sampling), {"rows": 4, "first": 5, "on_token": listener}),
        ("generate", ([[3]], sampling), {"rows": 6, "first": 0, "on_token": None}),
    ]
    assert done["other"] == [
        scored,
        ("generate", ([[1, 2]], sampling), {"rows": 4, "first": 5}),
        ("generate", ([[3]], sampling), {"rows": 6, "first": 0}),
    ]
    with pytest.raises(AssertionError, match="the first rank leads"):
        leader.Leader(SimpleNamespace(rank=1))  # pyright: ignore[reportArgumentType]


def test_numbers_of_a_model_by_its_configuration() -> None:
    for kind, length, positions in itertools.product(("learned_absolute", "rope"), (16, 32), (16, 64)):
        model = _model(position_embedding_type=kind, seq_length=length, max_position_embeddings=positions)
        learned = kind == "learned_absolute"
        assert model.longest == (positions if learned else None)
        assert tasks.length_of(model) == (min(length, positions) if learned else length)
        assert (model.vocab_size, model.eod) == (257, 256)
    none = dataclasses.replace(_model(), tokenizer=None)
    assert none.eod is None
    for stages, rank in ((1, 0), (4, 0), (4, 3)):
        groups: Any = SimpleNamespace(pp=_group(stages, rank), dp_cp=_group(5, 2))
        divided = dataclasses.replace(_model(), groups=groups)
        assert (divided.is_last_stage, divided.replica, divided.replicas) == (rank == stages - 1, 2, 5)


TEXTS = ("a bc d\n", "été x")


def test_perplexity_is_per_token_word_and_byte(tmp_path: Path) -> None:
    """Of all files together; no two of the counts are equal."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    files = tuple(str(tmp_path / f"{number}.txt") for number in range(2))
    made = {
        stride: tasks.prepare_task(_model(seq_length=4), EvalTask("t", "PERPLEXITY", files, stride))
        for stride in (None, 1, 3, 4, 9)
    }
    for stride, task in made.items():
        expected = []
        for text in TEXTS:
            whole, done = [EOD, *text.encode()], 0
            while done < len(whole) - 1:
                until = min(done + (min(stride or 4, 4) if done else 4), len(whole) - 1)
                expected.append(Scorable(whole[max(0, until - 4) : until + 1], until - done))
                done = until
        assert list(task.sequences) == expected
        assert sum(one.scored for one in task.sequences) == 14
    scores = [Score(-1.0 - number, greedy=False) for number in range(4)]
    nats, tokens, words, size = 10.0, 14, 5, 14
    assert made[None].results(scores) == {
        "loss": nats / tokens, "perplexity": math.exp(nats / tokens), "word_perplexity": math.exp(nats / words),
        "byte_perplexity": math.exp(nats / size), "bits_per_byte": nats / size / math.log(2),
        "tokens": tokens, "words": words, "bytes": size,
    }  # fmt: skip


def test_every_kind_of_task_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(seq_length=12)
    for kind in ("PERPLEXITY", "LAMBADA", "MULTIPLE_CHOICE"):
        task = EvalTask("t", kind, ("file",))
        prepared = tasks.PreparedTask([Scorable([1, 2], 1)], lambda scores, kind=kind: {kind: len(scores)})
        asked: list[Any] = []
        monkeypatch.setitem(
            tasks._PREPARED, kind, lambda *given, asked=asked, prepared=prepared: asked.append(given) or prepared
        )
        monkeypatch.setattr(
            tasks, "score", lambda model, sequences, rows, asked=asked: asked.append((sequences, rows)) or [1, 2, 3]
        )
        assert tasks.evaluate_task(model, task, 5) == {kind: 3}
        assert asked == [(model.tokenizer, task, 12), (prepared.sequences, 5)]
        with pytest.raises(ConfigurationError, match=f"^{kind} needs the model's tokenizer"):
            tasks.evaluate_task(dataclasses.replace(model, tokenizer=None), task, 5)


def test_choices_of_questions_with_unequal_numbers_of_them(tmp_path: Path) -> None:
    """Scores in the order of the choices of all files; what is likeliest as it is, and by the character."""
    lines = (
        '{"prompt": "p ", "choices": ["aa", "b"], "answer": 0}\n{"prompt": "q", "choices": ["c", "dd", "e"], '
        '"answer": "e"}\n',
        '{"prompt": "", "choices": ["ffff", "g"], "answer": 1}\n',
    )
    for number, text in enumerate(lines):
        (tmp_path / f"{number}.jsonl").write_text(text)
    files = tuple(str(tmp_path / f"{number}.jsonl") for number in range(2))
    task = tasks.prepare_task(_model(), EvalTask("t", "MULTIPLE_CHOICE", files))
    assert list(task.sequences) == [
        Scorable(list(b"p aa"), 3), Scorable(list(b"p b"), 2),
        Scorable(list(b"qc"), 1), Scorable(list(b"qdd"), 2), Scorable(list(b"qe"), 1),
        Scorable([EOD, *b"ffff"], 4), Scorable([EOD, *b"g"], 1),
    ]  # fmt: skip
    scores = [Score(value, greedy=False) for value in (-3.0, -2.0, -5.0, -6.0, -4.0, -4.0, -3.0)]
    # As they are: b, e, g. By the character: aa (1.5), dd (3), ffff (1).
    assert task.results(scores) == {
        "accuracy": 2 / 3, "accuracy_normalized": 1 / 3, "correct": 2, "correct_normalized": 1, "items": 3
    }  # fmt: skip


@pytest.mark.parametrize(("strict", "scored"), [(False, 1), (True, 4)])
def test_the_last_token_or_the_last_word_is_scored(strict: bool, scored: int, tmp_path: Path) -> None:
    texts = ("one two", "of all")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    files = tuple(str(tmp_path / f"{number}.jsonl") for number in range(2))
    task = tasks.prepare_task(_model(), EvalTask("t", "LAMBADA", files, strict_lambada=strict))
    assert list(task.sequences) == [Scorable(list(text.encode()), scored) for text in texts]
    assert task.results([Score(-1.0, greedy=True), Score(-4.0, greedy=False)]) == {
        "accuracy": 0.5, "perplexity": math.exp(2.5), "correct": 1, "items": 2
    }  # fmt: skip


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


def test_a_name_leads_to_what_lies_in_the_folder(tmp_path: Path) -> None:
    """Or to one of the further folders themselves; a folder whose name begins alike is another one."""
    home, also = tmp_path / "home", tmp_path / "also"
    places = (home, home / "inner", tmp_path / "home2", also, also / "below", tmp_path / "also2")
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / "file").write_text(str(place))
    for number, place in enumerate(places):
        (home / f"link{number}").symlink_to(place / "file")
        (home / f"folder{number}").symlink_to(place)
    for (number, place), further, nested in itertools.product(enumerate(places), YES_NO, YES_NO):
        inside = place in (home, home / "inner") or (further and place == also)
        for name in (f"link{number}", f"folder{number}/file"):
            plain = nested or "/" not in name
            assert is_plain(name, nested=nested) == plain
            if inside and plain:
                assert file_inside(home, name, also=[also] if further else [], nested=nested) == home / name
                continue
            with pytest.raises(DataError, match="out of its folder" if plain else "is not the plain name"):
                file_inside(home, name, also=[also] if further else [], nested=nested)


def test_bounds_are_the_last_that_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ExcessiveError, match="more than 4 bytes"):
        read_file(path, 4)
    for read, levels in itertools.product((lambda text: load_json(text.encode()), load_yaml), (DEPTH, DEPTH + 1)):
        for text in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels):
            if levels == DEPTH:
                assert read(text)
                continue
            with pytest.raises(ExcessiveError, match=f"more than {DEPTH} levels"):
                read(text)
    assert load_json(b'[{"a": 1}, {"a": 2}, "a", {"b": {"a": 3}}]') == [{"a": 1}, {"a": 2}, "a", {"b": {"a": 3}}]
    for text in ('{"a": 1, "b": 2, "a": 3}', '[{"c": {"b": 1, "a": 1, "a": 1}}]'):
        for read in (lambda text: load_json(text.encode()), load_yaml):
            with pytest.raises(TextError, match=r"named twice: a$"):
                read(text)
    values = 19_999  # and the list itself
    assert len(load_yaml(f"[{'1,' * values}]")) == values
    with pytest.raises(ExcessiveError, match="more than 20,000 values"):
        load_yaml(f"[{'1,' * (values + 1)}]")
    assert load_yaml("9" * 400) == int("9" * 400)
    with pytest.raises(ExcessiveError, match="a number of 401 digits"):
        load_yaml("9" * 401)


def test_a_file_is_replaced_by_the_name_that_is_given(tmp_path: Path) -> None:
    """And what lies under that name before is no way out."""
    (tmp_path / "outside").write_text("outside")
    for temporary, name in ((None, ".file.tmp"), (tmp_path / "mine", "mine")):
        (tmp_path / name).symlink_to(tmp_path / "outside")
        with replacing(tmp_path / "file", temporary) as file:
            assert sorted(os.listdir(tmp_path)) == sorted({"outside", name, *(["file"] if temporary else [])})
            file.write(name.encode())
        assert (tmp_path / "file").read_text() == name
        assert (tmp_path / "outside").read_text() == "outside"
        assert sorted(os.listdir(tmp_path)) == ["file", "outside"]


def test_a_rank_next_to_the_first_of_a_tensor_parallel_group_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a group compute the same scores; the sum over ranks counts them once."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model = _model()
    model.groups.tp = _group(1, 1)
    found = score(model, [Scorable([97, 98, 99], 2)], 1)
    assert found == [Score(0.0, True)]


def test_the_likeliest_token_of_all_parts_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its part; of equal ones it is the first."""
    parts = [torch.tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 7.0]]), torch.tensor([[9.0, 9.0, 3.0], [7.0, 1.0, 1.0]])]
    model = _model()
    for rank in range(2):
        model.groups.tp = _group(2, rank)
        reader: Any = object.__new__(_Scored)
        reader._model = model
        own = []

        def gather(into: list[torch.Tensor], given: torch.Tensor, group: Any, own: list[Any] = own) -> None:
            assert group.size() == 2
            own.append(given)
            for number, (one, part) in enumerate(zip(into, parts, strict=True)):
                values, tokens = part.max(-1)
                one.copy_(torch.stack((values.double(), (tokens + 3 * number).double())) if given.dim() == 2 else part)

        monkeypatch.setattr(torch.distributed, "all_gather", gather)
        assert reader._best(parts[rank]).tolist() == [3, 0]
        values, tokens = parts[rank].max(-1)
        assert torch.equal(own[0], torch.stack((values.double(), tokens.double() + 3 * rank)))


def test_the_vocabulary_of_all_ranks_is_in_order_and_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(padded_vocab_size=260)
    model.groups.tp = _group(2, 1)
    whole = torch.arange(520.0).view(2, 260)

    def gather(into: list[torch.Tensor], given: torch.Tensor, group: Any) -> None:
        for one, part in zip(into, whole.split(130, dim=1), strict=True):
            one.copy_(part)

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    assert torch.equal(model.whole_vocabulary(whole[:, 130:]), whole[:, :257])


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
    model = dataclasses.replace(_model(), p2p=p2p, chunks=[chunk(number) for number in range(chunks)])  # pyright: ignore
    model.groups.pp = _group(3, stage)
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


def test_the_last_word_may_stand_earlier_too() -> None:
    """And inside of another word; blanks around the text belong to nothing."""
    for text, before, word in (
        ("a cat saw a cat", "a cat saw a", " cat"), ("category: cat", "category:", " cat"), ("  ab  cd \n", "ab", " cd")
    ):  # fmt: skip
        tokens = [*before.encode(), *word.encode()]
        assert tasks._last_word(ByteTokenizer(), "w", text, 100) == Scorable(tokens, len(word))


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


def test_lines_of_files_end_with_line_feeds_alone(tmp_path: Path) -> None:
    """Unicode has other ends of lines, which may stand in a text; a mark of the byte order is no part of it."""
    odd = "a\u2028b\u0085c\x0cd"
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(f'\ufeff{{"prompt": "{odd.replace(chr(12), "")}"}}\n \n\r\n{{"prompt": ""}}\r\n'.encode())
    found = list(files.read_items(path, ["prompt"]))
    assert found == [
        (f"{path}:1", {"prompt": odd.replace("\x0c", "")}),
        (f"{path}:4", {"prompt": ""}),
    ]
    for name in ("p.json", "p.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x", "text": "y"}')
        assert files.read_prompts(tmp_path / name) == ["x"]
        assert files.read_documents(tmp_path / name) == ["y"]
    (tmp_path / "p.txt").write_bytes(f"\ufeff{odd}\r\n\n  \nlast".encode())
    assert files.read_prompts(tmp_path / "p.txt") == [odd, "  ", "last"]
    assert files.read_documents(tmp_path / "p.txt") == [f"{odd}\r\n\n  \nlast"]
    for wrong in ('["prompt"]', '"prompt"', "{}"):
        path.write_text(f"\n{wrong}\n")
        with pytest.raises(DataError, match=r"jsonl:2: no prompt; a line must be an object with prompt"):
            list(files.read_items(path, ["prompt"]))
