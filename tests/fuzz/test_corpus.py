"""Every input of the corpus again, without the fuzzer: a value or a refusal, within bounds."""

import pytest

from tests.fuzz.target import CORPUS, NAMES, attempt, bounded_memory, load


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_the_corpus_keep_the_promise(name):
    target = load(name)
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs, "a target without a corpus"
    with bounded_memory():
        for path in inputs:
            try:
                attempt(target, path.read_bytes())
            except Exception as error:
                error.add_note(f"to see it again: python -m tests.fuzz {name} {path}")
                raise
