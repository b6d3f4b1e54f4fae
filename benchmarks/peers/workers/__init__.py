"""One small program per engine, run by that engine's own interpreter: answers commands on stdin. Standard library,
numpy and the engine are all that a worker may import."""
