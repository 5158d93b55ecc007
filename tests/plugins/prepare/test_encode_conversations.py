"""Instruction data: what is trained on is what transformers says, in files that training and the tools read."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.integrity import open_index
from megatron_ext.data.mask import BEGINS, COUNTS, HEADER, Mask
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare.chat import ChatTemplate
from megatron_ext.plugins.prepare.chat_templates import TEMPLATES
from megatron_ext.plugins.prepare.commands.inspect_dataset import main as inspect
from megatron_ext.plugins.prepare.commands.merge_datasets import main as merge
from megatron_ext.plugins.prepare.commands.preprocess_data import main as preprocess
from megatron_ext.untrusted.text import load_json
from tests.support.hf_models import quiet_transformers
from tests.support.instructions import OWN_TEMPLATE, alpaca_records, conversations, write_lines, write_tokenizer

quiet_transformers()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("made") / "tokenizer")


def made(folder: Path, *flags: str, name: str = "data") -> Path:
    """Preprocess and return the prefix of the pair."""
    assert preprocess([*flags, "--output-prefix", str(folder / name)]) == 0
    (index,) = folder.glob(f"{name}_*_document.idx")
    return index.with_suffix("")


def with_hf(folder: str) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]


def flags_of(prefix: Path) -> np.ndarray:
    return np.frombuffer(Path(f"{prefix}.mask").read_bytes()[HEADER.size :], np.uint8)


def documents(prefix: Path) -> list[tuple[list[int], list[int]]]:
    """Ids of every document, and 1 where a token is trained on."""
    index = open_index(str(prefix))
    ids, flags = np.fromfile(f"{prefix}.bin", index.dtype), flags_of(prefix)
    assert len(ids) == len(flags)
    borders = [*np.flatnonzero(flags & BEGINS).tolist(), len(ids)]
    return [
        (ids[first:end].tolist(), (flags[first:end] & COUNTS).tolist()) for first, end in itertools.pairwise(borders)
    ]


def theirs(folder: str, template: str, messages: list[list[dict[str, Any]]]) -> list[tuple[list[int], list[int]]]:
    """The same of transformers, which needs a template with {% generation %} for it."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = []
    for one in messages:
        encoded = tokenizer.apply_chat_template(
            one, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        # Nothing of a document predicts its first token.
        found.append((encoded["input_ids"], [0, *encoded["assistant_masks"][1:]]))
    return found


@pytest.mark.parametrize("form", ["sharegpt", "messages"])
@pytest.mark.parametrize("template", ["chatml", "zephyr", "alpaca", "llama2", "llama3"])
def test_ids_and_mask_are_those_of_transformers(form: str, template: str, tokenizer: str, tmp_path: Path) -> None:
    messages = conversations(40)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    if form == "messages":
        records: list[Any] = [{"messages": one} for one in messages]
    else:
        turns = [[{"from": names[turn["role"]], "value": turn["content"]} for turn in one] for one in messages]
        records = [{"conversations": one} for one in turns]
    lines = write_lines(tmp_path / "in.jsonl", records)
    prefix = made(tmp_path, "--input", lines, "--data-format", form, "--chat-template", template, *with_hf(tokenizer))
    found = documents(prefix)
    assert found == theirs(tokenizer, TEMPLATES[template], messages)
    shares = [sum(counts) / len(counts) for _, counts in found]
    assert 0 < min(shares) < max(shares) < 0.9


def test_a_template_without_generation_is_read_by_its_prompts(tokenizer: str, tmp_path: Path) -> None:
    messages = conversations(40)
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": one} for one in messages])
    prefix = made(tmp_path, "--input", lines, "--data-format", "messages", *with_hf(tokenizer))
    assert documents(prefix) == theirs(tokenizer, TEMPLATES["chatml"], messages)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    source = (
        "{% for message in messages %}[{{ message.role }}{{ 'last' if loop.last }}]{{ message.content }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(DataError, match="in another way"):
        template.render(turns)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(DataError, match="refuses the messages"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_alpaca_is_the_prompt_of_stanford_alpaca(tokenizer: str, tmp_path: Path) -> None:
    records = [
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        {"instruction": "Say it.", "input": "", "output": "It."},
    ]
    lines = write_lines(tmp_path / "in.jsonl", records)
    prefix = made(tmp_path, "--input", lines, "--data-format", "alpaca", *with_hf(tokenizer))
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").decode
    (with_input, counts), (without, _) = documents(prefix)
    assert decode(with_input, skip_special_tokens=False) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n"
        "### Response:\n4<|im_end|>"
    )
    assert decode([one for one, trained in zip(with_input, counts, strict=True) if trained], False) == "4<|im_end|>"
    assert decode(without, skip_special_tokens=False) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay it.\n\n### Response:\nIt.<|im_end|>"
    )


def test_completions_are_trained_on_byte_by_byte(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", [{"prompt": "é:", "completion": "yes"}, {"text": "all"}, {"text": ""}])
    flags = ["--input", lines, "--data-format", "completion", "--append-eod", "--tokenizer-type", "ByteTokenizer"]
    prefix = made(tmp_path, *flags)
    assert documents(prefix) == [
        ([*"é:yes".encode(), 256], [0, 0, 0, 1, 1, 1, 1]),
        ([*b"all", 256], [0, 1, 1, 1]),
    ]
    whole = made(tmp_path, *flags, "--train-on-inputs", name="whole")
    assert [counts for _, counts in documents(whole)] == [[0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1]]
    one = write_lines(tmp_path / "one.jsonl", [{"instruction": "a", "output": "b"}])
    alpaca = made(tmp_path, "--input", one, "--data-format", "alpaca", "--tokenizer-type", "ByteTokenizer", name="a")
    ((ids, counts),) = documents(alpaca)
    assert (ids[-2:], sum(counts), ids.count(256)) == ([ord("b"), 256], 2, 1)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_packing_keeps_conversations_whole(workers: str, tokenizer: str, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": one} for one in conversations(200)])
    common = ["--input", lines, "--data-format", "messages", *with_hf(tokenizer)]
    plain = made(tmp_path, *common)
    packed = made(tmp_path, *common, "--seq-length", "512", "--workers", workers, name="packed")
    index = open_index(str(packed))
    assert set(index.lengths.tolist()) == {512}
    wanted, found = documents(plain), documents(packed)
    filling = [one for one in found if sum(one[1]) == 0]
    assert sorted(one for one in found if one not in filling) == sorted(wanted)
    tokens = sum(len(ids) for ids, _ in wanted)
    assert len(index.lengths) * 512 < 1.15 * tokens, "little is filled up"
    begins = np.flatnonzero(flags_of(packed) & BEGINS)
    assert set(range(0, len(index.lengths) * 512, 512)) <= set(begins.tolist()), "every sequence begins a document"
    with pytest.raises(DataError, match=r"in.jsonl:\d+: the document has \d+ tokens, more than --seq-length 64"):
        made(tmp_path, *common, "--seq-length", "64", name="short")
    short = made(tmp_path, *common, "--seq-length", "64", "--on-error", "skip", name="short")
    left_out = json.loads((tmp_path / "short_manifest.json").read_text())["skipped"]
    assert left_out == sum(len(ids) > 64 for ids, _ in wanted) > 0
    assert max(len(ids) for ids, _ in documents(short)) <= 64


def test_parquet_gives_the_same_bytes(tokenizer: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"messages": one} for one in conversations(30)]
    alpaca = [{key: one[key] for key in ("instruction", "output")} for one in alpaca_records(30)]
    for form, rows in (("messages", records), ("alpaca", alpaca)):
        lines = write_lines(tmp_path / f"{form}.jsonl", rows)
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{form}.parquet")
        sources = (lines, str(tmp_path / f"{form}.parquet"))
        one, other = (
            made(tmp_path, "--input", source, "--data-format", form, *with_hf(tokenizer), name=f"{form}{number}")
            for number, source in enumerate(sources)
        )
        for suffix in (".bin", ".idx", ".mask"):
            assert Path(f"{one}{suffix}").read_bytes() == Path(f"{other}{suffix}").read_bytes()


BAD = {
    "no list": ("messages", {"messages": "text"}, 'key "messages" holds no list of turns'),
    "role": ("sharegpt", {"conversations": [{"from": "nobody", "value": "a"}]}, 'a turn from "nobody"'),
    "content": ("messages", {"messages": [{"role": "user"}]}, 'key "content" is missing'),
    "number": ("alpaca", {"instruction": 5, "output": "a"}, 'key "instruction" holds int, not text'),
    "mark": ("alpaca", {"instruction": "\ufdd0", "output": "a"}, "noncharacters"),
    "surrogate": ("completion", {"text": "\ud800"}, "cannot be encoded"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_named_or_left_out(case: str, tmp_path: Path) -> None:
    form, record, message = BAD[case]
    good: dict[str, Any] = {"instruction": "a", "output": "b", "text": "c"}
    good |= {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    good["conversations"] = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    lines = write_lines(tmp_path / "in.jsonl", [good, record])
    flags = ["--input", lines, "--data-format", form, "--tokenizer-type", "ByteTokenizer"]
    flags += [] if form == "completion" else ["--chat-template", "zephyr"]
    with pytest.raises(DataError, match=rf"in\.jsonl:2: .*{message}"):
        made(tmp_path, *flags)
    assert len(documents(made(tmp_path, *flags, "--on-error", "skip"))) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--chat-template chatml", "--chat-template is not read by --data-format text"),
        ("--seq-length 64", "--seq-length is not read by --data-format text"),
        ("--train-on-inputs", "--train-on-inputs is not read by --data-format text"),
        ("--data-format completion --seq-length 1", "--seq-length 1 must be 2 or more"),
        ("--data-format completion --json-keys a b", "completion reads one column; give one name"),
        ("--data-format completion --chat-template chatml", "is not read by --data-format completion"),
        ("--data-format messages", "the tokenizer has no chat template of its own"),
        ("--data-format messages --chat-template nothing", "is no file, and none of tokenizer, alpaca"),
        ("--data-format alpaca --json-keys a", "leave out --json-keys"),
        ("--data-format messages --chat-template chatml --json-keys a b", "reads one column"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", alpaca_records(2))
    with pytest.raises(ConfigurationError, match=message):
        made(tmp_path, "--input", lines, "--tokenizer-type", "ByteTokenizer", *flags.split())


def test_a_mask_that_does_not_fit_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write_lines(tmp_path / "in.jsonl", alpaca_records(20))
    prefix = made(tmp_path, "--input", lines, "--data-format", "alpaca", "--tokenizer-type", "ByteTokenizer")
    assert inspect(["verify", str(prefix), "--vocab-size", "257"]) == 0
    flags, path = flags_of(prefix), Path(f"{prefix}.mask")
    assert f"names {np.count_nonzero(flags & COUNTS)} of {len(flags)} tokens" in capsys.readouterr().out
    content = path.read_bytes()
    for damaged, message in (
        (content[:-1], "speaks of"),
        (content[:5], "is no mask"),
        (b"x" + content[1:], "is no mask"),
        (content[:-1] + b"\x07", "has the flags 7"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            Mask(str(prefix), len(flags)).check()
    path.unlink()
    with pytest.raises(ConfigurationError, match="has no mask"):
        Mask(str(prefix), len(flags))


def test_text_over_instruction_data_takes_the_mask_away(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", [{"text": "abc"}])
    common = ["--input", lines, "--tokenizer-type", "ByteTokenizer"]
    masked = made(tmp_path, *common, "--data-format", "completion")
    plain = made(tmp_path, *common, name="plain")
    assert not Path(f"{plain}.mask").exists()
    for suffix in (".bin", ".idx"):
        assert Path(f"{masked}{suffix}").read_bytes() == Path(f"{plain}{suffix}").read_bytes()
    Path(f"{plain}.mask").write_bytes(b"of other data")
    made(tmp_path, *common, name="plain")
    assert not Path(f"{plain}.mask").exists()


def test_masks_are_merged_with_their_pairs(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    common = ["--data-format", "alpaca", "--tokenizer-type", "ByteTokenizer", "--seq-length", "512"]
    wanted = []
    for name, seed in (("a", 1), ("b", 2)):
        lines = write_lines(tmp_path / f"{name}.jsonl", alpaca_records(20, seed))
        wanted += documents(made(parts, "--input", lines, *common, name=name))
    assert merge(["--input", str(parts), "--output-prefix", str(tmp_path / "merged")]) == 0
    assert documents(tmp_path / "merged") == wanted
    assert Mask(str(tmp_path / "merged"), len(flags_of(tmp_path / "merged"))).packed_to == 512
    next(parts.glob("a_*.mask")).unlink()
    with pytest.raises(DataError, match="has a mask of what is trained on"):
        merge(["--input", str(parts), "--output-prefix", str(tmp_path / "merged")])


def test_the_template_is_part_of_what_a_run_is_continued_from(tokenizer: str, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": one} for one in conversations(5)])
    digests = []
    for template in ("chatml", "zephyr"):
        flags = ["--input", lines, "--data-format", "messages", "--chat-template", template, *with_hf(tokenizer)]
        made(tmp_path, *flags, name=template)
        manifest = load_json((tmp_path / f"{template}_manifest.json").read_bytes())
        digests.append(manifest["chat_template_sha256"])
        assert manifest["data_format"] == "messages"
    assert digests[0] != digests[1]
    (tmp_path / "template.jinja").write_text(OWN_TEMPLATE)
    by_file = made(
        tmp_path,
        *("--input", lines, "--data-format", "messages", "--chat-template", str(tmp_path / "template.jinja")),
        *with_hf(tokenizer),
        name="by_file",
    )
    own = made(tmp_path, "--input", lines, "--data-format", "messages", *with_hf(tokenizer), name="own")
    assert documents(by_file) == documents(own)


def test_what_is_trained_on_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write_lines(tmp_path / "in.jsonl", [{"prompt": "2+2=", "completion": "four"}] * 9)
    common = ["--tokenizer-type", "ByteTokenizer"]
    prefix = made(tmp_path, "--input", lines, "--data-format", "completion", "--seq-length", "24", *common)
    flags = ["sample", "--sample", "0", "--data-path", str(prefix), "--split", "1", "--seq-length", "24", *common]
    flags += ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--micro-batch-size", "1"]
    flags += ["--train-iters", "2", "--lr", "1", "--data-order", "formula", "--assistant-only-loss"]
    capsys.readouterr()
    assert inspect(flags) == 0
    document = "\n--- document\n"
    plain = document.join(["2+2=\u27e6four\u27e7", "2+2=\u27e6four\u27e7", "2+2=\u27e6four\u27e7"])
    assert capsys.readouterr().out.splitlines()[1:] == plain.splitlines()
    assert inspect([*flags, "--color", "always"]) == 0
    colored = plain.replace("\u27e6", "\x1b[32m").replace("\u27e7", "\x1b[0m")
    assert capsys.readouterr().out.splitlines()[1:] == colored.splitlines()
    assert inspect([flag for flag in flags if flag != "--assistant-only-loss"]) == 0
    shown = capsys.readouterr()
    assert "2+2=four" in shown.out
    assert "\u27e6" not in shown.out
    assert "has a mask of what is trained on, and all its tokens count" in shown.err
    with pytest.raises(ConfigurationError, match="packed to sequences of 24 tokens, and --seq-length 12"):
        inspect([*flags, "--seq-length", "12"])
    with pytest.raises(ConfigurationError, match="--assistant-only-loss needs data with a mask"):
        inspect([*(flag for flag in flags if flag not in ("--data-path", str(prefix))), "--mock-data"])
