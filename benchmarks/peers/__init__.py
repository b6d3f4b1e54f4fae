"""Other engines beside ours: same files, same prompts, same threads, in turns. See benchmarks/README.md."""
