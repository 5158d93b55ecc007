"""The launch scripts that need no GPU run as they are."""

import os
import re
import subprocess
from pathlib import Path

from megatron_ext.telemetry.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_the_quickstart_in_short_and_what_it_tells_to_try_next(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = run("bash", "examples/quickstart.sh", str(folder), "10")
    rows = list(read_rows(folder / "checkpoints/metrics.jsonl"))
    losses = {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}
    validation = {row["iteration"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert list(losses) == [1, 5, 10], "the log's intervals, across the stop at 6"
    assert list(validation) == [0, 5, 10]
    assert validation[10] < validation[0] - 0.5
    assert f"resuming at iteration 6 of {folder}/checkpoints" in said
    for part in ("train", "valid"):
        assert f"{folder}/{part}_text_document: whole, every token is below 8192" in said
        assert (folder / f"{part}_manifest.json").exists()
    assert re.search(rf"train: \d+ samples of {folder}/train_text_document\n", said)  # the index, before the training
    assert (folder / "step_6.txt").read_text().count("--- sample ") == 16
    assert (folder / "report.html").stat().st_size > 1000
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert re.search(r"loss over 8,192 tokens of \S+: ours \d\.\d+, transformers \d\.\d+ \(", said)
    assert (folder / "hf/model.safetensors").exists()
    assert "\ndef " in said.partition("8/8 a sample")[2]
    said = run("bash", "examples/pretrain_cpu.sh", str(folder), "--train-iters", "2", "--lr-warmup-iters", "1")
    assert " validation loss at iteration 2 |" in said
