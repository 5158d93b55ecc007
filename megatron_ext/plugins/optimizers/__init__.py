"""Optimizers beyond Adam, SGD and Muon: one file for each."""
