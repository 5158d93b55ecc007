"""Trains: build, step, evaluate, callbacks."""
