"""The lines for --stages against the lengths of deepspeed 0.19.8's CurriculumScheduler, recorded step by step."""

from typing import Any

import pytest
import yaml

from megatron_ext.plugins.migrate.deepspeed import nearest_stages

_LINEAR = {"schedule_config.total_curriculum_step": 97, "schedule_config.difficulty_step": 16}
_RANGE = {"min_difficulty": 64, "max_difficulty": 192}


@pytest.mark.parametrize(
    ("section", "recorded"),
    [
        (
            {"schedule_type": "fixed_linear", **_RANGE, **_LINEAR},
            "0: 64, 12: 80, 24: 96, 36: 112, 48: 128, 60: 144, 72: 160, 84: 176, 96: 192",
        ),
        (
            {"schedule_type": "fixed_root", **_RANGE, **_LINEAR, "schedule_config.root_degree": 2, "min_difficulty": 70}
            | {"max_difficulty": 200, "schedule_config.total_curriculum_step": 500},
            "0: 80, 19: 96, 52: 112, 99: 128, 162: 144, 239: 160, 332: 176, 440: 192, 563: 200",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config.difficulty": [8, 16, 24]}
            | {"schedule_config.max_step": [5, 10]},
            "0: 8, 5: 16, 10: 24",
        ),
    ],
)
def test_stages_have_the_lengths_of_deepspeed(section: dict[str, Any], recorded: str) -> None:
    text = nearest_stages(section)
    assert text is not None
    expected = {first: {"seq_length": length} for first, length in yaml.safe_load(f"{{{recorded}}}").items()}
    assert yaml.safe_load(text) == expected


def test_many_lengths_become_sixteen_stages() -> None:
    lengths = {"min_difficulty": 64, "max_difficulty": 2048, "schedule_config.difficulty_step": 8}
    text = nearest_stages({"schedule_type": "fixed_linear", "schedule_config.total_curriculum_step": 30000, **lengths})
    assert text is not None
    stages = yaml.safe_load(text)
    assert len(stages) == 16
    assert stages[0] == {"seq_length": 64}
    assert [*stages.values()][-1] == {"seq_length": 2048}


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"schedule_type": "custom"},
        {"schedule_type": "fixed_linear", **_RANGE, **_LINEAR, "schedule_config.difficulty_step": 0},
        {"schedule_type": "fixed_linear", **_RANGE, **_LINEAR, "schedule_config.total_curriculum_step": 10**30},
        {"schedule_type": "fixed_discrete", "schedule_config.difficulty": [8], "schedule_config.max_step": [5]},
        {"schedule_type": ["fixed_linear"]},
    ],
)
def test_what_gives_no_lengths_gives_no_stages(section: dict[str, Any]) -> None:
    assert nearest_stages(section) is None
