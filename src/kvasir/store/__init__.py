"""The store of models on this machine, each under its own name: pull, create, copy, remove. Needs no torch and no
engine."""
