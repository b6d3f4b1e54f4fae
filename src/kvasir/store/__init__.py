"""Models on this machine under names of their own: pulled, created, copied, removed. No torch, no engine."""
