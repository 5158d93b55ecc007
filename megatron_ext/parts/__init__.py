"""Holds what a layer is made of: for each kind of part its description, without torch, next to its computation."""
