"""Drafters for kvasir-mini: a draft model, an EAGLE-3 head and an MTP head. Steps are in ../README.md."""
