import pytest

from tests.one_thread import one_thread  # noqa: F401 - a fixture of all tests here


@pytest.fixture(scope="session")
def transformers():
    """The oracle. It is slow to import, so only where it is asked for."""
    return pytest.importorskip("transformers", reason="transformers is the oracle of these tests")


@pytest.fixture(scope="session")
def exact_machine():
    """Skips where the libraries under torch do not keep the contract at all (the engine then says "close")."""
    from kvasir.runner.eager_selftest import run
    from tests.models.driver import make_cache
    from tests.models.families import config_of
    from tests.models.oracle import dummy

    model = dummy(config_of("llama"))
    if run(model, make_cache(model)) != "exact":
        pytest.skip("this machine's matrix library is not exact: the engine grades itself close here")
