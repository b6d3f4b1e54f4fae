"""What all dialects share: a conversation, its tools, its format, and how it becomes a request of the engine."""
