"""Matrix products of layers, in the precision of the weights or in FP8."""
