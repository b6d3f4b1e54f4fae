"""Runs a traced forward as Triton kernels on a device.

trace -> calls (fold.py) -> buffers (layout.py) -> launches (forward.py)
"""
