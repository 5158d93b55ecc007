"""Launches of Megatron-LM's preprocess_data.py start as they are: what its flags come to in ours."""

import json
from pathlib import Path

import pytest

from megatron_ext.cli import preprocess_data
from megatron_ext.errors import ConfigurationError

OLD = (
    "--partitions 4 --keep-sequential-samples --keep-newlines --lang english --dataset-impl mmap --chunk-size 25 "
    "--workers 2"
)


def test_old_flags_without_effect_are_taken_with_a_warning_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40)))
    written = []
    for name, more in (("plain", ""), ("old", OLD)):
        line = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/{name} --tokenizer-type ByteTokenizer {more}"
        assert preprocess_data.main(line.split()) == 0
        written.append([(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert written[0] == written[1]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split()[1] for line in warnings] == [word for word in OLD.split() if word.startswith("--")][:-1]


@pytest.mark.parametrize(
    "flag", ["--split-sentences", "--find-optimal-num-workers", "--max-documents 5", "--workers-to-check 1 2 4"]
)
def test_old_flags_that_would_write_other_documents_are_refused(flag: str, tmp_path: Path):
    line = f"--input in --output-prefix {tmp_path}/out --tokenizer-type ByteTokenizer --partitions 2 {flag}"
    with pytest.raises(ConfigurationError, match=f"^{flag.split()[0]} is not supported"):
        preprocess_data.main(line.split())
