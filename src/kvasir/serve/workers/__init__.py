"""Several processes that serve one port: API workers, which speak HTTP and text, and the main process, which owns the
engine."""
