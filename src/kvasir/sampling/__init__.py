"""From logits to ids, as pure functions. docs/sampling.md describes what is exact, and the order of the operations."""
