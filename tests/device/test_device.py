import os

import pytest
import torch

from kvasir.device import (
    Device,
    allocated,
    capability,
    detect,
    rounds_float32,
    set_threads,
    synchronize,
    triton_extra,
)
from kvasir.errors import ConfigError
from kvasir.memory import host_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    return path


def group(root, **files) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("memory_", "memory.")).write_text(f"{text}\n")


def test_without_a_control_group_the_machine_counts(tmp_path, meminfo):
    assert host_memory(meminfo, tmp_path / "none") == (1000 << 10, 600 << 10)


def test_a_limit_of_version_2(tmp_path, meminfo):
    root = tmp_path / "cgroup"
    group(root, memory_max=400 << 10, memory_current=300 << 10, memory_stat=f"anon 1\ninactive_file {50 << 10}")
    assert host_memory(meminfo, root) == (400 << 10, 150 << 10)


def test_a_limit_of_version_1(tmp_path, meminfo):
    root = tmp_path / "cgroup"
    group(root / "memory", memory_limit_in_bytes=500 << 10, memory_usage_in_bytes=450 << 10)
    assert host_memory(meminfo, root) == (500 << 10, 50 << 10)


@pytest.mark.parametrize("text", ("max", str(2**63 - 4096), "nonsense", ""))
def test_a_control_group_without_a_limit_has_the_memory_of_the_machine(tmp_path, meminfo, text):
    root = tmp_path / "cgroup"
    group(root, memory_max=text, memory_current=999 << 10)
    assert host_memory(meminfo, root) == (1000 << 10, 600 << 10)


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path, meminfo):
    root = tmp_path / "cgroup"
    group(root, memory_max=100 << 10, memory_current=300 << 10)
    assert host_memory(meminfo, root) == (100 << 10, 0)


def test_the_cpu_of_this_machine():
    device = detect("cpu")
    assert device.kind == "cpu"
    assert device.name and device.threads >= 1
    assert 0 < device.memory_available <= device.memory_total
    assert "GiB" in str(device)
    synchronize(device)
    assert allocated("cpu") == 0


def test_auto_is_something_that_is_there():
    assert detect().kind == ("cuda" if torch.cuda.is_available() else "cpu")


def test_absent_devices_are_refused():
    with pytest.raises(ConfigError, match="'tpu'"):
        detect("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            detect("cuda")


def test_the_number_of_threads_is_set_and_checked():
    before = torch.get_num_threads()
    try:
        set_threads(3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    for count in (0, -1, 1 << 20):
        with pytest.raises(ConfigError, match="threads is"):
            set_threads(count)


def test_a_record_is_a_value():
    assert Device("cpu", "a", 2, 1, 1, 2) == Device("cpu", "a", 2, 1, 1, 2)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity is Linux's")
def test_cores_are_counted_once_for_all_their_hardware_threads(tmp_path):
    allowed = len(os.sched_getaffinity(0))
    for processor in os.sched_getaffinity(0):
        folder = tmp_path / f"devices/system/cpu/cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n")
    assert capability.core_counts(tmp_path) == (1, allowed)
    assert capability.core_counts(tmp_path / "nowhere") == (allowed, allowed)
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert capability.core_counts(tmp_path) == (1, 1)


@pytest.mark.parametrize(
    ("installed", "target", "rounds"),
    [("3.6.0", "sm_100", True), ("3.6.0", "sm_90", False), ("3.9.0", "sm_100", False), ("3.10.0", "sm_103", False)],
)
def test_float32_products_that_an_old_triton_rounds_are_known(monkeypatch, installed, target, rounds):
    monkeypatch.setattr(triton_extra, "version", lambda name: installed)
    assert bool(rounds_float32(target)) == rounds
    assert not rounds or ("TF32" in rounds_float32(target) and installed in rounds_float32(target))
