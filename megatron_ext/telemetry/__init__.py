"""Telemetry of a run: log line, TensorBoard, metrics file, throughput."""
