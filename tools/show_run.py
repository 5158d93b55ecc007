"""Shows a run: its loss curve in the terminal, and as a web page.

    python tools/show_run.py checkpoints/quickstart --html run.html

reads metrics.jsonl in that folder (or the file that --metrics-file named). Where the run recorded its pipeline
(--record-schedule), the page draws one step of it, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.plan.timeline import Timeline
from megatron_ext.telemetry import schedule_record
from megatron_ext.telemetry.curve import loss_chart, read_history, summary
from megatron_ext.telemetry.run_page import run_page


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Show a run: its loss curve in the terminal, and as a web page.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's --save folder, or its metrics file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with loss, rate, norm and speed")
    options = parser.parse_args(argv)
    history = read_history(options.run)
    print(loss_chart(history))
    print()
    print("\n".join(summary(history)))
    if options.html is not None:
        options.html.write_text(run_page(history, str(options.run), _pipeline(options.run)), encoding="utf-8")
        print(f"page             {options.html}")
    return 0


def _pipeline(run: Path) -> Timeline | None:
    """Return the last step that the run recorded; None where it recorded none."""
    folder = (run if run.is_dir() else run.parent) / schedule_record.FOLDER
    return schedule_record.timeline(schedule_record.read(folder)) if folder.is_dir() else None


if __name__ == "__main__":
    run_tool(main)
