"""A pipe or a folder in the place of a file that a tool writes is neither waited for nor a fault of the program."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.plan.timeline import Pass
from megatron_ext.telemetry import schedule_record
from megatron_ext.telemetry.metrics_file import MetricsFile
from megatron_ext.telemetry.schedule_record import Place, RankRecord, RecordedStep
from tests.support.corpora import write_documents
from tests.support.samples import step

ROOT = Path(__file__).parents[2]
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
MODEL += " --vocab-size 100 --micro-batch-size 1 --global-batch-size 4"

OUTPUTS = {
    "show --html": ("show metrics.jsonl --html out", "out"),
    "compare --html": ("compare metrics.jsonl metrics.jsonl --html out", "out"),
    "plan --html": (f"plan --evaluate --world-size 1 --html out -- {MODEL}", "out"),
    "plan --json": (f"plan --evaluate --world-size 1 --json out -- {MODEL}", "out"),
    "draw-pipeline --html": ("draw-pipeline --stages 2 --html out", "out"),
    "draw-pipeline --trace": ("draw-pipeline --run . --trace out", "out"),
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
    recorded = RecordedStep(1, 0.0, 1.0, (Pass(True, 0, 0, 0.0, 0.5), Pass(False, 0, 0, 0.5, 1.0)), (), ())
    schedule_record.write(Path(schedule_record.FOLDER), RankRecord(Place(0, 1, 0, 1, 1, 1), (recorded,)))
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
