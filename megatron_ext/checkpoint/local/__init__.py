"""Snapshots in the memory of the ranks' machines, which outlive the processes: a restart looks at them first."""
