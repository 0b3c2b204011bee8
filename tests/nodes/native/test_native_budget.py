"""VRAM Budget on ComfyUI's own MODEL: what it sets and puts back, what is held, and that the picture is the same."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import comfy
import comfy.model_management as mm
import pytest
import torch
from ballast.memory.host import headroom as host_headroom
from ballast.memory.host import management as host
from ballast.memory.sizes import format_bytes
from ballast.nodes.budget import VramBudget
from ballast.nodes.native.model_budget import with_budget
from conftest import HOST
from host import page, run_node
from node_runner import native_models

MB = 2**20
TOTAL = 64 * MB
KINDS = ("OUTER_SAMPLE", "PREPARE_SAMPLING", "APPLY_MODEL")
on_host = pytest.mark.host


# Fakes: the patchers and the dynamic VRAM of several versions


class Patcher:
    """What our wrappers ask of a MODEL, as ComfyUI 0.3.64 has it."""

    def __init__(self, held: int = 10 * MB, size: int = 12 * MB) -> None:
        self.load_device, self.offload_device = torch.device("sim:0"), torch.device("cpu")
        self.model = SimpleNamespace(memory_required=lambda shape, **_: shape[0] * 2 * MB, modules=list)
        self.held, self.size, self.unloads, self.patches = held, size, [], {}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}

    def clone(self) -> Patcher:
        made = type(self)(self.held, self.size)
        made.model = self.model
        made.wrappers = {kind: {key: [*each] for key, each in keyed.items()} for kind, keyed in self.wrappers.items()}
        return made

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return self.held

    def model_dtype(self) -> torch.dtype:
        return torch.float16

    def lowvram_patch_counter(self) -> int:
        return 3 if self.patches else 0

    def partially_unload(self, device: Any, memory_to_free: float = 0, **_: Any) -> int:
        self.unloads.append((device, memory_to_free))
        self.held -= int(memory_to_free)
        return int(memory_to_free)


class DynamicPatcher(Patcher):
    """As 0.33.0 and 0.38.1 with dynamic VRAM: weights are in pages of its own."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.model.model_loaded_weight_memory = 0

    def is_dynamic(self) -> bool:
        return True


def run_through(patcher: Any, inner: Callable[[], Any], guidance: float | None = 4.0) -> Any:
    """The wrappers of a patcher around a sampling, as the host calls them."""

    def wrapper(kind: str) -> Any:
        (found,) = patcher.wrappers[kind.lower()].values()
        return found[0]

    def run_model(*_: Any) -> Any:
        return wrapper("APPLY_MODEL")(lambda x: inner(), "x")

    def outer(*args: Any) -> Any:
        shape = [1, 4, 8, 8]
        prepared = wrapper("PREPARE_SAMPLING")(lambda *a, **k: ("model", "conds", []), patcher, shape, {})
        assert prepared == ("model", "conds", [])
        return run_model()

    executor: Any = type("Executor", (), {"__call__": lambda self, *a, **k: outer(*a)})()
    executor.class_obj = SimpleNamespace(model_patcher=patcher, cfg=guidance)
    return wrapper("OUTER_SAMPLE")(executor, "noise")


@pytest.fixture
def fake(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A host whose estimate is 2 MB a picture, with nothing else on its card."""
    sim.enable(total=TOTAL)
    extension: Any = ModuleType("comfy.patcher_extension")
    extension.WrappersMP = type("WrappersMP", (), {kind: kind.lower() for kind in KINDS})
    helpers: Any = ModuleType("comfy.sampler_helpers")
    helpers.get_additional_models = lambda conds, dtype: ([], 0)
    for module in (extension, helpers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(comfy, module.__name__.split(".")[1], module, raising=False)
    monkeypatch.setattr(mm, "get_free_memory", lambda *_: TOTAL)
    monkeypatch.setattr(host, "shrink_others", lambda over, on, running: 0)
    monkeypatch.setattr(host, "loaded_models", list)
    return extension


def lists(monkeypatch: pytest.MonkeyPatch, *patchers: Any) -> None:
    entries = [SimpleNamespace(model=patcher, device=patcher.load_device) for patcher in patchers]
    monkeypatch.setattr(mm, "current_loaded_models", entries)


class Control:
    """The control of the host's dynamic VRAM as comfy-aimdo 0.6 has it."""

    def __init__(self, value: int = MB) -> None:
        self.value, self.written = value, []

    def get_simple_vram_headroom(self) -> int:
        return self.value

    def set_simple_vram_headroom(self, value: int) -> None:
        self.value = value
        self.written.append(value)


def dynamic(monkeypatch: pytest.MonkeyPatch, control: Any) -> None:
    monkeypatch.setitem(sys.modules, "comfy.memory_management", SimpleNamespace(aimdo_enabled=True))
    monkeypatch.setitem(sys.modules, "comfy_aimdo.control", control)


def stop() -> Any:
    raise mm.InterruptProcessingException


def fail() -> Any:
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("patched", [False, True])
def test_what_is_over_the_budget_leaves(patched: bool, fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MB are held and 4 MB are expected for both prompts."""
    said: list[str] = []
    budgeted = with_budget(Patcher(), 8 * MB, said.append)
    budgeted.model.patches = {"weight": [object()]} if patched else {}
    lists(monkeypatch, budgeted.model)
    assert run_through(budgeted.model, lambda: "picture") == "picture"
    assert [device.type for device, _ in budgeted.model.unloads] == ["cpu"] * len(budgeted.model.unloads)
    assert sum(bytes for _, bytes in budgeted.model.unloads) == 6 * MB
    why = "ComfyUI expects 4.00 MB of activations"
    assert len(said) == 1 and f"4.00 MB of 12.0 MB stayed; {why}" in said[0]
    told = "; LoRAs on weights in RAM as ComfyUI computes them: the picture can differ slightly"
    assert said[0].endswith(told) == patched


def test_what_cannot_leave_ends_no_run(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patcher, "partially_unload", lambda *_, **__: 0)
    budgeted = with_budget(Patcher(), 8 * MB, print)
    lists(monkeypatch, budgeted.model)
    assert run_through(budgeted.model, lambda: "picture") == "picture"


def test_other_models_leave_first(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    budgeted, other = with_budget(Patcher(), 8 * MB, print), Patcher(held=5 * MB)

    def shrink(over: int, on: Any, running: Any) -> int:
        asked.append((over, running))
        return other.partially_unload(on, min(max(0, over), other.held))

    monkeypatch.setattr(host, "shrink_others", shrink)
    lists(monkeypatch, budgeted.model, other)
    run_through(budgeted.model, lambda: None, guidance=1.0)  # one prompt, 2 MB
    assert asked == [(9 * MB, [budgeted.model]), (0, [budgeted.model])], "first what was there before"
    assert budgeted.model.unloads == [(torch.device("cpu"), 4 * MB)]


def test_what_fits_stays(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    budgeted = with_budget(Patcher(), 14 * MB, print)
    lists(monkeypatch, budgeted.model)
    run_through(budgeted.model, lambda: None)
    assert budgeted.model.unloads == []


@pytest.mark.parametrize("inner", [lambda: 7, fail, stop], ids=["success", "error", "interrupt"])
def test_headroom_is_set_before_and_put_back_after(
    inner: Callable[[], Any], fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, seen, said = Control(), [], []
    dynamic(monkeypatch, control)
    budgeted = with_budget(DynamicPatcher(), 24 * MB, said.append)
    assert budgeted.summary == "target 24.0 MB of 64.0 MB on sim:0; dynamic VRAM leaves the rest free"
    monkeypatch.setattr(host, "loaded_models", lambda: [SimpleNamespace(patcher=budgeted.model)])

    def look() -> Any:
        seen.append(control.value)
        return inner()

    if inner in (fail, stop):
        with pytest.raises(mm.InterruptProcessingException if inner is stop else torch.OutOfMemoryError):
            run_through(budgeted.model, look)
    else:
        assert run_through(budgeted.model, look) == 7
    assert seen == [TOTAL - 24 * MB] and control.written == [TOTAL - 24 * MB, MB]
    assert budgeted.model.unloads == [], "the host moves the pages by itself"
    assert said == ["peak 10.0 MB of 24.0 MB; 10.0 MB of 12.0 MB stayed"]


def test_larger_headroom_of_the_user_stays(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(60 * MB)
    dynamic(monkeypatch, control)
    budgeted = with_budget(DynamicPatcher(), 24 * MB, print)
    run_through(budgeted.model, lambda: None)
    assert control.written == [60 * MB, 60 * MB]


@pytest.mark.parametrize(("reserve", "before"), [(None, 256 * MB), (2.0, 2 * 2**30)])
def test_library_that_cannot_tell_gets_back_what_the_host_had_set(
    reserve: float | None, before: int, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As comfy-aimdo 0.4 and 0.5 on Windows."""
    control = Control()
    library: Any = ctypes.CDLL(None)  # which has no such name
    library.set_simple_vram_headroom = control.set_simple_vram_headroom
    dynamic(monkeypatch, SimpleNamespace(lib=library))
    monkeypatch.setitem(sys.modules, "comfy.cli_args", SimpleNamespace(args=SimpleNamespace(reserve_vram=reserve)))
    run_through(with_budget(DynamicPatcher(), 24 * MB, print).model, lambda: None)
    assert control.written == [max(before, TOTAL - 24 * MB), before]


def test_real_library_of_this_host() -> None:
    """The library of comfy-aimdo can be asked without a GPU."""
    control = pytest.importorskip("comfy_aimdo.control")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "lib", control.lib)  # and put back as it was
        if control.lib is None and not control.init("cuda"):
            pytest.skip("comfy-aimdo has no library for this system")
        dynamic(patch, control)
        found = host_headroom.headroom()
        assert found is not None
        before = found.read()
        with pytest.raises(KeyError), found.at_least(before + 5 * MB):
            assert found.read() == before + 5 * MB
            raise KeyError
        assert found.read() == before


# What cannot be done


def on_cpu(patcher: Patcher) -> None:
    patcher.load_device = torch.device("cpu")


def test_what_cannot_have_a_budget_goes_on_unchanged(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resting = Patcher()
    on_cpu(resting)
    budgeted = with_budget(resting, MB, print)
    assert budgeted.model is resting and budgeted.summary == (
        "This model runs on the CPU, where there is no VRAM to budget. The model goes on unchanged."
    )
    dynamic(monkeypatch, SimpleNamespace(lib=SimpleNamespace()))
    moving = DynamicPatcher()
    budgeted = with_budget(moving, MB, print)
    assert budgeted.model is moving and "takes no limit while it runs" in budgeted.summary
    del fake.WrappersMP.APPLY_MODEL
    assert "too old" in with_budget(Patcher(), MB, print).summary


def test_last_node_counts(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = with_budget(Patcher(), 14 * MB, print).model
    second = with_budget(first, 8 * MB, print).model
    assert first.wrappers["outer_sample"] != second.wrappers["outer_sample"]
    assert all(len(keyed) == 1 and len(*keyed.values()) == 1 for keyed in second.wrappers.values())
    lists(monkeypatch, second)
    run_through(second, lambda: None)
    assert second.unloads == [(torch.device("cpu"), 6 * MB)]


@on_host
@pytest.mark.skipif(HOST is None, reason="needs the modules of a real ComfyUI")
def test_on_the_cpu_the_node_changes_nothing() -> None:
    unet = native_models().unet()
    output = run_node(VramBudget, model=unet, vram_gb=1.0)
    assert output.result[0] is unet and "runs on the CPU" in output.result[1]
    assert run_node(VramBudget, model=unet, vram_gb=0.0).result == (unet, "no budget")


# On a real ComfyUI in this process, whose device is the simulated card


@pytest.fixture
def made(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A MODEL. What the host expects it to take is what it takes on this card, about."""
    monkeypatch.setattr(mm, "MIN_WEIGHT_MEMORY_RATIO", 0.0)  # as on cards of NVIDIA
    card.enable(total="192MB")
    unet = native_models().unet(ch=64)
    unet.model.memory_usage_factor = 0.127
    yield unet


def conditionings(control: Any = None) -> dict[str, Any]:
    """Two prompts, as CLIP Text Encode and Apply ControlNet hand them on."""
    found = {}
    for seed, name in enumerate(("positive", "negative")):
        prompt = torch.randn(1, 77, native_models().WIDTH, generator=torch.Generator().manual_seed(seed))
        beside: dict[str, Any] = {}
        if control is not None:
            hint = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(7))
            beside = {"control": control.copy().set_cond_hint(hint, 0.9), "control_apply_to_uncond": False}
        found[name] = [[prompt, beside]]
    return found


def sample(
    model: Any,
    control: Any = None,
    size: int | tuple[int, int] = 16,
    sampler: str = "euler",
    batch: int = 1,
    **more: Any,
) -> torch.Tensor:
    """As KSampler does it."""
    import comfy.sample

    latent = torch.zeros(batch, 4, *((size, size) if isinstance(size, int) else size))
    noise = comfy.sample.prepare_noise(latent, 3, None)
    options = {"latent_image": latent, "disable_pbar": True, **conditionings(control), **more}
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, 2, 4.0, sampler, "normal", **options)


def unload() -> None:
    with torch.inference_mode():
        mm.unload_all_models()


def host_as_it_is() -> dict[str, Any]:
    """Everything in the host's modules, and in the classes there, that a pack could replace."""
    found = {}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] in ("comfy", "comfy_extras")]:
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {f"{module.__name__}.{name}.{part}": each for part, each in vars(value).items()}
    return found


def changed(before: dict[str, Any]) -> list[str]:
    """Names that are new, gone, or mean something else. What the host counts in its modules is left out."""
    after = host_as_it_is()
    same = {name for name in before.keys() & after.keys() if after[name] is before[name]}
    counted = {name for name in before.keys() & after.keys() if isinstance(after[name], int | float | None)}
    return sorted((before.keys() | after.keys()) - same - counted)


def functions_on(model: Any) -> list[Any]:
    """Types of what the host has put on weights to compute at each use."""
    parts = [getattr(part, f"{name}_function", []) for part in model.modules() for name in ("weight", "bias")]
    return [type(function).__name__ for part in parts for function in part]


@on_host
def test_picture_is_the_same_and_the_host_too(made: Any, card: ModuleType) -> None:
    control = native_models().control(ch=64)
    plain = sample(made, control)
    before, names = host_as_it_is(), list(made.wrappers)
    assert len(before) > 5000 and "comfy.ops.cast_bias_weight" in before
    for budget in (60, 16, 1):
        unload()
        with page() as shown:
            budgeted = run_node(VramBudget, model=made, vram_gb=budget / 1024).result[0]
            assert torch.equal(sample(budgeted, control), plain), budget
            assert torch.equal(sample(budgeted, control), plain), "and once more, where it is loaded in part"
        assert budgeted is not made and len(shown.texts) == 3
    assert list(made.wrappers) == names
    assert changed(before) == []
    assert torch.equal(sample(made, control), plain)


@on_host
def test_nothing_of_the_host_is_replaced_while_it_samples(made: Any, card: ModuleType) -> None:
    """Looked at from within each call of the model, between the steps, and for its layers and methods too."""
    from comfy.patcher_extension import WrappersMP

    control = native_models().control(ch=64)
    plain, before, looks = sample(made, control), host_as_it_is(), []
    unload()
    own = {name: dict(vars(part)) for name, part in made.model.named_modules()}

    def look(*_: Any) -> None:
        assert changed(before) == []
        assert functions_on(budgeted.model) == []
        for name, part in made.model.named_modules():
            assert [n for n, v in vars(part).items() if callable(v) and v is not own[name].get(n)] == []
        looks.append(made.model.current_patcher)

    def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        look()
        return executor(*args, **kwargs)

    budgeted = run_node(VramBudget, model=made, vram_gb=12 / 1024).result[0]
    before = host_as_it_is()  # the node itself imports more of it
    budgeted.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "look", run)
    budgeted.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "look", run)
    assert torch.equal(sample(budgeted, control, callback=look), plain)
    assert len(looks) >= 6 and set(map(id, looks)) == {id(budgeted)}
    assert vars(budgeted).keys() == vars(made).keys(), "and the clone has nothing of ours in the place of its methods"


@on_host
def test_weights_in_fp8_stay_so(made: Any, card: ModuleType) -> None:
    unet = native_models().unet(ch=64, dtype=torch.float8_e4m3fn)
    unet.model.memory_usage_factor = 0.127
    assert unet.model_size() < made.model_size() / 3
    plain = sample(unet)
    for budget in (12, 1):
        unload()
        budgeted = run_node(VramBudget, model=unet, vram_gb=budget / 1024).result[0]
        assert torch.equal(sample(budgeted), plain)
        assert budgeted.loaded_size() < unet.model_size()


@on_host
@pytest.mark.parametrize("sampler", ["dpmpp_2m_sde", "uni_pc"])
def test_other_samplers_go_on_working(sampler: str, made: Any) -> None:
    plain = sample(made, sampler=sampler)
    budgeted = run_node(VramBudget, model=made, vram_gb=16 / 1024).result[0]
    assert torch.equal(sample(budgeted, sampler=sampler), plain)


@on_host
def test_budget_is_kept_within_one_module(made: Any, card: ModuleType) -> None:
    from ballast.nodes.native.activations import expected

    largest = max(mm.module_size(module) for module in made.model.modules() if not list(module.children()))
    working = expected(made, [1, 4, 16, 16]).both_bytes
    sample(made)
    whole = card.stats().peak_bytes
    assert whole == pytest.approx(made.model_size() + working, rel=0.1), "the expectation is a right one"
    loaded = []
    for budget in range(12, 27, 3):
        unload()
        budgeted = run_node(VramBudget, model=made, vram_gb=budget / 1024).result[0]
        for _ in range(2):
            card.reset_stats()
            with page() as shown:
                sample(budgeted)
            peak = card.stats().peak_bytes
            assert peak <= budget * MB + largest, budget
            assert shown.texts[-1][1].startswith(f"peak {format_bytes(peak)} of {budget}.0 MB; ")
            loaded.append(budgeted.loaded_size())
            assert loaded[-1] >= min(made.model_size(), budget * MB - working) - 4 * largest, "and made use of"
    assert loaded == sorted(loaded) and loaded[-1] > 12 * MB > loaded[0]


@on_host
def test_other_models_make_room_and_the_error_leaves_all_in_order(
    made: Any, card: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sample(made)
    unload()
    clip = native_models().clip()
    with torch.inference_mode():
        mm.load_models_gpu([clip.patcher])
    held = clip.patcher.loaded_size()
    budgeted = run_node(VramBudget, model=made, vram_gb=22 / 1024).result[0]
    assert torch.equal(sample(budgeted), plain)
    assert clip.patcher.loaded_size() < held
    functions = functions_on(made.model)
    for error in (torch.OutOfMemoryError, mm.InterruptProcessingException):

        def stop(*_: Any, error: Any = error) -> None:
            raise error

        with pytest.raises(error):
            sample(budgeted, callback=stop)
        assert functions_on(made.model) == functions, "those of the host"
    assert torch.equal(sample(budgeted), plain) and torch.equal(sample(made), plain)
