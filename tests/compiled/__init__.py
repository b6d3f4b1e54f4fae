"""Compiles the kernels of the graph executor without a GPU, for several architectures, and inspects the binaries.

Not under Triton's interpreter: run it in a process of its own (`python -m tests.compiled`).
"""
