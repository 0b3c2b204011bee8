"""The proof that stages end as the stock call does: what echoes hear, what is refused, and what is kept."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from ballast.pipelines.equivalence import comparison as rehearsal
from ballast.pipelines.equivalence import verdicts as proof
from ballast.pipelines.equivalence.fingerprints import Echo
from diffusers.pipelines.ltx2.image_processor import LTX2VideoHDRProcessor
from diffusers.pipelines.wan import pipeline_wan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Folders = Callable[[str], Path]


class Small(nn.Module):
    """Answers with a tensor, and counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layer = nn.Linear(4, 6)

    def forward(self, tensor: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(tensor)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.layer(latents).tanh()


def echo() -> Echo:
    return Echo(Small, {}, ("decode",))


@given(st.integers(0, 11), st.floats(0.01, 5), st.booleans())
@settings(max_examples=40)
def test_an_echo_hears_every_value(place: int, by: float, second: bool) -> None:
    given_one, given_two = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(0, 2, 12).view(3, 4)
    one = echo()
    before = one.face(given_one, given_two)
    changed = (given_two if second else given_one).clone()
    changed.view(-1)[place] += by
    after = one.face(given_one, changed) if second else one.face(changed, given_two)
    assert before.shape == after.shape == (3, 6)
    assert not torch.allclose(before, after, atol=1e-6)
    assert torch.equal(before, one.face(given_one, given_two))
    assert torch.equal(before, echo().face(given_one, given_two)), "another echo answers alike"


def test_an_echo_hears_plain_values() -> None:
    """The loop of LTX-2 hands a module the side on which its tokenizer pads."""

    class Sided(Small):
        def forward(self, tensor: torch.Tensor, side: str = "left", scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
            return self.layer(tensor)

    one, tensor = Echo(Sided, {}), torch.ones(3, 4)
    made = [one.face(tensor, **more) for more in ({}, {"side": "right"}, {"side": "left"}, {"scale": 2.0})]
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in zip(made, made[1:], strict=False))
    assert len({heard for _, heard in one.calls}) == 4


def test_an_echo_hears_what_changes_places() -> None:
    one, tensor = echo(), torch.randn(3, 4)
    assert not torch.allclose(one.face(tensor), one.face(tensor.flip(0)), atol=1e-4)
    assert not torch.allclose(one.face(tensor, tensor + 1), one.face(tensor + 1, tensor), atol=1e-4)


def test_an_echo_calls_the_hooks_of_modules_in_it() -> None:
    """JoyImage takes the words that it draws from a hook in its text encoder. What is hooked follows from all given."""
    one, heard = echo(), []
    hooks = [
        one.face.layer.register_forward_hook(lambda module, args, made: heard.append(made)),
        one.face.layer.register_forward_hook(lambda module, args, more, made: heard.append(made), with_kwargs=True),
    ]
    tensor = torch.ones(2, 3, 4)
    made = one.face(tensor)
    assert [each.shape for each in heard] == [(2, 3, 6)] * 2 and torch.equal(*heard)
    assert not torch.equal(heard[0], made)
    before = heard.pop()
    one.face(tensor, tensor)
    assert not torch.allclose(heard[-1], before, atol=1e-4)
    for hook in hooks:
        hook.remove()
    heard.clear()
    assert torch.equal(one.face(tensor), made) and not heard
    given: list[torch.Tensor] = []
    hook = one.face.layer.register_forward_hook(lambda module, args, made: given.extend(args) or made + 1)
    changed = one.face(tensor)  # as Qwen-Image 2.1 takes the last norm's input for its output
    assert not torch.allclose(changed, made, atol=1e-4) and [each.shape for each in given] == [(2, 3, 4)]
    hook.remove()
    one.face.layer.register_forward_hook(lambda module, args, made: made[:1])
    with pytest.raises(RuntimeError, match="a hook changes what a module gives"):
        one.face(tensor)


def test_large_results_take_no_memory_and_are_heard() -> None:
    """Such as the logits of a text encoder, 600 MB for Flux.2 Klein's, which its pipeline does not read."""

    class Large(Small):
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.layer(tensor)[:, :1].expand(-1, 2**30)

    large = Echo(Large, {})
    one, other = large.face(torch.zeros(2, 4)), large.face(torch.ones(2, 4))
    assert one.shape == (2, 2**30) and one.untyped_storage().nbytes() < 100
    assert one[0, 0] != other[0, 0]


def test_large_tensors_are_heard() -> None:
    one, tensor = echo(), torch.zeros(2**23, 4)
    before = one.face(tensor)
    tensor[5, 2] = 1
    assert not torch.equal(before[:1], one.face(tensor)[:1])


class Sines(TorchDispatchMode):
    """Counts the values that sines are made of."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.sin:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_long_texts_are_heard_and_answered_at_little_cost() -> None:
    """As of Qwen-Image-Edit, which reads a picture of 1337 tokens, and answers with each of 28 layers."""
    tensor = torch.rand(60_000, 4, generator=torch.Generator().manual_seed(0))
    with Sines() as sines:
        made = echo().face(tensor)
    assert made.shape == (60_000, 6) and sines.count < 500_000
    assert len(made.unique()) > 300_000 and made.abs().max() <= 1, "values of its own everywhere"
    for change in (tensor.roll(2**14, 0), torch.cat([tensor[:-1], tensor[-1:] + 0.5])):  # 2 ** 16 values make a row
        assert not torch.allclose(echo().face(change), made, atol=1e-6)


def test_rounding_hardly_changes_an_echo() -> None:
    one, tensor = echo(), torch.randn(3, 4)
    torch.testing.assert_close(one.face(tensor * (1 + 1e-7)), one.face(tensor), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_an_echo_has_the_shapes_of_its_module(name: str, tiny_folders: Folders) -> None:
    """Recorded from a stock run with the real modules: each result of each, by an echo of it."""
    pipe = ballast.open_pipeline(tiny_folders(name), device="cpu")
    calls: list[tuple[str, Any, Any, Any]] = []
    load = diffusers.DiffusionPipeline.from_pretrained

    def loaded(*args: Any, **kwargs: Any) -> Any:
        made = load(*args, **kwargs)
        for part, module in made.components.items():
            if isinstance(module, nn.Module) and part != "vae":
                hook = lambda _, args, kwargs, result, part=part: calls.append((part, args, kwargs, result))  # noqa: E731
                module.register_forward_hook(hook, with_kwargs=True)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.DiffusionPipeline, "from_pretrained", loaded)
        tiny.stock(tiny_folders(name))
    assert calls
    echoes = proof.echoes_of(list(pipe.model.parts.units.values()), {})
    for part, args, kwargs, result in calls:
        with torch.inference_mode():
            made = echoes[part].face(*args, **kwargs)
        assert type(made) is type(result)
        for mine, real in zip(tensors(made), tensors(result), strict=True):
            assert (mine.shape, mine.dtype) == (real.shape, real.dtype)


def tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def verdict(stock: Callable[[Any], torch.Tensor], staged: Callable[[Any], torch.Tensor]) -> proof.Verdict:
    return proof.compare(stock, staged, {"vae": echo(), "transformer": echo(), "vocoder": echo()})


def picture(modules: Any) -> torch.Tensor:
    return modules["vae"].decode(modules["transformer"](torch.ones(1, 2, 3, 4))[..., :4])[..., :3]


def test_equal_ways_are_equal() -> None:
    assert verdict(picture, picture) == proof.Verdict()


WAYS: dict[str, tuple[Callable[[Any], torch.Tensor], str]] = {
    "decodes twice": (lambda m: (m["vae"].decode(torch.ones(4)), picture(m))[1], "its vae is called 2 times, and 1"),
    "a step more": (lambda m: (m["transformer"](torch.ones(4)), picture(m))[1], "its transformer is called 2 times"),
    "other values": (
        lambda m: m["vae"].decode(m["transformer"](torch.zeros(1, 2, 3, 4))[..., :4])[..., :3],
        "its transformer gets other values",
    ),
    "other latents": (
        lambda m: m["vae"].decode(m["transformer"](torch.ones(1, 2, 3, 4))[..., :4] * 0.5)[..., :3],
        "its vae gets other values",
    ),
    "another size": (lambda m: picture(m).repeat(1, 2, 1, 1), "its call returns 4 x 3, and its VAE decodes 2 x 3"),
    "brighter": (lambda m: picture(m) + 0.01, "its call changes what its VAE decodes"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_differs_is_named(way: str) -> None:
    stock, words = WAYS[way]
    assert verdict(stock, picture).differs.startswith(words)


def two(modules: Any) -> torch.Tensor:
    return torch.cat([picture(modules), picture(modules) * 0.5])


@pytest.mark.parametrize("tail", proof.TAILS)
def test_what_a_call_does_with_what_was_decoded_is_found(tail: str) -> None:
    way = two if tail == "second of two" else picture
    assert verdict(lambda modules: proof.TAILS[tail](way(modules)), way) == proof.Verdict(tail=tail)


def test_linear_light_is_that_of_diffusers() -> None:
    images = torch.linspace(0, 1, 1000)
    linear = proof.TAILS["linear light"](images)
    torch.testing.assert_close(linear, LTX2VideoHDRProcessor._logc3_decompress(images))
    assert 50 < linear[-1] < 60


def test_the_second_of_each_two_is_kept() -> None:
    assert proof.TAILS["second of two"](torch.arange(4)).tolist() == [1, 3]


def test_pictures_are_found_in_what_a_call_returns() -> None:
    """Channels first or last, and in a list those of each prompt."""
    first = torch.rand(2, 3, 8, 16)
    last = first.movedim(1, -1)
    layers = diffusers.pipelines.ImagePipelineOutput(images=[first[:1], first[1:]])
    for made in ((first,), (last,), {"frames": first}, layers):
        assert torch.equal(rehearsal._pictures_of(made), last)


def test_what_makes_no_picture_is_left_out() -> None:
    def with_sound(modules: Any) -> torch.Tensor:
        made = picture(modules)
        modules["vocoder"](torch.ones(4))
        return made

    assert verdict(with_sound, picture) == proof.Verdict(left_out=("vocoder",))


def test_a_pipeline_is_proved_once(tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is kept for other processes; a damaged file, or another version of a library, is proved again."""
    rehearsed: list[str] = []

    def counted(pipe: Any, texts: Any, options: Any) -> proof.Verdict:
        rehearsed.append(pipe.name)
        return rehearsal.rehearse(pipe, texts, options)

    monkeypatch.setattr("ballast.pipelines.equivalence.check.rehearse", counted)

    def opened() -> int:
        monkeypatch.setattr(proof, "_known", type(proof._known)())
        before = len(rehearsed)
        ballast.open_pipeline(tiny_folders("ltx"), device="cpu", cache_dir=tmp_path)
        return len(rehearsed) - before

    assert [opened(), opened()] == [1, 0]
    (kept,) = (tmp_path / "proofs").glob("*.json")
    for damage in ("", "{", "[]", json.dumps({"differs": 5, "negative": None, "left_out": []})):
        kept.write_text(damage)
        assert opened() == 1
    monkeypatch.setattr(diffusers, "__version__", "99.0")
    assert [opened(), opened()] == [1, 0]


def test_a_failed_proof_is_not_kept(tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(pipe: Any, texts: Any, options: Any) -> proof.Verdict:
        raise RuntimeError("no memory for that\nat all")

    monkeypatch.setattr(proof, "_known", type(proof._known)())
    with monkeypatch.context() as patch:
        patch.setattr("ballast.pipelines.equivalence.check.rehearse", failing)
        with pytest.raises(
            ValueError, match=r"cannot be staged: it cannot be compared .*\(no memory for that at all\)"
        ):
            ballast.open_pipeline(tiny_folders("ltx"), device="cpu", cache_dir=tmp_path)
    ballast.open_pipeline(tiny_folders("ltx"), device="cpu", cache_dir=tmp_path)


def test_a_package_that_diffusers_lacks_is_named(
    tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wan's prompts are cleaned by ftfy, which diffusers imports where it is."""
    monkeypatch.delattr(pipeline_wan, "ftfy")
    monkeypatch.setattr(proof, "_known", OrderedDict())
    with pytest.raises(ImportError, match="WanPipeline needs the package ftfy: pip install ftfy."):
        ballast.open_pipeline(tiny_folders("wan"), device="cpu", cache_dir=tmp_path)
