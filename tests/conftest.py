"""Shared set-up of all tests: no deadline per example, since machines are shared; few examples, since CI is short."""

from hypothesis import HealthCheck, settings

settings.register_profile("kvasir", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvasir")
