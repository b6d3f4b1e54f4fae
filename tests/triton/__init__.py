"""Tests of the Triton kernels, in Triton's interpreter: it runs them on the CPU, one program after another."""
