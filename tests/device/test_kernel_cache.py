"""The folder of compiled kernels: private, one for each version, and never one that others could have filled."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvasir.device import kernel_cache
from kvasir.device.kernel_cache import KEPT, kernel_folder, sources_key

SOURCE = "import triton\n\n\n@triton.jit\ndef f(x):\n    pass\n"


@pytest.fixture
def base(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("KVASIR_KERNELS", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_the_folder_is_private_and_found_again(base):
    folder, note = kernel_folder("3.9.0", "sm_90")
    assert folder.parent == base and not note
    assert [stat.S_IMODE(f.stat().st_mode) for f in (base, folder)] == [0o700, 0o700]
    assert kernel_folder("3.9.0", "sm_90") == (folder, "")


def test_each_compiler_target_and_source_has_its_own(base, monkeypatch):
    folders = {kernel_folder(*key)[0] for key in (("3.9.0", "sm_90"), ("3.6.0", "sm_90"), ("3.9.0", "sm_100"))}
    monkeypatch.setattr(kernel_cache, "sources_key", lambda package: "0123")
    assert len(folders | {kernel_folder("3.9.0", "sm_90")[0]}) == 4


def test_the_key_changes_with_every_file_that_has_kernels_and_with_no_other(tmp_path):
    (tmp_path / "ops").mkdir()
    kernel, other = tmp_path / "ops" / "triton.py", tmp_path / "ops" / "plain.py"
    kernel.write_text(SOURCE)
    other.write_text("x = 1\n")
    first = sources_key(tmp_path)
    other.write_text("x = 2\n")
    assert sources_key(tmp_path) == first
    kernel.write_text(SOURCE.replace("pass", "return"))
    second = sources_key(tmp_path)
    kernel.rename(kernel.with_name("renamed.py"))
    assert len({first, second, sources_key(tmp_path)}) == 3


def test_folders_of_old_versions_are_removed(base):
    (base / "notes").mkdir(mode=0o700, parents=True)
    base.chmod(0o700)
    for i in range(KEPT + 3):
        os.utime(kernel_folder(f"3.{i}.0", "sm_90")[0], (i, i))
    left = sorted(f.name.split("-")[1] for f in base.iterdir() if f.name != "notes")
    assert left == [f"3.{i}.0" for i in range(3, KEPT + 3)] and (base / "notes").is_dir()


def _open(base: Path) -> None:
    base.mkdir(mode=0o700)
    base.chmod(0o755)


def _link(base: Path) -> None:
    base.with_name("elsewhere").mkdir(mode=0o700)
    base.symlink_to(base.with_name("elsewhere"))


def _replaceable(base: Path) -> None:
    base.mkdir(mode=0o700)
    base.parent.chmod(0o777)


def _not_a_folder(base: Path) -> None:
    base.write_text("")


@pytest.mark.parametrize("spoil", [_open, _link, _replaceable, _not_a_folder])
def test_a_folder_that_others_could_fill_is_not_used(base, spoil):
    spoil(base)
    folder, note = kernel_folder("3.9.0", "sm_90")
    assert base not in folder.parents and base.with_name("elsewhere") not in folder.parents
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not list(folder.iterdir())
    assert "compiled anew" in note and "KVASIR_KERNELS" in note


def test_a_sticky_folder_such_as_tmp_is_safe(base):
    base.parent.chmod(0o1777)
    assert kernel_folder("3.9.0", "sm_90")[0].parent == base


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(base):
    base.mkdir(mode=0o700)
    os.chown(base, 12345, 12345)
    folder, note = kernel_folder("3.9.0", "sm_90")
    assert base not in folder.parents and "another user" in note
