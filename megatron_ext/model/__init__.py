"""Builds GPTModel from the configuration: layer spec, attention, norm, rope, initialization, loss."""
