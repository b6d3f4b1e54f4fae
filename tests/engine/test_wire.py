"""Errors on their way from the engine's process."""

from __future__ import annotations

import inspect

import pytest

from kvasir import errors
from kvasir.engine import wire
from kvasir.errors import KvasirError, LimitExceeded, TemplateTooLong

VALUES = {"param": "prompt", "retry_after": 2.5, "tokens": 70, "context": 64}
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, KvasirError)]
NOT_OF_THE_ENGINE = [c for c in CLASSES if c.__name__.startswith("Template")]  # templates run outside it


def crossed(error: KvasirError) -> KvasirError:
    return wire.to_error(wire.decode_event(wire.encode(wire.to_fault("r", error))))


@pytest.mark.parametrize("cls", [c for c in CLASSES if c not in NOT_OF_THE_ENGINE])
def test_an_error_keeps_its_class_and_all_it_states(cls):
    own = {name: value for name, value in VALUES.items() if name in inspect.signature(cls).parameters}
    error = cls("too many", "send fewer", **own)
    other = crossed(error)
    assert type(other) is cls and vars(other) == vars(error)


def test_an_error_of_a_further_class_becomes_its_base():
    other = crossed(TemplateTooLong(70))
    assert type(other) is errors.InvalidRequest and other.param == "messages"


def test_a_limit_that_waiting_does_not_lift_stays_one():
    assert crossed(LimitExceeded("full", "delete some")).retry_after is None
