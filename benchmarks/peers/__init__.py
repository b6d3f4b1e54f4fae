"""Compares Kvasir with other engines: same files, same prompts, same threads, in turn. See benchmarks/README.md."""
