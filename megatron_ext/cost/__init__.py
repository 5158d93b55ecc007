"""Planning without torch: bytes that a layout keeps, holds and sends on each rank, how long a step may take, and which
layouts of a model on some devices are worth trying. Memory and bytes sent are formulas; times are estimates."""
