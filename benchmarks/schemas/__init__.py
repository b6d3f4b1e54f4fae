"""Measures how much of JSON Schema can be enforced: see run.py."""
