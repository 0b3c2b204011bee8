"""Our units in the list of the host's memory manager: in every version at hand the same, whatever it asks for."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ballast.memory.host import contract as host_contract
from ballast.memory.host import management as host
from ballast.memory.host.flags import HostFlags
from ballast.memory.host.patcher import HostPatcher
from ballast.memory.memory_manager import manager
from ballast.memory.weights.unit import ManagedModel
from ballast.memory.workload import Workload
from host_trees import Blocks, find_trees
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from places import DATA, SUPPORT

MB = 2**20
TREES = find_trees()
Make = Callable[[], tuple[ManagedModel, HostPatcher, torch.Tensor]]
MEMBERS: dict[str, list[str]] = json.loads((DATA / "host_members.json").read_text("utf-8"))


def test_every_member_that_a_known_version_asks_for_is_there() -> None:
    assert set(MEMBERS) == {"0.3.64", "0.8.0", "0.18.2", "0.33.0", "0.38.1"}
    for members in MEMBERS.values():
        assert set(members) <= host_contract.KNOWN_MEMBERS


@pytest.mark.skipif(not TREES, reason="no ComfyUI: name source trees in COMFYUI_TREES")
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_members_are_those_on_record(tree: Path) -> None:
    read = host_contract.members_read((tree / "comfy" / "model_management.py").read_text("utf-8"))
    version = host_contract.version(tree)
    assert sorted(read) == MEMBERS.get(version or "", sorted(read))
    assert host_contract.unknown_members(tree) == set()


@pytest.mark.skipif(not TREES, reason="no ComfyUI: name source trees in COMFYUI_TREES")
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_contract_on_a_tree(tree: Path) -> None:
    script = SUPPORT / "host_trees.py"
    ran = subprocess.run([sys.executable, str(script), str(tree)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "Traceback" not in ran.stderr
    found = json.loads(ran.stdout)
    assert found == json.loads((DATA / "host_contract.json").read_text("utf-8"))


def test_contract_on_record_says_what_is_true() -> None:
    """The numbers that all versions must give are the right ones."""
    steps = json.loads((DATA / "host_contract.json").read_text("utf-8"))
    assert steps.pop("unknown") == []
    for name, step in steps.items():
        assert step["said"] == step["resident"], name
        assert ("HostPatcher" in step["listed"]) == (step["resident"] > 0) or "while it runs" in name, name
        assert step["counted"] - step["resident"] in ((0, 4096) if "while it runs" in name else (0,)), name
        assert step.get("equal", True)
    assert steps["whole"]["resident"] == 6 * MB
    assert steps["native wants room"]["resident"] == 0 < steps["native wants room"]["native"]
    assert steps["whole again"]["resident"] == 6 * MB
    assert steps["some leaves"]["freed"] == 1.5 * MB and steps["some comes back"]["added"] == 1.5 * MB
    assert steps["and it runs on"]["resident"] == 0, "it left as soon as it was done"
    assert steps["the native one alone is evicted"]["native"] == 0
    assert steps["the native one alone is evicted"]["resident"] == 6 * MB


# Random calls


@pytest.fixture
def make_guest(sim: ModuleType) -> Iterator[Make]:
    kept: list[Any] = []

    def make() -> tuple[ManagedModel, HostPatcher, torch.Tensor]:
        kept.clear()
        sim.enable(total=64 * MB)
        manager("sim").limit(vram=5 * MB)
        unit = ManagedModel.from_module("blocks", "transformer", Blocks())
        manager("sim").work.begin(unit, Workload("a"))
        manager("sim").work.took(unit, MB)
        patcher = HostPatcher(manager("sim"), unit, torch.device("sim:0"))
        patcher.target_bytes = 4 * MB
        kept.append((unit, patcher))
        return unit, patcher, torch.ones(4, 512)

    yield make
    manager("sim").limit()


CALLS = st.one_of(
    st.tuples(st.just("partially_unload"), st.integers(0, 8 * MB)),
    st.tuples(st.just("partially_load"), st.one_of(st.integers(-8 * MB, 8 * MB), st.just(1e32), st.just(0.1))),
    st.tuples(st.just("detach"), st.booleans()),
)


def ask(patcher: HostPatcher, call: tuple[str, Any]) -> None:
    name, value = call
    if name == "detach":
        patcher.detach(value)
        return
    before = patcher.loaded_size()
    moved = getattr(patcher, name)(patcher.load_device, value)
    assert moved == (patcher.loaded_size() - before if name == "partially_load" else before - patcher.loaded_size())


@given(
    plan=st.lists(st.tuples(st.integers(0, 25), CALLS, st.booleans()), max_size=8),
    strategy=st.sampled_from(["streamed", "resident"]),
)
@example(  # more room while a group runs in the ring, for which others would leave
    plan=[(7, ("partially_unload", 606940), True), (10, ("partially_load", 1e32), True)], strategy="streamed"
)
@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_calls_during_a_forward(
    make_guest: Make,
    plan: list[tuple[int, tuple[str, Any], bool]],
    strategy: str,
) -> None:
    """Before, inside and after blocks, from this thread or another, in and outside inference mode."""
    unit, patcher, x = make_guest()
    with torch.inference_mode():
        expected = unit.module(x)
    ours = manager("sim")
    moment = iter(range(1000))
    problems: list[BaseException] = []

    def call_of_the_host(call: tuple[str, Any]) -> None:
        try:
            with torch.inference_mode(False):
                ask(patcher, call)
        except BaseException as error:
            problems.append(error)

    def at_this_moment() -> None:
        now = next(moment)
        for when, call, elsewhere in plan:
            if when == now and elsewhere:
                thread = threading.Thread(target=call_of_the_host, args=(call,))
                thread.start()
                thread.join()
            elif when == now:
                call_of_the_host(call)

    forwards = [(block, block.forward) for block in unit.module.blocks]
    for block, forward in forwards:

        def disturbed(*args: Any, forward: Any = forward) -> Any:
            at_this_moment()
            result = forward(*args)
            at_this_moment()
            return result

        block.forward = disturbed
    try:
        for _ in range(2):
            at_this_moment()
            with ours.use(unit, strategy) as module:
                result = module(x.to("sim:0")).cpu()
            assert torch.equal(result, expected)
            gc.collect()
            assert patcher.loaded_size() == ours.accelerator.allocated_bytes()
            assert patcher.loaded_size() == unit.resident_bytes
    finally:
        for block, _ in forwards:
            vars(block).pop("forward", None)
    assert not problems
    patcher.detach()
    assert ours.accelerator.allocated_bytes() == 0 == patcher.loaded_size()


def test_nothing_raises_into_the_host(
    make_guest: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unit, patcher, x = make_guest()
    with manager("sim").use(unit, "resident") as module:
        module(x.to("sim:0"))

    def broken(*_: Any) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(unit.placement), "shrink", broken)
    with caplog.at_level(logging.ERROR, "ballast"):
        assert patcher.partially_unload(torch.device("cpu"), MB) == 0
    assert "partially_unload, which failed" in caplog.text
    del module


# The self-check


class _Mm(ModuleType):
    """As little of a host's memory manager as registration looks at."""

    def __init__(self, source: Path) -> None:
        super().__init__("comfy.model_management")
        self.__file__ = str(source)
        self.current_loaded_models: list[Any] = []
        self.get_torch_device = lambda: torch.device("sim:0")

    def load_models_gpu(self, models: list[Any], memory_required: int = 0) -> None:
        self.current_loaded_models += [SimpleNamespace(model=model, device=model.load_device) for model in models]


def mm_of(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> _Mm:
    file = tmp_path / "comfy" / "model_management.py"
    file.parent.mkdir()
    file.write_text(source, "utf-8")
    mm = _Mm(file)
    vars(mm)["load_models_gpu"] = mm.load_models_gpu
    monkeypatch.setitem(sys.modules, "comfy.model_management", mm)
    return mm


def test_unknown_member_is_said_once_and_nothing_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mm_of(tmp_path, "def f(entry):\n    return entry.model.brand_new_member()\n", monkeypatch)
    with caplog.at_level(logging.WARNING, "ballast"):
        assert not host.lists_units(torch.device("sim:0"))
        assert not host.lists_units(torch.device("sim:0"))
    assert caplog.text.count("brand_new_member, unknown here") == 1


def test_replaced_loader_of_the_host_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mm = mm_of(tmp_path, "x = 1\n", monkeypatch)

    def load_models_gpu(models: list[Any], **_: Any) -> None: ...

    load_models_gpu.__module__ = "custom_nodes.another_pack.distorch"
    vars(mm)["load_models_gpu"] = load_models_gpu
    with caplog.at_level(logging.WARNING, "ballast"):
        assert host.lists_units(torch.device("sim:0"))
    assert "custom_nodes.another_pack.distorch has replaced" in caplog.text


def test_only_the_hosts_own_device_is_in_its_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mm = mm_of(tmp_path, "x = 1\n", monkeypatch)
    assert host.lists_units(torch.device("sim:0"))
    assert not host.lists_units(torch.device("cpu"))
    mm.get_torch_device = lambda: torch.device("cpu")
    assert not host.lists_units(torch.device("cpu"))


def test_a_loader_that_fails_is_not_asked_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make_guest: Make,
) -> None:
    unit, patcher, x = make_guest()
    mm = mm_of(tmp_path, "x = 1\n", monkeypatch)
    asked = []

    def load_models_gpu(models: list[Any], **_: Any) -> None:
        asked.append(models)
        raise AttributeError("no attribute 'something'")

    load_models_gpu.__module__ = mm.__name__
    vars(mm)["load_models_gpu"] = load_models_gpu
    monkeypatch.setattr(mm, "get_free_memory", lambda on: 64 * MB, raising=False)
    monkeypatch.setattr(mm, "extra_reserved_memory", lambda: 0, raising=False)
    monkeypatch.setattr(mm, "throw_exception_if_processing_interrupted", lambda: None, raising=False)
    with caplog.at_level(logging.WARNING, "ballast"):
        for _ in range(2):
            with manager("sim").use(unit, "resident") as module:
                assert module(x.to("sim:0")).isfinite().all()
    assert len(asked) == 1
    assert "does not take other models" in caplog.text


# Flags


@pytest.mark.parametrize(
    ("flags", "role", "wanted", "strategy"),
    [
        (HostFlags(), "transformer", "auto", "auto"),
        (HostFlags(least=True), "transformer", "auto", "streamed"),
        (HostFlags(least=True), "vae", "auto", "auto"),
        (HostFlags(least=True), "transformer", "resident", "resident"),
        (HostFlags(encoders_on_cpu=True), "text_encoder", "auto", "cpu"),
        (HostFlags(encoders_on_cpu=True), "transformer", "auto", "auto"),
        (HostFlags(vae_on_cpu=True), "vae", "auto", "cpu"),
        (HostFlags(vae_on_cpu=True), "text_encoder", "auto", "auto"),
    ],
)
def test_strategy_that_flags_ask_for(flags: HostFlags, role: Any, wanted: str, strategy: str) -> None:
    assert flags.strategy(wanted, role) == strategy


def test_what_flags_keep() -> None:
    assert HostFlags().keeps(True) and not HostFlags().keeps(False)
    assert HostFlags(keeps_all=True).keeps(False)
    assert not HostFlags(keeps_none=True).keeps(True)
