"""Kernels of our own for GPUs, in Triton: each is one pass over memory in place of several, forward and backward.

`kernel_choice.take` decides whether they are used; the files of the kernels import Triton, so that they are imported
only then. Where a kernel is called, the same computation in torch's operations stands next to it:
`device.kernels.rms_norm`, `device.many_tensors`, `parts.norm.compute`, `parts.attention.rope`, `parts.mlp.compute`,
`parts.attention.compute`.
Numbers are computed in fp32 and rounded once at the end.

No GPU is needed to test them: Triton's interpreter runs them on a CPU (tests/support/interpreted_kernels.py), and its
compiler makes the machine code of any GPU (tests/unit/device/test_triton_compiled.py).
"""
