"""What a run tells: log line, TensorBoard, metrics file, throughput."""
