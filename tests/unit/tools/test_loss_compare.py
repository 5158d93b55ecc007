"""What counts as a difference between two results, and what is hashed; the whole tool is run on ranks elsewhere."""

import contextlib
import copy
import hashlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.data.integrity import check_token_ids, open_index
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove import cases
from tests.support.losses import commits, golden, layouts, run
from tests.support.losses.commits import commit_hash
from tests.support.losses.compare import different_files, first_difference
from tests.support.patched_in_one_module import replace_in

STAGE = {
    "rows": [
        {"iteration": 1, "lm_loss": 5.5, "grad_norm": 1.0, "params_norm": 2.0, "elapsed_ms": 3.0},
        {"iteration": 2, "lm_loss": float("nan"), "grad_norm": None, "params_norm": 2.0, "elapsed_ms": 3.0},
    ],
    "tensors": {"iter_0000003: decoder.weight": "aa", "iter_0000003: optimizer.step": "bb"},
    "files": {"iter_0000003/config.yaml": "cc", "iter_0000003/.metadata": "dd"},
}
RESULT: dict[str, Any] = {
    "name": "TP2",
    "stages": {
        "train": copy.deepcopy(STAGE),
        "resume": copy.deepcopy(STAGE),
        "export": {"rows": [], "tensors": {}, "files": {"model.safetensors": "ee"}},
    },
}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    result = copy.deepcopy(RESULT)
    place = result["stages"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return result


def test_times_do_not_count() -> None:
    assert first_difference(RESULT, changed("train", "rows", 0, "elapsed_ms", to=9.0)) is None
    assert first_difference(RESULT, copy.deepcopy(RESULT)) is None


def test_one_bit_of_a_metric_is_shown_in_hexadecimal() -> None:
    said = first_difference(RESULT, changed("resume", "rows", 0, "params_norm", to=2.0 + 2**-51))
    assert said == (
        "resume: step 1: params_norm is 0x1.0000000000000p+1 (2.0) and 0x1.0000000000001p+1 (2.0000000000000004)"
    )


def test_the_loss_is_named_before_other_fields_of_its_step() -> None:
    other = changed("train", "rows", 0, "lm_loss", to=5.0)
    other["stages"]["train"]["rows"][0] |= {"grad_norm": 7.0, "a_field": 1}
    assert "lm_loss is" in str(first_difference(RESULT, other))


def test_an_integer_is_no_float_and_minus_zero_no_zero() -> None:
    assert first_difference(RESULT, changed("train", "rows", 0, "grad_norm", to=1)) is not None
    zero = changed("train", "rows", 0, "grad_norm", to=0.0)
    assert first_difference(zero, changed("train", "rows", 0, "grad_norm", to=-0.0)) is not None


def test_a_missing_row_counts() -> None:
    other = changed("train", "rows", to=STAGE["rows"][:1])
    assert first_difference(RESULT, other) == "train: 2 and 1 rows of metrics"


def test_tensors_and_exported_files_count() -> None:
    other = changed("resume", "tensors", "iter_0000003: decoder.weight", to="xx")
    assert first_difference(RESULT, other) == "resume: iter_0000003: decoder.weight: differs"
    other = changed("train", "tensors", to={"iter_0000003: decoder.weight": "aa"})
    assert first_difference(RESULT, other) == "train: iter_0000003: optimizer.step: in base alone"
    other = changed("export", "files", "model.safetensors", to="xx")
    assert first_difference(RESULT, other) == "export: file model.safetensors: differs"


def test_a_failure_counts_on_either_side() -> None:
    failed = {"name": "TP2", "failed": "train: rank 0 died"}
    assert first_difference(RESULT, failed) == "head FAILED in train: rank 0 died"
    assert first_difference(failed, RESULT) == first_difference(failed, failed) == "base FAILED in train: rank 0 died"


def test_bytes_of_checkpoint_files_are_told_apart() -> None:
    other = changed("train", "files", to={"iter_0000003/config.yaml": "xx", "iter_0000003/.metadata": "xx", "new": ""})
    assert first_difference(RESULT, other) is None
    assert different_files(RESULT, other) == ["train/iter_0000003/config.yaml", "train/new"]


def digest(value: Any) -> str:
    hashed = hashlib.sha256()
    run._add(hashed, value)
    return hashed.hexdigest()


def test_one_bit_of_a_value_changes_its_hash() -> None:
    tensor = torch.tensor([1.0, 2.0])
    bit = torch.nextafter(tensor, torch.tensor(3.0))
    assert digest({"a": [tensor, 1]}) != digest({"a": [bit, 1]})
    assert digest(tensor) != digest(tensor.view(2, 1)) != digest(tensor.to(torch.float64))
    assert digest({"a": 1.0}) != digest({"a": 1.0 + 2**-52})
    assert digest([[1], 2]) != digest([[1, 2]])


def test_the_order_of_keys_does_not_change_a_hash() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_the_corpus_can_be_read(tmp_path: Path) -> None:
    layouts.write_corpus(tmp_path)
    for name, samples in (("train", 64), ("valid", 13)):
        prefix = str(tmp_path / name)
        check_token_ids(prefix, vocab_size=257)
        assert sum(map(int, open_index(prefix).lengths)) == samples * layouts.SEQ_LENGTH + 1


def test_folders_of_layouts_are_their_own() -> None:
    jobs = layouts.chosen("all")
    assert len({job["folder"] for job in jobs.values()}) == len(jobs) > 300
    assert layouts.chosen("quick").keys() < layouts.chosen("default").keys() < jobs.keys()


def test_an_unknown_commit_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="no-such-commit"):
        commit_hash("no-such-commit")


def test_a_loss_that_is_none_is_beyond_every_tolerance() -> None:
    one, none = {"layout": {"lm_loss": [(2.0).hex()]}}, {"layout": {"lm_loss": ["nan"]}}
    assert list(golden.differences(one, one, 0.0)) == []
    for known, found in ((one, none), (none, one)):
        [text] = golden.differences(known, found, 1.0)
        assert text.startswith("layout: number 1 of lm_loss is")


def test_rows_of_both_sides_are_compared_in_each_field() -> None:
    for field, other, said in (
        ("grad_norm", None, "resume: step 1: grad_norm is 0x1.0000000000000p+0 (1.0) and None"),
        ("a_field", 3, "resume: step 1: a_field is None and 3"),
        ("params_norm", True, "resume: step 1: params_norm is 0x1.0000000000000p+1 (2.0) and True"),
    ):
        assert first_difference(RESULT, changed("resume", "rows", 0, field, to=other)) == said


def test_stages_and_steps_are_told_in_their_order() -> None:
    other = changed("resume", "rows", 0, "lm_loss", to=1.0)
    other["stages"]["train"]["rows"][1]["grad_norm"] = 9.0
    assert str(first_difference(RESULT, other)).startswith("train: step 2: grad_norm is None and")
    other["stages"]["train"]["tensors"] = {}
    assert str(first_difference(RESULT, other)).startswith("train: step 2"), "metrics before tensors"
    assert first_difference(RESULT, changed("train", "tensors", "more", to="x")) == "train: more: in head alone"


def test_files_that_no_two_runs_write_alike_are_left_out() -> None:
    names = ("iter_1/exit.json", "exit.json", "iter_1/manifest.json", ".lock", "iter_1/.metadata", "a/not_exit.json")
    other = changed("resume", "files", to={**STAGE["files"], **dict.fromkeys(names, "new")})
    assert different_files(RESULT, other) == ["resume/a/not_exit.json"]
    assert different_files(RESULT, {"name": "TP2", "failed": "train: x"}) == [
        "train/iter_0000003/config.yaml",
        "resume/iter_0000003/config.yaml",
        "export/model.safetensors",
    ]


def test_losses_of_a_result_are_numbers_in_hexadecimal() -> None:
    rows = [{"lm_loss": 1.5, "grad_norm": None}, {"lm_loss": 2.0, "grad_norm": 0.0}, {"validation_loss": 3.0}]
    result = {"name": "a", "stages": {"train": {"rows": rows}}}
    assert golden.losses_of(result) == {
        "lm_loss": [(1.5).hex(), (2.0).hex()],
        "grad_norm": [(0.0).hex()],
        "validation_loss": [(3.0).hex()],
    }
    with pytest.raises(RuntimeError, match="a failed in train: x"):
        golden.losses_of({"name": "a", "failed": "train: x"})


def test_golden_losses_may_differ_by_the_tolerance_and_not_in_number() -> None:
    known = {"layout": {"lm_loss": [(2.0).hex(), (4.0).hex()]}}

    def said(*numbers: float, tolerance: float = 1e-6) -> list[str]:
        found = {"layout": {"lm_loss": [number.hex() for number in numbers]}}
        return [text.split(" (")[0] for text in golden.differences(known, found, tolerance)]

    assert said(2.0 + 1.9e-6, 4.0 - 3.9e-6) == []
    assert len(said(2.0 + 2.1e-6, 4.0 - 4.1e-6)) == 2
    assert said(2.0, 4.0 + 2**-50, tolerance=0.0) == [
        "layout: number 2 of lm_loss is 0x1.0000000000000p+2 and 0x1.0000000000001p+2"
    ]
    assert said(2.0) == ["layout: 2 and 1 numbers of lm_loss"]


def test_the_file_of_golden_losses_is_that_of_the_minor_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "version", lambda package: {"torch": "2.15.1+cpu", "megatron-core": "0.19.2"}[package])
    assert golden.file_for(tmp_path) == tmp_path / "torch-2.15.json"
    monkeypatch.setattr(golden, "train", lambda: {"a": {"lm_loss": ["0x1p+0"]}})
    path = golden.write(tmp_path)
    assert json.loads(path.read_text()) == {**golden.here(), "losses": {"a": {"lm_loss": ["0x1p+0"]}}}
    assert golden.here() == {"torch": "2.15.1+cpu", "megatron-core": "0.19.2", "cpu": commits.cpu_kind()}


def test_a_kept_result_is_that_of_everything_that_its_bits_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"name": "DP2, bf16", "stages": []}
    versions = {"torch": "2.15.0", "megatron-core": "0.19.2"}
    monkeypatch.setattr(commits, "version", lambda package: versions[package])
    monkeypatch.setattr(commits, "cpu_kind", lambda: "a CPU")
    monkeypatch.setattr(layouts, "corpus_hash", lambda: "abc")
    assert commits._kept(None, "1234", job) is None
    assert commits._kept(tmp_path, None, job) is None, "the working tree may change any time"
    kept = commits._kept(tmp_path, "1234", job)
    assert kept is not None
    assert kept.parent == tmp_path / "1234"
    assert kept.name.startswith("DP2-bf16-")
    assert kept == commits._kept(tmp_path, "1234", copy.deepcopy(job))
    others = [commits._kept(tmp_path, "1234", {**job, "stages": [1]}), commits._kept(tmp_path, "5678", job)]
    for package in ("torch", "megatron-core"):
        versions[package] += ".1"
        others.append(commits._kept(tmp_path, "1234", job))
    for module, name, value in (
        (commits, "cpu_kind", lambda: "another"),
        (layouts, "corpus_hash", lambda: "def"),
        (run, "VERSION", run.VERSION + 1),
    ):
        monkeypatch.setattr(module, name, value)
        others.append(commits._kept(tmp_path, "1234", job))
    assert len({kept, *others}) == 1 + len(others)


def test_results_are_kept_once_whole_and_those_that_failed_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "cpu_kind", lambda: "a CPU")
    jobs = {name: {"name": name, "folder": name, "stages": []} for name in ("good", "bad")}
    asked: list[list[str]] = []

    def run_jobs(tree: Path, left: list[dict[str, Any]], _scratch: Path, workers: int) -> Any:
        assert (tree, workers) == (tmp_path / "tree", 3)
        asked.append([job["name"] for job in left])
        yield from (
            {"name": job["name"], **({"failed": "x"} if job["name"] == "bad" else {"stages": {}})} for job in left
        )

    monkeypatch.setattr(commits, "run_jobs", run_jobs)
    monkeypatch.setattr(commits, "_tree", lambda _commit, _scratch: contextlib.nullcontext(tmp_path / "tree"))
    cache = tmp_path / "cache"
    for _ in range(2):
        found = dict(commits.results("1234", jobs, tmp_path, cache, 3))
        assert found == {"good": {"name": "good", "stages": {}}, "bad": {"name": "bad", "failed": "x"}}
    assert asked == [["good", "bad"], ["bad"]]
    [kept] = (cache / "1234").iterdir()
    assert json.loads(kept.read_text())["name"] == "good", "and no temporary file is left"


def test_lines_are_followed_until_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may arrive in pieces, and the last ones after the end was seen to come."""
    texts = iter([['{"name": "a"}\n', '{"na'], ['me": "b"}\n'], [], ['{"name": "c"}\n', '{"part']])
    ends = iter([None, None, None, 1])
    replace_in(monkeypatch, commits, "time", sleep=lambda _seconds: None)

    class Lines:
        def __iter__(self) -> Any:
            return iter(next(texts))

    process: Any = SimpleNamespace(poll=lambda: next(ends))
    assert [result["name"] for result in commits._follow(Lines(), process)] == ["a", "b", "c"]  # pyright: ignore


def test_what_a_stage_left_is_found_by_the_names_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("iter_2/.metadata", "iter_2/__0_0.distcp", "metrics.jsonl", "deep/file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}\n{"a": 2}\n' if name == "metrics.jsonl" else name)
    monkeypatch.setattr(run, "tensor_hashes", lambda path: [("w", f"hash in {path.name}")])
    found = run._written(tmp_path)
    assert found["rows"] == [{"a": 1}, {"a": 2}]
    assert found["tensors"] == {"iter_2: w": "hash in iter_2"}
    files = ("deep/file", "iter_2/.metadata", "iter_2/__0_0.distcp")
    assert found["files"] == {name: hashlib.sha256(name.encode()).hexdigest() for name in files}
    assert run._written(tmp_path / "deep")["rows"] == []


def test_the_first_stage_that_fails_ends_a_job_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def start(_tree: str, stage: dict[str, Any], log: Path) -> None:
        started.append(stage["name"])
        assert not (tmp_path / "job" / "stale").exists()
        log.write_text("x" * 5000 + "last words")
        (log.parent / stage["name"]).mkdir()
        if stage["name"] == "resume":
            raise RuntimeError("rank 1 died")

    monkeypatch.setattr(run, "_start", start)
    job = {"name": "a", "folder": str(tmp_path / "job"), "stages": [{"name": n} for n in ("train", "resume", "export")]}
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "stale").touch()
    found = run.run_job("tree", job)
    assert started == ["train", "resume"]
    assert found == {"name": "a", "failed": "resume: rank 1 died\n" + "x" * 2990 + "last words"}
    assert not (tmp_path / "job").exists()
    found = run.run_job("tree", {**job, "stages": job["stages"][:1]})
    assert found["stages"] == {"train": {"rows": [], "tensors": {}, "files": {}}}


def test_everything_in_a_value_is_hashed() -> None:
    class Held:
        def __init__(self, **values: Any):
            vars(self).update(values)

    values: list[Any] = [
        torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32), np.zeros(2, np.float32), np.zeros((1, 2)),
        {"a": 1}, {"a": 2}, {"b": 1}, {}, [1, 2], [2, 1], [1], [[1], 2], (3,), 1, 1.0, True, None, "1", b"1",
        io.BytesIO(b"x"), io.BytesIO(b"y"), Held(a=1, b=2), Held(a=2, b=1), 0.0, -0.0, torch.tensor([0.0]), [],
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    assert digest((1, 2)) == digest([1, 2])
    assert digest(torch.ones(3, 2).t()) == digest(torch.ones(2, 3)), "however it lies in memory"


def test_stages_of_a_layout_follow_each_other() -> None:
    job = layouts.job("a", layouts.Layout("tied", 2, "--bf16", reshard=(1, "--fp16"), export=True), "runs/a")
    train, resume, reshard, export = job["stages"]
    assert [stage["name"] for stage in job["stages"]] == ["train", "resume", "reshard", "export"]
    assert [stage["ranks"] for stage in job["stages"]] == [2, 2, 1, 1]
    for stage in (train, resume, reshard):
        words = stage["words"]
        assert words[words.index("--save") + 1] == f"runs/a/{stage['name']}"
        assert words[words.index("--metrics-file") + 1] == f"runs/a/{stage['name']}/metrics.jsonl"
        assert ("--load" in words) == (stage is not train)
        assert (words[-1] == "--fp16") == (stage is reshard)
        if stage is not train:
            assert words[words.index("--load") + 1] == "runs/a/train"
            assert words[words.index("--ckpt-step") + 1] == "3"
    assert export["words"] == ["to-hf", "--load", "runs/a/train", "--save", "runs/a/export", "--no-verify"]
    steps = layouts.job("a", layouts.DEFAULT["TP2 SP, tied"], "runs/a", steps_only=True)["stages"]
    assert [stage["name"] for stage in steps] == ["train"]
    assert not {"--save", "--save-interval", "--load"} & set(steps[0]["words"])


def test_sets_of_layouts_hold_what_they_say() -> None:
    assert set(layouts.chosen("quick")) == {name for name, layout in layouts.DEFAULT.items() if layout.quick}
    assert set(layouts.chosen("default")) == set(layouts.DEFAULT)
    every = layouts.chosen("all")
    of_cases = {f"{precision} {name}" for precision in ("fp32", "bf16") for name in cases.CASES}
    assert every.keys() - layouts.DEFAULT.keys() == of_cases
    for precision in ("fp32", "bf16"):
        words = every[f"{precision} TP2 SP, tied"]["stages"][0]["words"]
        assert ("--bf16" in words) == (precision == "bf16")
    assert set(layouts.golden_jobs()) == set(layouts.GOLDEN)
    assert layouts.slug("  TP2 SP, tied (x)!") == "TP2-SP-tied-x"


def test_the_hash_of_the_corpus_is_that_of_its_files(tmp_path: Path) -> None:
    layouts.write_corpus(tmp_path)
    expected = hashlib.sha256(b"".join((tmp_path / name).read_bytes() for name in sorted(os.listdir(tmp_path))))
    assert layouts.corpus_hash() == expected.hexdigest()
    assert (tmp_path / "train.bin").read_bytes()[:100] != (tmp_path / "valid.bin").read_bytes()[:100]
