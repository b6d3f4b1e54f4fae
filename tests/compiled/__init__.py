"""Compiles the kernels of the graph executor for GPUs that need not be there, and reads what came out.

Not under Triton's interpreter: run it in a process of its own (`python -m tests.compiled`).
"""
