"""TensorBoard's event files, read back by TensorBoard."""

import io
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_ext import durable
from megatron_ext.errors import StorageError
from megatron_ext.parts.experts.load_report import LayerLoad, load_report
from megatron_ext.telemetry.metrics import Sample, SampleMetrics, SourceLoss, StepMetrics, ValidationMetrics
from megatron_ext.telemetry.tensorboard import TensorBoardWriter, drop_after
from tests.support.samples import step

GOLDEN = (Path(__file__).parents[2] / "golden" / "tensorboard_tags.txt").read_text().split("\n")[:-1]


def at(iteration: int, lm_loss: float) -> StepMetrics:
    return step(iteration=iteration, consumed_samples=16 * iteration, lm_loss=lm_loss)


def write(folder: Path, steps: list[StepMetrics | ValidationMetrics], loaded: int = 0) -> None:
    writer = TensorBoardWriter(folder, loaded, 16 * loaded)
    for metrics in steps:
        writer.write(metrics)
    writer.close()


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_the_tags_are_the_pinned_ones(tmp_path: Path):
    full = step(iteration=10, num_zeros=3, params_norm=5.0)
    write(tmp_path, [full, ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=2.0)])
    assert sorted(read(tmp_path).Tags()["scalars"]) == GOLDEN


def test_each_validation_source_has_its_tags(tmp_path: Path):
    sources = (SourceLoss(name="data/a", suffix="0", loss=1.0), SourceLoss(name="data/b", suffix="code", loss=2.0))
    write(tmp_path, [ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=1.5, sources=sources)])
    events = read(tmp_path)
    assert len(events.Tags()["scalars"]) == 12
    assert points(events, "lm loss validation") == [(10, 1.5)]
    assert points(events, "lm loss validation-0") == [(10, 1.0)]
    assert points(events, "lm loss validation-code vs samples") == [(160, 2.0)]
    assert points(events, "lm loss validation-0 ppl vs samples")[0][1] == pytest.approx(2.718282)


def test_values_and_both_axes(tmp_path: Path):
    write(tmp_path, [at(1, 4.5), at(2, 4.25)])
    events = read(tmp_path)
    assert points(events, "lm loss") == [(1, 4.5), (2, 4.25)]
    assert points(events, "lm loss vs samples") == [(16, 4.5), (32, 4.25)]
    assert points(events, "mem-reserved-bytes") == [(1, 2000.0), (2, 2000.0)]
    assert "num-zeros" not in events.Tags()["scalars"]


def test_resuming_removes_later_points_on_both_axes_and_nothing_else(tmp_path: Path):
    write(tmp_path, [at(i, i) for i in range(1, 7)])
    write(tmp_path, [at(i, 10 * i) for i in range(4, 7)], loaded=3)
    write(tmp_path, [at(i, 100 * i) for i in range(6, 8)], loaded=5)
    values = [1.0, 2.0, 3.0, 40.0, 50.0, 600.0, 700.0]
    events = read(tmp_path)
    assert points(events, "lm loss") == list(zip(range(1, 8), values, strict=True))
    assert points(events, "lm loss vs samples") == list(zip(range(16, 128, 16), values, strict=True))


def test_a_fresh_start_shows_only_its_own_points_and_deletes_nothing(tmp_path: Path):
    write(tmp_path, [at(i, i) for i in range(1, 5)])
    (earlier,) = tmp_path.iterdir()
    content = earlier.read_bytes()
    write(tmp_path, [at(1, 10.0)])
    events = read(tmp_path)
    assert points(events, "lm loss") == [(1, 10.0)]
    assert points(events, "lm loss vs samples") == [(16, 10.0)]
    assert earlier.read_bytes() == content


def test_a_torn_record_does_not_hide_what_is_written_after_resuming(tmp_path: Path):
    write(tmp_path, [at(1, 1.0), at(2, 2.0)])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    write(tmp_path, [at(3, 3.0)], loaded=2)
    assert points(read(tmp_path), "lm loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_files_without_later_points_are_left_alone(tmp_path: Path) -> None:
    """So that the restarts of a long run do not take longer and longer."""
    write(tmp_path, [at(1, 4.5), at(2, 4.25)])
    [file] = tmp_path.iterdir()
    file.chmod(0o400)
    before = file.stat()
    content = file.read_bytes()
    write(tmp_path, [at(3, 4.0)], loaded=2)
    assert file.stat().st_ino == before.st_ino
    write(tmp_path, [at(2, 3.0)], loaded=1)
    assert content.startswith(file.read_bytes())
    assert file.stat().st_size < before.st_size
    assert points(read(tmp_path), "lm loss") == [(1, 4.5), (2, 3.0)]


def test_a_whole_record_at_the_end_stays_and_a_torn_one_goes(tmp_path: Path) -> None:
    write(tmp_path, [at(1, 1.0), at(2, 2.0)])
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for cut in range(5):
        path.write_bytes(whole[: len(whole) - cut])
        drop_after(tmp_path, 2, 32)
        kept = path.read_bytes()
        assert whole.startswith(kept)
        assert (kept == whole) == (cut == 0)
        assert points(read(tmp_path), "lm loss") == [(1, 1.0), (2, 2.0)]


def test_records_of_more_than_a_block_are_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_BLOCK", 7)
    write(tmp_path, [at(1, 1.0), at(2, 2.0), at(3, 3.0), at(4, 4.0)])
    [path] = tmp_path.iterdir()
    before = path.read_bytes()
    drop_after(tmp_path, 2, 48)  # a point against samples beyond the iteration's stays: each axis has its limit
    assert points(read(tmp_path), "lm loss") == [(1, 1.0), (2, 2.0)]
    assert points(read(tmp_path), "lm loss vs samples") == [(16, 1.0), (32, 2.0), (48, 3.0)]
    assert 0 < path.stat().st_size < len(before)


def test_a_pipe_among_the_files_of_a_resumed_run_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.out.tfevents.1.host")
    with pytest.raises(StorageError, match=r"it is no file"):
        TensorBoardWriter(tmp_path, 2, 32)


def test_samples_are_text_of_their_iteration(tmp_path: Path) -> None:
    samples = (Sample(prompt="Once", text="upon\na time"), Sample(prompt="x", text="y"))
    writer = TensorBoardWriter(tmp_path, 0, 0)
    writer.write(SampleMetrics(iteration=7, consumed_samples=112, samples=samples))
    writer.close()
    events = read(tmp_path)
    found = {
        tag: [(event.step, event.tensor_proto.string_val[0]) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert found == {
        "sample 0/text_summary": [(7, b"    Once | upon\n    a time")],
        "sample 1/text_summary": [(7, b"    x | y")],
    }


def test_what_is_written_can_be_read_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, 0, 0)
    writer.write(at(1, 4.5))
    assert points(read(tmp_path), "lm loss vs samples") == [(16, 4.5)]
    writer.close()


def test_arguments_are_shown_as_text(tmp_path: Path):
    writer = TensorBoardWriter(tmp_path, 0, 0)
    writer.write_arguments({"num_layers": 4, "data_path": ("a", "b")})
    writer.close()
    events = read(tmp_path)
    text = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0] for tag in events.Tags()["tensors"]}
    assert text == {"num_layers/text_summary": b"4", "data_path/text_summary": b"('a', 'b')"}


def test_a_refused_write_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the write (a limit on file sizes), as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard writes in a thread, which fails
    running = threading.enumerate()
    writer = TensorBoardWriter(tmp_path, 0, 0)
    [file] = tmp_path.iterdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(StorageError, match=r"--tensorboard-dir .*: File too large"):
            writer.write_arguments({str(number): "x" * 100 for number in range(100)})
        for thread in set(threading.enumerate()) - set(running):
            thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_that_is_no_event_is_like_a_torn_one(tmp_path: Path) -> None:
    write(tmp_path, [at(1, 4.5)])
    [file] = tmp_path.iterdir()
    with file.open("ab") as opened:
        RecordWriter(opened).write(b"\xff\xff\xff\xff no event")
    write(tmp_path, [at(2, 4.25)], loaded=1)
    assert points(read(tmp_path), "lm loss") == [(1, 4.5), (2, 4.25)]


def test_the_picture_of_experts_has_a_line_for_each_layer(tmp_path: Path) -> None:
    loads = tuple(
        LayerLoad(layer=layer, tokens=tokens, dropped=0.0, router_z=1.0, bias=None)
        for layer, tokens in ((1, (8, 8, 8)), (2, (24, 0, 0)))
    )
    write(tmp_path, [step(iteration=3, reports=(load_report(loads, has_capacity=False),))])
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    [image] = events.Images("tokens of experts")
    pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert (image.step, pixels.shape) == (3, (16, 24, 3))
    assert pixels[0, 0].tolist() == [255, 255, 255], "even"
    assert pixels[15, 23].tolist() == [0, 0, 0], "no token"
    assert pixels[15, 0, 0] > pixels[15, 0, 2], "more than even is orange"
