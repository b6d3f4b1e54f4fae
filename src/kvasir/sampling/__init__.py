"""From logits to ids, as pure functions. docs/sampling.md says what is exact and in which order."""
