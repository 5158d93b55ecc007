"""Tables of a pipeline's passes that are read from files, torch's own among them."""

from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules

from megatron_ext.pipeline_tables import CLASSES, Action, _Stage, rows
from megatron_ext.untrusted.schedule_csv import read_schedule
from megatron_ext.untrusted.text import TextError


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipe-v"])
def test_what_torch_writes_is_what_torch_plans(name: str, form: str, tmp_path: Path) -> None:
    made = getattr(schedules, CLASSES[name])([_Stage(0, 4, 2), _Stage(1, 4, 2)], 5 if name == "looped-bfs" else 4)
    made._dump_csv(str(tmp_path / "it.csv"), form)
    assert read_schedule(str(tmp_path / "it.csv")) == rows(name, 2, 2, made._n_microbatches)


def test_entries_may_be_empty_and_have_blanks(tmp_path: Path) -> None:
    (tmp_path / "it.csv").write_text("0F0, 0F1,,0B0 ,0B1\n\n,1F0,1B0,1F1,1I1,1W1\n")
    first, second = read_schedule(str(tmp_path / "it.csv"))
    assert (" ".join(map(str, first)), second[-1]) == ("0F0 0F1 0B0 0B1", Action(1, "W", 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, entry 2: '1X0' is no pass"),
        ("0F0,F", "line 1, entry 2: 'F' is no pass"),
        ("0F0,-1B0", "line 1, entry 2: '-1B0' is no pass"),
        ("0F99999999", "line 1, entry 1"),
        ("99999F0", "line 1, entry 1"),
        ("(0F0;1)OVERLAP_F_B", "line 1, entry 1: '1' is no pass"),
    ],
)
def test_what_is_no_pass_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "it.csv").write_text(text)
    with pytest.raises(TextError, match=said):
        read_schedule(str(tmp_path / "it.csv"))
