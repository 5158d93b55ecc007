"""What --skip-train leaves of a checkpoint to load."""

import shlex

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from tests.support.wrong_flags import BASE


def test_who_only_evaluates_needs_no_optimizer() -> None:
    def resolved(flags: str) -> Config:
        return resolve(parse(shlex.split(f"{BASE} {flags}")).values, Facts())

    assert resolved("--skip-train").checkpoint.no_load_optim
    assert not resolved("").checkpoint.no_load_optim
