"""Kvasir: an LLM inference engine. Public names resolve lazily, so `import kvasir` stays cheap."""

__version__ = "0.1.0"
