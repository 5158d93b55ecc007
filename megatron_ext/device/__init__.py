"""The only place that knows CUDA from CPU."""
