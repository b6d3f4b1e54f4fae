import pytest

from tests.serve.dialects.table import PATHS


@pytest.fixture(params=PATHS.values(), ids=PATHS)
def row(request):
    """Each route that generates."""
    return request.param
