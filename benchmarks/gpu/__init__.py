"""Measures the graph executor on one GPU: `python -m benchmarks.gpu`."""
