"""How a tool ends, and what becomes of output that nobody takes."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext import errors
from megatron_ext.commandline import ToolParser, run_tool, split_at_dashes, write_output
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.telemetry.metrics_file import MetricsFile
from tests.support.corpora import write_documents
from tests.support.full_disk import files_up_to
from tests.support.samples import step

CODES = {
    "TrainingError": 1,
    "ConfigurationError": 64,
    "DataError": 65,
    "NumericError": 70,
    "MemoryExhaustedError": 71,
    "StorageError": 74,
    "StoppedBySignal": 75,
    "StoppedBefore": 75,
    "PeerLostError": 76,
}


def _ended(raised: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch) -> object:
    def main(argv: list[str]) -> int:
        assert argv == ["a", "b"]
        if raised is not None:
            raise raised
        return code

    monkeypatch.setattr(sys, "argv", ["tool", "a", "b"])
    with pytest.raises(SystemExit) as caught:
        run_tool(main)
    return caught.value.code


@pytest.mark.parametrize("code", [0, 1, 5])
def test_a_tool_ends_with_what_it_returns(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ended(None, code, monkeypatch) == code
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        *((getattr(errors, name)("what is \x1b wrong"), code) for name, code in CODES.items()),
        (OSError("what is \x1b wrong"), 74),
        (FileNotFoundError("what is \x1b wrong"), 74),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_the_last_line_and_has_a_code(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ended(raised, 0, monkeypatch) == code
    assert tuple(capsys.readouterr()) == ("", "error: what is \\x1b wrong\n")


@pytest.mark.parametrize(("is_gone", "code"), [(True, 141), (False, 74)])
def test_a_reader_that_has_left_and_another_pipe(is_gone: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the standard output's reader ends a tool without a word."""
    read, write = os.pipe()
    if is_gone:
        os.close(read)
    output = SimpleNamespace(fileno=lambda: write, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", output)
    assert _ended(BrokenPipeError("pipe"), 0, monkeypatch) == code
    if is_gone:
        assert os.readlink(f"/proc/self/fd/{write}") == os.devnull
    else:
        os.close(read)
    os.close(write)


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 141), (errno.ENOSPC, 74)])
def test_output_that_is_refused_only_when_all_is_written_is_noticed(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines of a tool are in a buffer when it has done its work."""
    read, write = os.pipe()
    os.close(read)
    buffered: list[str] = []

    def flush() -> None:
        if buffered:
            raise OSError(number, os.strerror(number))

    def main(argv: list[str]) -> int:
        print("a line")
        return 0

    output = SimpleNamespace(fileno=lambda: write, flush=flush, write=buffered.append)
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as caught:
        run_tool(main)
    os.close(write)
    assert caught.value.code == code
    assert capsys.readouterr().err == ("" if code == 141 else "error: [Errno 28] No space left on device\n")


def test_a_page_without_room_leaves_the_older_one(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_output("--html", page, "older")
    with (
        files_up_to(10),
        pytest.raises(StorageError, match=rf"^--html {page} cannot be written: File too large; give another path$"),
    ):
        write_output("--html", page, "longer than before")
    assert page.read_text() == "older"


def test_the_examples_are_the_first_paragraph_that_is_indented() -> None:
    parser = ToolParser(
        "A tool.",
        "Does a thing.\n\n    megatron-ext tool 5%\n      and more\n\nThen this.\n\n    content = read(file)\n",
    )
    assert parser.format_help().endswith("\nexamples:\n  megatron-ext tool 5%\n    and more\n")
    for without in (None, "", "Does a thing.\n\nThen this."):
        assert "examples:" not in ToolParser("A tool.", without).format_help()


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("megatron-ext other", "megatron-ext other"),
        (str(Path(__file__).parents[2] / "tools/plan.py"), "plan.py"),
        ("/home/somebody/own.py", "megatron-ext plan"),
        ("/usr/bin/ipykernel_launcher.py", "megatron-ext plan"),
    ],
)
def test_messages_name_the_program_or_where_there_is_none_the_command(
    program: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert ToolParser("A tool.", command="plan").prog == named


def test_a_training_flag_before_the_dashes_is_told_where_it_belongs() -> None:
    parser = ToolParser("A tool.")
    parser.add_argument("--ranks")
    for usage, said in ((None, ""), ("tool [--ranks N] -- <training flags>", "; training flags come after --")):
        parser.usage = usage
        with pytest.raises(ConfigurationError) as caught:
            parser.parse_args(["--hidden-size", "8"])
        assert str(caught.value) == f"unrecognized arguments: --hidden-size 8{said} (see {parser.prog} --help)"
        for words, wrong in (([], "--rank=3"), (["5"], "--ranksss")):  # what is near is named; what is no flag is not
            with pytest.raises(ConfigurationError, match=r"did you mean --ranks\?"):
                parser.parse_args([wrong, *words])
        with pytest.raises(ConfigurationError, match=rf"unrecognized arguments: word \(see {parser.prog}"):
            parser.parse_args(["word"])


def test_a_word_in_the_place_of_a_required_flag_is_named_with_it() -> None:
    parser = ToolParser("A tool.")
    parser.add_argument("--load", required=True)
    parser.add_argument("--loan")
    for words, said in ((["--laod", "x"], "; did you mean --load by --laod?"), (["--loan", "x"], ""), ([], "")):
        with pytest.raises(ConfigurationError) as caught:
            parser.parse_args(words)
        assert str(caught.value) == f"the following arguments are required: --load{said} (see {parser.prog} --help)"


@pytest.mark.parametrize(
    ("words", "own", "training"),
    [
        ("", "", ""),
        ("a b", "a b", ""),
        ("--", "", ""),
        ("a -- b", "a", "b"),
        ("-- b", "", "b"),
        ("a -- b -- c", "a", "b -- c"),
    ],
)
def test_words_before_and_after_the_dashes(words: str, own: str, training: str) -> None:
    assert split_at_dashes(words.split()) == (own.split(), training.split())


def test_flags_of_two_parsers() -> None:
    """A word that neither knows is refused where it is near to one of the tool's; the others are left alone."""
    parser = ToolParser("A tool.")
    parser.add_argument("--temperature", type=float)
    options, rest = parser.parse_with_flags(
        ["--temperature", "2", "--hidden-size", "8", "--far=1", "x"], {"--hidden-size"}
    )
    assert (options.temperature, rest) == (2.0, ["--hidden-size", "8", "--far=1", "x"])
    for wrong in ("--temperatur", "--temperatur=2", "--tempreature"):
        with pytest.raises(ConfigurationError, match="did you mean --temperature"):
            parser.parse_with_flags([wrong], {"--hidden-size"})
    assert parser.parse_with_flags(["--temperatur"], {"--temperatur"})[1] == ["--temperatur"], "the other parser's"
    with pytest.raises(ConfigurationError, match="unrecognized arguments: --temp "):
        parser.parse_args(["--temp", "2"])


ROOT = Path(__file__).parents[2]
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
MODEL += " --vocab-size 100 --micro-batch-size 1 --global-batch-size 4"

OUTPUTS = {
    "show --html": ("show metrics.jsonl --html out", "out"),
    "compare --html": ("compare metrics.jsonl metrics.jsonl --html out", "out"),
    "plan --html": (f"plan --evaluate --world-size 1 --html out -- {MODEL}", "out"),
    "plan --json": (f"plan --evaluate --world-size 1 --json out -- {MODEL}", "out"),
    "draw-pipeline --html": ("draw-pipeline --stages 2 --html out", "out"),
    "api --output": ("api --output pages", "pages/README.md"),
    "merge-datasets": ("merge-datasets --input pairs --output-prefix out", "out.bin.partial"),
    "merge-datasets, index": ("merge-datasets --input pairs --output-prefix out", "out.idx.partial"),
    "preprocess": (
        "preprocess --input texts.jsonl --output-prefix out --tokenizer-type ByteTokenizer",
        "out_text_document.bin.partial",
    ),
    "preprocess, index": (
        "preprocess --input texts.jsonl --output-prefix out --tokenizer-type ByteTokenizer",
        "out_text_document.idx.partial",
    ),
}
"""By tool and flag: the command line, and a file that it writes."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the lines name."""
    monkeypatch.chdir(tmp_path)
    with MetricsFile("metrics.jsonl", 0) as file:
        file.write(step())
    Path("texts.jsonl").write_text('{"text": "a text"}\n')
    Path("pairs").mkdir()
    write_documents(Path("pairs/a"), [[1, 2, 3]])
    return tmp_path


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_is_no_file_is_not_written(output: str, folder: Path) -> None:
    line, name = OUTPUTS[output]
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    for make, why in ((os.mkfifo, "it is no file"), (os.mkdir, "Is a directory")):
        make(path)
        ended = subprocess.run(
            [sys.executable, "-m", "megatron_ext", *shlex.split(line)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (ended.returncode, "Traceback" in ended.stderr) == (74, False), ended.stderr
        assert why in (last := ended.stderr.splitlines()[-1]), last
        assert name in last
        if path.is_fifo():
            path.unlink()
