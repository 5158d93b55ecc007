"""Keys of Mamba-2 layers that transformers reads otherwise than the programs that train them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.hf_config import read_hf_config
from tests.support.hf_shapes import MODELS

FAMILIES = [name for name, shape in MODELS.items() if shape["model_type"] in ("nemotron_h", "mamba2")]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("limit", [[0.01, 0.1], [0.0, 100.0]])
def test_a_limit_of_time_steps_is_refused(name: str, limit: list[float], tmp_path: Path) -> None:
    """transformers 5.23 ignores it in nemotron_h, and heeds it in mamba2; here steps have none."""

    def read(**changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**MODELS[name], **changes}))
        read_hf_config(tmp_path)

    read(time_step_limit=[0.0, float("inf")])
    with pytest.raises(ConfigurationError, match=r"time_step_limit is \[.*\], but time steps have no limit here"):
        read(time_step_limit=limit)


def test_there_are_such_families() -> None:
    assert len(FAMILIES) > 2
