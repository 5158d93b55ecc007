"""A run goes on through its data exactly where it stopped, with other ranks and batches, or says why it cannot.

0 samples are repeated and 0 skipped; a data file replaced between runs is exit 65.
"""

import itertools
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prepare.commands.inspect_dataset import main as inspect_dataset
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.corpora import write_windows
from tests.support.program import Ended, run_program

SEQ = 8
MODEL = f"""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length {SEQ} --lr 1e-3 --log-interval 1
    --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 16 --eval-interval 0
"""
# The sources have 29 and 17 windows: 48 samples go through both of them more than once.
WINDOWS = {"a": 29, "b": 17}
FIRST = "--micro-batch-size 2 --global-batch-size 8 --exit-interval 3"
LONG = {
    # With samples the curves of both runs are the same.
    "formula": ("--train-samples 48", "--train-samples 48"),
    # Fewer samples than the first run planned: the order is still that of the first run.
    "shuffled": ("--train-iters 6", "--train-iters 9 --override-opt-param-scheduler"),
}


@dataclass(frozen=True)
class Begun:
    """A run on two ranks that stopped after 3 steps of 8 samples."""

    order: str
    folder: Path
    ended: list[Ended]

    @property
    def flags(self) -> str:
        paths = f"--train-data-path 0.6 {self.folder}/a 0.4 {self.folder}/b --data-cache-path {self.folder}/cache"
        log = f"--log-sample-ids {self.folder}/ids.jsonl --metrics-file {self.folder}/metrics.jsonl"
        return f"{MODEL} {paths} {log} --data-order {self.order} --load {self.folder}/save"

    def run(self, ranks: int, flags: str) -> list[Ended]:
        return run_ranks(ranks, run_program, shlex.split(f"{self.flags} {flags}"))


@pytest.fixture(scope="module", params=["formula", "shuffled"])
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp(request.param)
    for seed, (name, windows) in enumerate(WINDOWS.items()):
        write_windows(folder / name, windows, seed)
    run = Begun(request.param, folder, [])
    flags = f"{FIRST} {LONG[run.order][0]} --save {folder}/save"
    return Begun(run.order, folder, run.run(2, flags))


def logged(folder: Path) -> list[tuple[int, int]]:
    rows = [json.loads(line) for line in (folder / "ids.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["sources"] == [f"{folder}/a", f"{folder}/b"] for row in rows)
    return [(source, number) for row in rows for source, number in row["samples"]]


def taken(ended: list[Ended]) -> list[int]:
    """Positions that all ranks read, each as often as it was read."""
    assert all(end.code == 0 for end in ended), ended[0].errors
    return sorted(itertools.chain.from_iterable(end.samples for end in ended))


def test_no_sample_is_repeated_and_none_skipped(begun: Begun):
    assert taken(begun.ended) == list(range(24))
    before = logged(begun.folder)
    # What a killed run wrote after its last checkpoint goes.
    with open(begun.folder / "ids.jsonl", "a") as file:
        file.write('{"iteration": 4, "sources": [], "samples": []}\n{"iteration": 5, "sou')
    second = begun.run(
        4, f"--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 {LONG[begun.order][1]}"
    )
    assert taken(second) == sorted([*range(24, 48)] * 2), "each data-parallel rank has two tensor-parallel ones"
    after = logged(begun.folder)
    assert after[:24] == before
    assert len(after) == 48
    if begun.order == "formula":
        for number, windows in enumerate(WINDOWS.values()):
            # The windows of the first epoch, once each, before any of the second.
            of_source = [window for source, window in after if source == number]
            assert all(window < windows for window in of_source[:windows])
    assert len(set(after)) == 48
    # The accounts are exact, and go on.
    for row, count in zip(read_rows(begun.folder / "metrics.jsonl"), [8, 16, 24, *range(28, 49, 4)], strict=True):
        used = row["consumed_by_source"]
        assert row["consumed_samples"] == count
        for number, (name, windows) in enumerate(WINDOWS.items()):
            samples = sum(source == number for source, _ in after[:count])
            use = used[f"{begun.folder}/{name}"]
            assert (use["samples"], use["tokens"]) == (samples, SEQ * samples)
            per_epoch = windows if begun.order == "formula" else windows + 1 / SEQ
            assert use["epochs"] == samples / per_epoch


def test_the_text_of_a_step(begun: Begun, capsys: pytest.CaptureFixture[str]):
    if begun.order == "shuffled":
        pytest.skip("its windows are not in the order of the file")
    flags = f"{begun.flags} {FIRST} {LONG[begun.order][0]} --world-size 2 --device cpu"
    inspect_dataset(["sample", "--step", "2", *shlex.split(flags)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16
    places = logged(begun.folder)[8:16]
    for position, ((source, window), title, text) in enumerate(zip(places, lines[::2], lines[1::2], strict=True), 8):
        name = list(WINDOWS)[source]
        assert title == f"--- sample {position}: window {window} of {begun.folder}/{name}"
        start = window % WINDOWS[name] * SEQ
        tokens = np.fromfile(begun.folder / f"{name}.bin", np.uint16)[start : start + SEQ]
        assert text == " ".join(map(str, tokens))
    inspect_dataset(["sample", "--sample", "8", *shlex.split(flags)])
    assert capsys.readouterr().out.splitlines() == lines[:2]
    with pytest.raises(ConfigurationError, match="step 7: the training has steps 1 to 6"):
        inspect_dataset(["sample", "--step", "7", *shlex.split(flags)])


def test_a_data_file_replaced_between_runs(begun: Begun):
    flags = f"--micro-batch-size 2 --global-batch-size 8 {LONG['formula'][0]} --override-opt-param-scheduler"
    if begun.order == "shuffled":
        flags = f"--micro-batch-size 2 --global-batch-size 8 {LONG['shuffled'][0]}"
    whole = (begun.folder / "a.bin").read_bytes()
    write_windows(begun.folder / "a", WINDOWS["a"], seed=99)
    (ended,) = begun.run(1, flags)
    assert ended.code == 65
    last = ended.errors.strip().splitlines()[-1]
    assert f"{begun.folder}/a.bin has other content" in last
    assert "add --accept-changed-data" in last
    (ended,) = begun.run(1, f"{flags} --accept-changed-data")
    assert ended.code == 0
    assert "warning: the data is not that of the checkpoint" in ended.output
    assert ended.samples == list(range(24, 48))
    (begun.folder / "a.bin").write_bytes(whole)
    (ended,) = begun.run(1, flags)
    assert ended.code == 0


def test_more_samples_than_a_shuffled_order_was_made_for(begun: Begun):
    flags = "--micro-batch-size 2 --global-batch-size 8 --override-opt-param-scheduler"
    (ended,) = begun.run(1, f"{flags} " + ("--train-iters 20" if begun.order == "shuffled" else "--train-samples 160"))
    if begun.order == "formula":
        assert ended.samples == list(range(24, 160))
        return
    assert ended.code == 65
    assert "the run now takes 160 samples instead of 48" in ended.errors.strip().splitlines()[-1]
