"""By what a tier tells weights apart: pulled files by their content, others by facts and samples."""

from __future__ import annotations

import os
from hashlib import sha256

import pytest

from kvasir.engine.tier import file_identity


@pytest.mark.parametrize("pulled", [True, False])
def test_times_matter_only_without_a_content_hash(tmp_path, pulled):
    data = b"weights"
    path = tmp_path / ("blobs" if pulled else "models") / f"sha256-{sha256(data).hexdigest()}"
    path.parent.mkdir()
    path.write_bytes(data)
    first = file_identity(path)
    assert file_identity(path) == first
    os.utime(path, ns=(1, 1))
    assert (file_identity(path) == first) == pulled


def test_other_contents_are_other_weights(tmp_path):
    (tmp_path / "blobs").mkdir()
    blobs = [tmp_path / "blobs" / sha256(data).hexdigest() for data in (b"a", b"b")]
    for blob in blobs:
        blob.write_bytes(b"same size")
        os.utime(blob, ns=(1, 1))
    assert file_identity(blobs[0]) != file_identity(blobs[1])
