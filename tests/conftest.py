"""Shared set-up of all tests: no deadline per example, since machines are shared; few examples, since CI is short."""

from hypothesis import HealthCheck, settings

from kvasir.config import prepare_torch

prepare_torch()  # as every engine does before torch is imported

settings.register_profile("kvasir", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvasir")
