"""Who is blamed for an error: a user's own code by its place, and else nobody."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.data.corpus import Splits
from megatron_ext.data.loader import BatchLoader
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.own_code import OwnPart, hand_over, own_class, read_script, text_of_own_error
from megatron_ext.resilience.process_end import RunStatus, run_guarded
from megatron_ext.train.extensions import Extensions
from tests.support.small_models import small_config

EXT = """def my_loss(token):
    return token.logits

def my_rate(samples, rate):
    return int("x")

class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {}["tokens"]
"""


@pytest.fixture
def ext(tmp_path: Path) -> Any:
    """The module of a user, ext.py."""
    (tmp_path / "ext.py").write_text(EXT)
    spec = importlib.util.spec_from_file_location("ext", tmp_path / "ext.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _last_line(main: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_guarded(main, RunStatus(0)) == 1
    said = capsys.readouterr()
    assert "Traceback" in said.out + said.err
    return (said.out + said.err).strip().splitlines()[-1]


def test_an_error_in_an_own_function_names_it_and_its_line(ext: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an object of ours that was asked for a name it does not have, those that it has."""
    from megatron_ext.model.loss import TokenLogits

    own = Extensions(loss=ext.my_loss, learning_rate=ext.my_rate)
    token: Any = TokenLogits(*[None] * 3)  # pyright: ignore[reportArgumentType]
    assert own.loss is not None
    line = _last_line(lambda: own.loss and own.loss(token), capsys)  # pyright: ignore[reportReturnType]
    assert line.startswith(
        "rank 0: error in your loss= (ext.py:2): AttributeError: 'TokenLogits' object has no attribute 'logits'; it "
        "has cross_entropy, labels_BS, log_normalizer, logits_SBV, of_labels, tp_group (before the first step)."
    )
    assert "report it" not in line
    line = _last_line(lambda: own.loss and own.loss(), capsys)  # pyright: ignore[reportReturnType, reportCallIssue]
    assert line.startswith("rank 0: error in your loss= (ext.py:1): TypeError: my_loss() missing 1 required positional")
    line = _last_line(lambda: own.learning_rate(0, 1.0), capsys)  # pyright: ignore[reportOptionalCall]
    assert line.startswith("rank 0: error in your learning_rate= (ext.py:5): ValueError: invalid literal")


def test_an_error_in_an_own_dataset_names_its_method(ext: Any) -> None:
    own = Extensions(datasets=lambda *_: Splits(ext.Data(), None, None))
    made = own.own_datasets(small_config(), None, Splits(4, 0, 0))  # pyright: ignore[reportArgumentType]
    assert made is not None
    assert made.train is not None
    with pytest.raises(DataError, match=r"sample 3 .* Data: error in your datasets= \(ext.py:11\): KeyError"):
        made.train[3]


def test_an_error_of_ours_is_nobody_elses() -> None:
    """Though a program of the user's, this file, calls ours."""
    nothing: Any = range(2)
    with pytest.raises(DataError) as caught:
        BatchLoader(nothing, vocab_size=4, seq_length=2, micro_batch_size=1, dp_rank=0, dp_size=1).global_batch(5, 1)
    assert text_of_own_error(caught.value) is None


def test_own_classes_are_those_of_no_library(ext: Any) -> None:
    import torch

    class Mine(torch.nn.Linear):
        pass

    assert own_class(Mine(2, 2)) is Mine
    assert own_class(ext.Data()) is ext.Data
    assert [own_class(one) for one in (torch.nn.Linear(2, 2), OwnPart("loss", len), {})] == [None] * 3


def test_a_script_is_read_up_to_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("argv", "path", "modules"):
        monkeypatch.setattr(sys, name, getattr(sys, name).copy())
    script = tmp_path / "mine.py"
    begin = "import sys\nfrom megatron_ext.cli.pretrain import start\nif __name__ == '__main__':\n    "
    script.write_text(f"{begin}start([*sys.argv[1:], '--lr', '1'], loss=len)\n    raise AssertionError\n")
    assert read_script(script, ["--bf16"]) == (["--bf16", "--lr", "1"], {"loss": len})
    script.write_text(f"{begin}start(['--lr', '1'], loss=len)")  # as by keywords
    assert read_script(script, ["--bf16"]) == (["--lr", "1", "--bf16"], {"loss": len})
    hand_over([], {})  # nobody reads any more
    for text, why in (("pass", "ended without a call"), ("start(3)", "gave pretrain int")):
        script.write_text(begin + text)
        with pytest.raises(ConfigurationError, match=rf"--script .*mine\.py {why}"):
            read_script(script, [])
    with pytest.raises(ConfigurationError, match="is no Python file"):
        read_script(tmp_path / "nothing.py", [])
