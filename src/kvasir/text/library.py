"""Converts exceptions of the `tokenizers` library into errors that a user can act on."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvasir.errors import KvasirError, ModelFileError


@contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turn any failure of the library into a `ModelFileError` whose message begins with `doing`.

    A malformed tokenizer can make the library's Rust code panic, which raises a `PanicException`: a `BaseException`
    that would otherwise end the thread. The class cannot be imported, so it is recognized by name.
    """
    try:
        yield
    except KvasirError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelFileError(f"{doing}: {error}", "the tokenizer's file is malformed") from error
        raise
