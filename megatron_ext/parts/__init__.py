"""The parts of a layer: for each kind its description, without torch, next to its computation."""
