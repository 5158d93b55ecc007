"""What counts as a difference between two results, and what is hashed; the whole tool is run on ranks elsewhere."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.data.integrity import check_token_ids, open_index
from megatron_ext.errors import ConfigurationError
from megatron_ext.verify.losses import golden, layouts, run
from megatron_ext.verify.losses.commits import commit_hash
from megatron_ext.verify.losses.compare import different_files, first_difference

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
