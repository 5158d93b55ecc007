"""pretrain_gpt.py that takes no step beyond the number in a file, and writes down how many ranks took each.

python paced_program.py FOLDER FLAGS...
"""

import sys
import time
from pathlib import Path
from typing import Any

from megatron_ext.cli.pretrain import start

FOLDER = Path(sys.argv[1])


def pace() -> Any:
    """Return the callback; the engine may be imported only once the device is installed."""
    from megatron_ext.train.callbacks.stopping import Stopping
    from megatron_ext.train.trainer import Callback, Trainer

    class Pace(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            [stopping] = [callback for callback in trainer.callbacks if isinstance(callback, Stopping)]
            while trainer.run.state.iteration >= int((FOLDER / "gate").read_text() or 0):
                if stopping.signals.requested:  # one more step, and it stops
                    break
                time.sleep(0.05)
            if trainer.run.rank == 0:
                with (FOLDER / "worlds").open("a") as file:
                    file.write(f"{trainer.run.state.iteration + 1} {trainer.run.world_size}\n")

    return Pace()


if __name__ == "__main__":
    start(sys.argv[2:], callbacks=[pace])
