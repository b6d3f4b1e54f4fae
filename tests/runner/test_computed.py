"""What an executor cannot compute of an adapter is refused by name, with the executor that can."""

import pytest

from kvasir.errors import UnsupportedModel
from kvasir.runner.computed import refuse


def test_an_executor_names_what_it_cannot_compute_and_one_that_can():
    with pytest.raises(UnsupportedModel, match="a change of X, which the graph executor cannot compute") as caught:
        refuse("the graph executor", "a change of X")
    assert "--executor eager" in str(caught.value)
