"""Holds optimizer settings, optimizers that megatron-core lacks, and the curves of learning rate and weight decay."""
