"""A structure is built once: its copies are what the constructor makes, and share nothing that runs may change."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.bench.downloads import published_folders
from ballast.pipelines.files import built
from ballast.pipelines.files.components import Component, read_components, read_model_index
from tiny import FAMILIES
from torch import nn

Folders = Callable[[str], Path]
_NOT_ENTERED = (type, types.ModuleType, types.FrameType, torch.Tensor)


@pytest.fixture(autouse=True)
def _nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built, "_built", type(built._built)())


def modules_of(folder: Path) -> Iterator[Component]:
    for component in read_components(folder, read_model_index(folder), None).values():
        if component.is_module:
            yield component


def reachable(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that anything in `root` leads to: attributes, hooks, closures."""
    seen, ahead = {id(root)}, [root]
    while ahead:
        here = ahead.pop()
        if isinstance(here, nn.Module):
            yield here
        entered = here.__closure__ or () if isinstance(here, types.FunctionType) else gc.get_referents(here)
        for each in entered:
            if id(each) not in seen and not isinstance(each, _NOT_ENTERED):
                seen.add(id(each))
                ahead.append(each)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = dict(found.named_modules()), dict(expected.named_modules())
    assert list(ours) == list(theirs)
    for path, module in theirs.items():
        assert type(ours[path]) is type(module) and vars(ours[path]).keys() == vars(module).keys(), path
        assert ours[path]._non_persistent_buffers_set == module._non_persistent_buffers_set
    for one, other in (
        (found.named_parameters(remove_duplicate=False), expected.named_parameters(remove_duplicate=False)),
        (found.named_buffers(remove_duplicate=False), expected.named_buffers(remove_duplicate=False)),
    ):
        for (name, tensor), (same, wanted) in zip(one, other, strict=True):
            assert name == same and tensor.dtype == wanted.dtype and tensor.device == wanted.device, name
            assert (tensor.shape, tensor.stride()) == (wanted.shape, wanted.stride()), name
            assert vars(tensor).keys() == vars(wanted).keys() and type(tensor) is type(wanted), name
            assert tensor.is_meta or torch.equal(tensor, wanted), name
    assert ties(found) == ties(expected)


def ties(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def assert_is_copied(component: Component) -> None:
    first, second = component._build(), component._build()
    assert built._built, "it is kept"
    fresh = component._construct()
    assert_same(second, fresh)
    assert not {*map(id, reachable(second))} & {*map(id, reachable(first))}
    tensors = {id(each) for each in (*first.parameters(), *first.buffers()) if each.nbytes < 2**20 or each.is_meta}
    assert not tensors & {id(each) for each in (*second.parameters(), *second.buffers())}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_is_what_the_constructor_makes(family: str, tiny_folders: Folders) -> None:
    for component in modules_of(tiny_folders(family)):
        built._built.clear()
        assert_is_copied(component)


@pytest.mark.long
@pytest.mark.parametrize("model", ["stable-diffusion-3.5", "Qwen-Image-Edit-2511", "Wan2.1-I2V-480P"])
def test_a_copy_is_what_the_constructor_makes_at_published_size(model: str, tmp_path: Path) -> None:
    for component in modules_of(published_folders.build(model, tmp_path / "model")):
        built._built.clear()
        assert_is_copied(component)


def test_a_copy_computes_what_its_original_computes(tiny_folders: Folders) -> None:
    folder = tiny_folders("flux")
    expected, found = (ballast.open_pipeline(folder, device="cpu") for _ in range(2))
    size: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 0}
    pictures = [pipe.decode(pipe.sample(pipe.encode("a lighthouse"), **size)) for pipe in (expected, found)]
    assert torch.equal(*pictures)


def with_table(rows: int = 2**19) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Module())
    module[1].register_buffer("table", torch.arange(rows, dtype=torch.float32))
    return module


def test_a_table_is_shared_while_a_module_holds_it_and_then_made_again() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(with_table())
        return made[-1]

    first = built.built("key", build)
    second = built.built("key", build)
    assert len(made) == 1 and second[1].table is first[1].table
    assert second[0].weight is not first[0].weight
    held = weakref.ref(first[1].table)
    made.clear()
    del first, second
    gc.collect()
    assert held() is None, "what is kept for copies holds no table"
    assert torch.equal(built.built("key", build)[1].table, with_table()[1].table) and len(made) == 1


def test_a_change_of_one_reaches_no_other() -> None:
    first = built.built("key", lambda: with_table(8))
    first[1].table.zero_()
    first[0].marked = True
    with torch.no_grad():
        first[0].weight.zero_()
    second, fresh = built.built("key", lambda: pytest.fail("built again")), with_table(8)
    assert torch.equal(second[1].table, fresh[1].table) and not hasattr(second[0], "marked")
    assert second[0].weight.abs().max() > 0


def closed_over(module: nn.Module) -> Callable[..., Any]:
    return lambda *_: module


@pytest.mark.parametrize(
    "hold",
    [
        lambda module: setattr(module, "root", closed_over(module)),
        lambda module: setattr(module[1], "all", [closed_over(module)]),
        lambda module: setattr(module[1], "root", weakref.ref(module)),
        lambda module: setattr(module[1], "root", functools.partial(closed_over(module))),
        lambda module: module[0].register_forward_hook(closed_over(module)),
        lambda module: torch.nn.utils.weight_norm(module[0]),  # of MiniMax-H3's sound: a tensor made of its weights
    ],
)
def test_what_leads_back_to_its_module_is_built_each_time(hold: Callable[[nn.Module], Any]) -> None:
    def build() -> nn.Module:
        module = with_table(8)
        hold(module)
        return module

    assert not built.can_be_copied(build())
    assert built.built("key", build) is not built.built("key", build) and not built._built


def test_a_method_of_a_copy_is_its_own() -> None:
    def build() -> nn.Module:
        module = with_table(8)
        module[1].call = functools.partial(module[0].forward)
        module[1].method = module[0].forward
        return module

    _, second = built.built("key", build), built.built("key", build)
    assert second[1].call.func.__self__ is second[0] and second[1].method.__self__ is second[0]


def test_few_are_kept() -> None:
    for key in range(2 * built._MOST):
        built.built(key, lambda: with_table(8))
    assert list(built._built) == list(range(built._MOST, 2 * built._MOST))
