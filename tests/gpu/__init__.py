"""Tests that need a GPU, run by `make gpu-check`, which sets TRITON_INTERPRET=0. Elsewhere they are only collected, in
processes that test kernels in Triton's interpreter.

    KVASIR_GPU_DRY=1 .venv/bin/python -m pytest -m gpu tests/gpu/test_graph.py       a trial without a GPU
"""
