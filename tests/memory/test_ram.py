"""RAM within a container's limits: control groups of both versions, laid out as kernels do, and the host's figures."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
from ballast.commands.doctor import examine
from ballast.memory import manager, ram, simulated
from ballast.memory.accelerator import Accelerator
from ballast.memory.budget import spare_ram_bytes
from ballast.memory.registry import Registry
from ballast.memory.sizes import format_bytes

GB = 2**30
UNLIMITED = 9223372036854771712  # as v1 says it


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for cgroup/ and membership, on a machine of 64 GB with 40 GB free."""
    monkeypatch.setattr(ram, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(ram, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=40 * GB))
    monkeypatch.delitem(sys.modules, "comfy.system_memory", raising=False)
    monkeypatch.setattr(simulated, "_enabled", False)  # by other tests of this process
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def member(tree: Path, *lines: str) -> None:
    (tree / "membership").write_text("\n".join(lines) + "\n")


def v2(tree: Path, group: str, used: int = 0, cache: int = 0, **limits: int | str) -> Path:
    folder = tree / "cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in limits.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile {cache + 7}\ninactive_file {cache}\nactive_file 7\n")
    return folder


def v1(tree: Path, group: str, limit: int, used: int = 0, cache: int = 0) -> Path:
    folder = tree / "cgroup" / "memory" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_cache {cache}\ntotal_inactive_file {cache}\n")
    return folder


def figures() -> tuple[float, float]:
    return ram.total_bytes() / GB, ram.available_bytes() / GB


def test_machine_without_control_groups(tree: Path) -> None:
    assert figures() == (64, 40)
    member(tree, "0::/user.slice/session.scope")
    assert figures() == (64, 40), "nothing is mounted"


def test_container_of_v2_sees_its_own_group_as_the_root(tree: Path) -> None:
    member(tree, "0::/")
    v2(tree, "", used=5 * GB, cache=2 * GB, max=8 * GB, high="max")
    assert figures() == (8, 5)


def test_cache_that_goes_first_is_not_used_and_less_than_nothing_is_nothing(tree: Path) -> None:
    member(tree, "0::/")
    v2(tree, "", used=9 * GB, cache=0, max=8 * GB)
    assert figures() == (8, 0)
    v2(tree, "", used=GB, cache=2 * GB, max=8 * GB)
    assert figures() == (8, 8)


def test_each_group_on_the_way_up_counts(tree: Path) -> None:
    member(tree, "0::/kubepods/pod1/work")
    v2(tree, "kubepods", used=50 * GB, max=60 * GB)
    v2(tree, "kubepods/pod1", used=14 * GB, cache=GB, max=16 * GB)
    v2(tree, "kubepods/pod1/work", used=3 * GB, max=24 * GB)
    v2(tree, "kubepods/pod2", used=GB, max=GB)
    assert figures() == (16, 3)
    v2(tree, "kubepods", used=59 * GB, max=60 * GB)
    assert figures() == (16, 1), "the narrowest and the fullest need not be the same"


def test_lower_of_max_and_high(tree: Path) -> None:
    member(tree, "0::/user.slice")
    v2(tree, "user.slice", used=2 * GB, max="max", high=10 * GB)
    assert figures() == (10, 8)
    v2(tree, "user.slice", used=2 * GB, max=6 * GB, high=10 * GB)
    assert figures() == (6, 4)
    v2(tree, "user.slice", used=2 * GB, max=6 * GB, high=3 * GB)
    assert figures() == (3, 1)


def test_v1_with_a_path_of_the_machine_and_a_mount_of_the_container(tree: Path) -> None:
    member(tree, "11:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc")
    v1(tree, "", limit=12 * GB, used=9 * GB, cache=4 * GB)
    assert figures() == (12, 7)


def test_hybrid_counts_v1_where_v2_has_no_memory(tree: Path) -> None:
    member(tree, "4:hugetlb,memory:/process_api/1", "1:name=systemd:/", "0::/")
    v1(tree, "", limit=UNLIMITED, used=30 * GB)
    v1(tree, "process_api", limit=20 * GB, used=18 * GB, cache=GB)
    v1(tree, "process_api/1", limit=UNLIMITED, used=2 * GB)
    (tree / "cgroup" / "unified").mkdir()
    v2(tree, "", max=GB)  # not where v2 is mounted then
    assert figures() == (20, 3)


def test_no_limit_leaves_the_machine_as_it_is(tree: Path) -> None:
    member(tree, "4:memory:/", "0::/a")
    v1(tree, "", limit=UNLIMITED, used=63 * GB)
    v2(tree, "a", used=63 * GB, max="max", high="max")
    assert figures() == (64, 40)
    v2(tree, "a", used=63 * GB, max=65 * GB)
    assert figures() == (64, 40), "cache that the machine's figure counts as free"


@pytest.mark.parametrize("damage", ["", "no number", "-5", "8.5"])
def test_what_cannot_be_read_sets_no_limit(damage: str, tree: Path) -> None:
    member(tree, "not a line", "0::/../elsewhere", "::", "4:memory:/gone")
    folder = v2(tree, "", used=GB, max=8 * GB)
    (folder / "memory.max").write_text(damage)
    assert figures() == (64, 40)
    (folder / "memory.max").unlink()
    (folder / "memory.max").mkdir()
    assert figures() == (64, 40)
    (tree / "membership").write_bytes(b"\xff\xfe\n0::/\n")
    (folder / "memory.max").rmdir()
    v2(tree, "", max=8 * GB)
    (folder / "memory.current").unlink()
    (folder / "memory.stat").write_text("inactive_file\ninactive_file many\n")
    assert figures() == (8, 8)


def test_figures_of_the_host_come_before_those_of_psutil(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SimpleNamespace(virtual_memory_total=lambda: 32 * GB, virtual_memory_available=lambda: 9 * GB)
    monkeypatch.setitem(sys.modules, "comfy.system_memory", theirs)
    assert figures() == (32, 9)
    member(tree, "0::/")
    v2(tree, "", used=GB, high=8 * GB)
    assert figures() == (8, 7), "which has no eye for memory.high"
    monkeypatch.setitem(sys.modules, "comfy.system_memory", SimpleNamespace())
    assert figures() == (8, 7)


def test_everybody_who_asks_is_told_of_the_limit(tree: Path) -> None:
    member(tree, "0::/")
    v2(tree, "", used=GB, max=4 * GB)
    cpu = Accelerator(torch.device("cpu"))
    assert (cpu.total_bytes(), cpu.free_bytes()) == (4 * GB, 3 * GB)
    assert spare_ram_bytes() == GB
    (found,) = [finding for finding in examine() if finding.what == "RAM"]
    assert not found.ok
    assert found.detail.startswith(f"{format_bytes(3 * GB)} of {format_bytes(4 * GB)}")


def test_memory_of_a_simulated_card_is_no_room_for_weights(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever of it is taken, on whatever device the weights run; a card that is too large is told once."""
    monkeypatch.setattr(ram, "available_bytes", lambda: 18 * GB - sim.stats().allocated_bytes)
    sim.enable(total="4GB")
    budgets = [manager(device).budget for device in ("cpu", "sim")]
    weights = sum(unit.host_bytes for unit in Registry.everyone())
    assert [budget.ram_bytes for budget in budgets] == [12 * GB + weights] * 2
    assert spare_ram_bytes() == 12 * GB
    held = torch.empty(2**20, dtype=torch.uint8, device="sim")
    assert budgets[0].ram_bytes == 12 * GB + weights and spare_ram_bytes() == 12 * GB
    del held
    with manager("sim").stage("sample", []), manager("cpu").stage("sample", []):
        assert not caplog.messages
    sim.enable(total="20GB")
    assert budgets[0].ram_bytes == (16 * GB + weights) - (16 * GB + weights) // 2
    for vram, ram_bytes in ((6 * GB, None), (None, None), (None, None)):
        with manager("sim").stage("sample", [], vram=vram, ram=ram_bytes):
            assert len(caplog.messages) == (vram is None)
    assert "up to 20.0 GB, and weights up to 8.00 GB, of 16.0 GB that can be had" in caplog.text
    sim.enable(total="4GB")
    with manager("sim").stage("sample", [], ram=13 * GB):
        assert "up to 4.00 GB, and weights up to 13.0 GB" in caplog.messages[-1]
