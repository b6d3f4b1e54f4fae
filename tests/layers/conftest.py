from tests.models.conftest import exact_machine  # noqa: F401 - for tests that compare bits of products of two shapes
from tests.one_thread import one_thread  # noqa: F401 - a fixture of all tests here
