"""Snapshots in the memory of the ranks' machines, which outlive the processes: what a restart finds first."""
