"""The training loop: build, step, evaluate, callbacks."""
