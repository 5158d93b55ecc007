#!/usr/bin/env python3
"""Write the texts of tests/golden anew (cli.txt, near_flags.json, foreign_keys.txt, problems.txt, and what the planner
says: planner.txt, plans.txt, pipelines.txt) and docs/megatron_launches.md: `python tests/golden/regenerate.py`.

Run it after changing a flag, a message or an estimate on purpose, and read the diff before committing it. With --losses
it trains and writes tests/golden/losses for this torch and this machine instead: only where losses changed on purpose.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.plugins.megatron_lm.reference import pinned_command_line  # noqa: E402
from tests.support import foreign_keys, near_bounds, planner_numbers, plans  # noqa: E402
from tests.support.losses import golden  # noqa: E402
from tests.support.megatron_launches import launches_page  # noqa: E402
from tests.support.near_flags import golden_text  # noqa: E402


def main() -> None:
    if sys.argv[1:] == ["--losses"]:
        print(golden.write(ROOT / "tests/golden/losses"))
        return
    (ROOT / "tests/golden/cli.txt").write_text(pinned_command_line())
    (ROOT / "docs/megatron_launches.md").write_text(launches_page())
    (ROOT / "tests/golden/near_flags.json").write_text(golden_text())
    (ROOT / "tests/golden/foreign_keys.txt").write_text(foreign_keys.golden_text())
    (ROOT / "tests/golden/problems.txt").write_text(near_bounds.golden_text())
    (ROOT / "tests/golden/planner.txt").write_text(planner_numbers.golden_text())
    (ROOT / "tests/golden/pipelines.txt").write_text(plans.pipelines_text())
    with tempfile.TemporaryDirectory() as folder:
        (ROOT / "tests/golden/plans.txt").write_text(plans.plans_text(Path(folder)))


if __name__ == "__main__":
    main()
