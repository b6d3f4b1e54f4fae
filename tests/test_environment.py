"""Paths that users write."""

from __future__ import annotations

from pathlib import Path

from kvasir.environment import user_path


def test_a_home_folder_is_found_or_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert user_path("~no-such-user/a") == Path("~no-such-user/a")
    assert user_path(Path("a/b")) == Path("a/b")


def test_no_path_is_expanded_in_another_way():
    """pathlib's own way raises RuntimeError for an unknown user."""
    source = Path(__file__).parents[1] / "src/kvasir"
    assert not [path for path in source.rglob("*.py") if ".expanduser()" in path.read_text()]
