"""What the tools print, return and write for a person: each line exactly, for every kind of outcome."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import manifest
from megatron_ext.checkpoint.native import tensors as native_tensors
from megatron_ext.cli import (
    compare_runs,
    convert_checkpoint,
    doctor,
    draw_pipeline,
    generate,
    generate_sample,
    inspect_checkpoint,
    parity,
    preprocess_data,
    show_run,
    tasks,
)
from megatron_ext.data.prepare.journal import Progress
from megatron_ext.device import gpu_inventory
from megatron_ext.doctor import collectives
from megatron_ext.errors import ConfigurationError, DataError, PeerLostError
from megatron_ext.inference.generation import Generated
from megatron_ext.inference.sampling import Sampling
from megatron_ext.tokenizer.byte import ByteTokenizer
from tests.support.small_models import small_config


def _saved(folder: Path, iteration: int, *, listed: bool = True) -> Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    for name, size in ((".metadata", 1_500_000), ("metadata.json", 500_000)):
        (path / name).write_bytes(bytes(size))
        os.utime(path / name, (86_400, 86_400))
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    if listed:
        manifest.write(path, manifest.describe(path, manifest.all_files(path)))
    return path


def test_checkpoints_of_a_folder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the tracker names has the star, and need not be the newest; folders inside are no files."""
    for iteration in (5, 7):
        _saved(tmp_path, iteration, listed=iteration == 7)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert inspect_checkpoint.main(["ls", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("* iter_0000005       0.002 GB      2 files  1970-01-0")
    assert first.endswith("  no manifest")
    assert second.startswith("  iter_0000007       0.002 GB      3 files  1970-01-0")
    assert second.endswith("  manifest")
    with pytest.raises(ConfigurationError, match="holds no checkpoint; give a --save folder"):
        inspect_checkpoint.main(["ls", str(tmp_path / "iter_0000005" / "tokenizer")])


class _OneTensor:
    """What `show` asks of a checkpoint: 10,001 ones in 16 bits, whose sum of squares has no place there."""

    def __init__(self, path: Path):
        self.one = torch.ones(73, 137, dtype=torch.bfloat16)

    def common(self) -> dict[str, Any]:
        return {"train_state": {"iteration": 5}, "optimizer_step": 4}

    def names(self) -> list[str]:
        return ["a.weight"]

    def dtype(self, name: str) -> torch.dtype:
        return self.one.dtype

    def shape(self, name: str) -> torch.Size:
        return self.one.shape

    def read(self, name: str) -> torch.Tensor:
        return self.one


def test_norms_of_16_bits_are_shown_to_all_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_ext.checkpoint.native.tensors.Tensors", _OneTensor)
    assert inspect_checkpoint.main(["show", str(_saved(tmp_path, 5, listed=False))]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said == [
        ["iteration", "5"],
        ["adam_updates", "4"],
        ["a.weight", "bfloat16", "73", "x", "137", "norm", "1.000050e+02"],
    ]


def test_a_checkpoint_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _saved(tmp_path, 7)
    assert inspect_checkpoint.main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 3 files are as they were written (0.002 GB, ")
    (path / "tokenizer" / "tokenizer.json").write_text("[]")
    with pytest.raises(DataError, match=r"is damaged: tokenizer/tokenizer\.json has another checksum"):
        inspect_checkpoint.main(["verify", str(path)])
    manifest.write(path, {})
    assert inspect_checkpoint.main(["verify", str(path)]) == 0, "a manifest of no file names nothing that is wrong"
    (path / "manifest.json").unlink()
    with pytest.raises(DataError, match="has no manifest: whether it is damaged cannot be told"):
        inspect_checkpoint.main(["verify", str(path)])


@pytest.mark.parametrize("found", [[], ["a: only in A", "b: only in B"]])
def test_checkpoints_that_differ_end_with_1(
    found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [_saved(tmp_path / name, 7) for name in "AB"]
    held = {path: SimpleNamespace(path=path, names=lambda: ["a", "b", "c"]) for path in paths}
    monkeypatch.setattr(native_tensors, "Tensors", held.__getitem__)
    asked: list[Any] = []
    monkeypatch.setattr(native_tensors, "differences", lambda *two: asked.append([one.path for one in two]) or found)
    assert inspect_checkpoint.main(["diff", *map(str, paths)]) == (1 if found else 0)
    assert capsys.readouterr().out == ("a: only in A\nb: only in B\n" if found else "identical: 3 tensors\n")
    assert asked == [paths]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["diff", "a"], "diff takes 2 paths, not 1"), (["show", "a", "b"], "show takes 1 path, not 2")],
)
def test_paths_are_counted(words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{said}$"):
        inspect_checkpoint.main(words)


NAN = float("nan")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([{"iteration": 1, "loss": 2.0}], [{"iteration": 1, "loss": 2.0, "elapsed_ms": 5}], None),
        ([{"iteration": 1, "loss": NAN}], [{"iteration": 1, "loss": NAN}], None),
        ([{"iteration": 1, "loss": NAN}], [{"iteration": 1, "loss": 2.0}], "row 1 (iteration 1): loss is nan and 2.0"),
        ([{"iteration": 4, "loss": 2.0}], [{"iteration": 4, "loss": NAN}], "row 1 (iteration 4): loss is 2.0 and nan"),
        ([{"iteration": 4}], [{"iteration": 4, "loss": 1}], "row 1 (iteration 4): loss is None and 1"),
        ([{"iteration": 4, "loss": 1}], [{"iteration": 4}], "row 1 (iteration 4): loss is 1 and None"),
        ([{"iteration": 4}], [{"iteration": 4}, {"iteration": 5}], "1 and 2 rows; equal up to row 1"),
        ([{"iteration": 4}, {"iteration": 5}], [{"iteration": 4}], "2 and 1 rows; equal up to row 1"),
        (
            [{"iteration": 4}, {"iteration": 5, "z": 1, "a": 1}],
            [{"iteration": 4}, {"iteration": 5, "z": 2, "a": 2}],
            "row 2 (iteration 5): a is 1 and 2",
        ),
    ],
)
def test_the_first_difference_of_two_runs(first: list[Any], second: list[Any], said: str | None) -> None:
    assert compare_runs.first_difference(first, second) == said


def test_results_of_tasks_as_a_table_and_as_a_file(tmp_path: Path) -> None:
    """A count has no decimals, and commas; every size of the layout is its own."""
    results = {"LAMBADA": {"accuracy": 0.25, "items": 12345}, "P": {"perplexity": 1.5}}
    assert tasks.table(results) == (
        "LAMBADA  accuracy    0.250000\nLAMBADA  items         12,345\nP        perplexity  1.500000"
    )
    assert tasks.table({}) == ""
    layout = {"world_size": 12, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    config = small_config(layout={**layout, "expert_model_parallel_size": 4}, training={"bf16": True})
    expected = {
        **layout, "expert_model_parallel_size": 4, "precision": "bfloat16", "seq_length": 16, "iteration": 7,
        "results": results,
    }  # fmt: skip
    for given, named in (({"load": "ckpt"}, "ckpt"), ({"load_hf": "llama"}, "llama")):
        flags = SimpleNamespace(**{"load": None, "load_hf": None, **given})
        parts = SimpleNamespace(checkpoint=flags, layout=config.layout, training=config.training, model=config.model)
        tasks._write(str(tmp_path / "out.json"), SimpleNamespace(config=parts, iteration=7), results)  # pyright: ignore
        assert json.loads((tmp_path / "out.json").read_text()) == {"model": named, **expected}


def _proof(**changed: Any) -> Any:
    curves = SimpleNamespace(losses=[4.5, 4.25], grad_norms=[1.5, None])
    given = {
        "reference": curves,
        "other": SimpleNamespace(losses=[4.5, 4.125], grad_norms=[1.5, 2.0]),
        "weights": {"a": 0.0, "b": 1e-9, "c": 0.0},
        "outputs": {"z": 1e-7, "a": 3e-6, "b": 2e-6},
        "gradients": {},
        "tolerance": 1e-5,
        "first_difference": lambda: None,
    }
    return SimpleNamespace(**{**given, **changed})


def test_a_comparison_of_layouts_in_words() -> None:
    both: Any = SimpleNamespace(world_size=4, changed=["no dropout"])
    lines = parity.report(both, _proof()).splitlines()
    assert lines == [
        "one process against 4 ranks, fp32, no dropout",
        "step   loss, one process                loss       gradient norm       gradient norm",
        "   1                 4.5                 4.5                 1.5                 1.5",
        "   2                4.25               4.125                none                   2",
        "initial weights  2 of 3 equal bit for bit",
        "outputs          3, the farthest 3.0e-06 of its norm: a",
        "verdict: they agree within 1e-05",
    ]
    difference = SimpleNamespace(sentence="output a differs")
    parted = parity.report(both, _proof(first_difference=lambda: difference)).splitlines()
    assert parted[-1] == "verdict: THEY PART. First, output a differs (tolerance 1e-05)"


@pytest.mark.parametrize(("gpus", "enough"), [(None, False), (3, False), (4, True), (5, True)])
def test_each_rank_of_a_comparison_has_a_gpu(gpus: int | None, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if gpus is None else SimpleNamespace(gpus=["gpu"] * gpus)
    monkeypatch.setattr(gpu_inventory, "survey", lambda: found)
    if enough:
        parity._start_device("cuda", 4)
    else:
        with pytest.raises(ConfigurationError, match=f"needs 4 GPUs for 4 ranks, but this machine shows {gpus or 0};"):
            parity._start_device("cuda", 4)
    parity._start_device("cpu", 4)


def test_why_there_is_no_tokenizer() -> None:
    said = [
        convert_checkpoint._why_no_tokenizer(*given) for given in (("X", True), ("NullTokenizer", False), (None, False))
    ]
    assert said == [
        "no tokenizer was written, as --no-tokenizer asks for",
        "no tokenizer was written: NullTokenizer has no text; give the model token ids",
        "no tokenizer files were at hand; add them to the folder yourself",
    ]


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("5GB", 5 * 10**9), ("20MB", 20 * 10**6), ("3KB", 3000), ("07KB", 7000)]
)
def test_sizes_of_files(text: str, size: int) -> None:
    assert convert_checkpoint._bytes(text) == size


@pytest.mark.parametrize("text", ["0", "0GB", "", "GB", "5TB", "5 GB", "-5", "1.5GB", "5B", "5GBGB"])
def test_what_is_no_size_of_a_file(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a size; write for example 5GB"):
        convert_checkpoint._bytes(text)


@pytest.mark.parametrize("reports", [False, True])
def test_a_rank_that_does_not_answer_ends_all_with_its_code(
    reports: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank says it for all."""
    lost = PeerLostError("rank 3 does not answer") if reports else collectives.NotTheReporter("rank 3")
    asked: list[Any] = []

    def check(*given: Any) -> Any:
        asked.append(given)
        yield SimpleNamespace(text=lambda: "all ranks are here")
        raise lost

    monkeypatch.setattr(collectives, "check_collectives", check)
    monkeypatch.setattr(doctor, "end_process", asked.append)
    doctor.main(["--collectives", "--timeout", "3", "--megabytes", "2", "--device", "cpu"])
    said = capsys.readouterr()
    assert said.out == "all ranks are here\n"
    assert said.err == ("error: rank 3 does not answer\n" if reports else "")
    assert asked == [("cpu", 3.0, 2.0), 76]


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("", 5), ("2(x4)", 5), ("-1", 5), ("0", 0)])
def test_a_number_of_the_launcher(text: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", text)
    assert doctor._number("SLURM_NNODES", 5) == number


def test_the_ranks_of_one_replica_are_the_product_of_all_axes() -> None:
    sizes = {"tensor_model": 2, "context": 3, "pipeline_model": 5}
    assert draw_pipeline._fewest({f"{axis}_parallel_size": size for axis, size in sizes.items()}) == 30
    for axis, size in sizes.items():
        assert draw_pipeline._fewest({f"{axis}_parallel_size": size}) == size
    assert draw_pipeline._fewest({}) == 1


def test_ids_of_a_prompt_are_below_the_vocabulary() -> None:
    assert generate_sample._numbers("0 9 5", 10) == [0, 9, 5]
    for wrong in ("10", "5 x", "-1", "", " "):
        with pytest.raises(ConfigurationError, match="must be token ids below 10"):
            generate_sample._numbers(wrong, 10)


def test_the_picture_of_a_runs_pipeline_lies_next_to_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the folder is named or the file in it."""
    monkeypatch.setattr(show_run.schedule_record, "read", lambda folder: folder)
    monkeypatch.setattr(show_run.schedule_record, "timeline", lambda records: ("of", records))
    (tmp_path / "metrics.jsonl").touch()
    assert show_run._pipeline(tmp_path) is None
    recorded = tmp_path / show_run.schedule_record.FOLDER
    recorded.mkdir()
    assert show_run._pipeline(tmp_path) == ("of", recorded)
    assert show_run._pipeline(tmp_path / "metrics.jsonl") == ("of", recorded)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_progress_is_printed_at_whole_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run had done is no merit of this one; the time left is that of the bytes that are left."""
    clock = _Clock()
    monkeypatch.setattr(preprocess_data, "time", clock)
    line = preprocess_data._ProgressLine(100)
    for seconds, documents in (
        (0.0, 150),
        (10.0, 199),
        (20.0, 200),
        (20.0, 250),
        (30.0, 299),
        (40.0, 350),
        (50.0, 400),
    ):
        clock.now = seconds
        line(
            Progress(
                documents=documents, text_bytes=documents * 10**4, tokens=7, skipped=documents // 400,
                bytes_read=documents * 10, bytes_total=10**5,
            )
        )  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [
        "processed 200 documents, 2.0 MB, 7 tokens (2 documents/s, 0.03 MB/s, 1:05:20 left)",
        "processed 350 documents, 3.5 MB, 7 tokens (5 documents/s, 0.05 MB/s, 0:32:10 left)",
        "processed 400 documents, 4.0 MB, 7 tokens, 1 left out (5 documents/s, 0.05 MB/s, 0:32:00 left)",
    ]


class _Leader:
    """Answers with the prompt in capitals, or refuses."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.model = SimpleNamespace(tokenizer=tokenizer, vocab_size=300)
        self.asked: list[Any] = []

    def generate(self, prompts: Any, sampling: Any, rows: int, on_token: Any = None) -> list[Generated]:
        self.asked.append((prompts, rows))
        if prompts[0] == [*b"bad"]:
            raise ConfigurationError("a prompt that cannot be answered")
        text = bytes(prompts[0]).decode().upper() if self.model.tokenizer else None
        tokens = [*text.encode()] if text is not None else [7, 8]
        if on_token is not None:
            on_token(0, tokens[:1])
        return [Generated(tokens, text, "length")]


def test_a_terminal_without_prompts_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.StringIO("ab\n")
    typed.isatty = lambda: True  # pyright: ignore
    monkeypatch.setattr(sys, "stdin", typed)
    leads: Any = _Leader(ByteTokenizer())
    options = SimpleNamespace(prompts=None, prompt_file=None, chat_template=None, output=None)
    with pytest.raises(ConfigurationError, match="no prompt; give --prompts, --prompt-file, or lines"):
        generate._serve(leads, options, Sampling())


def test_the_only_prompt_fails_with_what_is_wrong() -> None:
    leads: Any = _Leader(ByteTokenizer())
    encode = generate.encoder(leads.model, None)
    with pytest.raises(ConfigurationError, match="cannot be answered"):
        generate._answer_streaming(leads, "bad", encode, Sampling())


def test_a_prompt_of_blanks_is_a_text_and_an_empty_one_the_end_of_another() -> None:
    tokenizer = ByteTokenizer()
    encode = generate.encoder(SimpleNamespace(tokenizer=tokenizer), None)
    assert encode("") == [tokenizer.eod]
    assert encode("  ") == [32, 32]


def test_answers_to_several_prompts_stand_under_lines(capsys: pytest.CaptureFixture[str]) -> None:
    generate._show(["a"], [Generated([1, 2], "bc", "eod")])
    generate._show(["a", "5"], [Generated([], "", "stop"), Generated([1, 2], None, "length")])
    assert capsys.readouterr().out.splitlines() == [
        "abc",
        "--- prompt 1 of 2, 0 tokens, ended by stop",
        "a",
        "--- prompt 2 of 2, 2 tokens, ended by length",
        "5 1 2",
    ]
