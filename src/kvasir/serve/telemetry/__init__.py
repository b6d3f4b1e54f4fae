"""Metrics, and the logs of access and management."""
