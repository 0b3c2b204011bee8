"""Compiled blocks and chosen attention: the same results under any placement, compiled once, and nothing left."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory.engine.engine import Engine
from ballast.memory.weights.groups import CallOrder
from ballast.memory.weights.structure import block_lists
from ballast.pipelines.models.diffusers.diffusers_model import DiffusersModel
from ballast.pipelines.sampling.kernels import check_attention, compiles, kernels
from diffusers.models import attention_dispatch
from selection import few
from streamed_models import WIDTH, Blocks, least_bytes, nbytes, rests, run, streamed_engine
from streamed_models import model as shared_model
from torch import nn

BLOCKS = CallOrder(blocks=True)  # as `compile` wants it
CPU = torch.device("cpu")
Registry = attention_dispatch._AttentionBackendRegistry


class Counting:
    """A compiler that compiles nothing, and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test meets every block for the first time."""
    torch._dynamo.reset()
    active = Registry.get_active_backend()[0]
    yield
    assert Registry.get_active_backend()[0] == active
    torch._dynamo.reset()


def model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny transformer of a family, nobody else's, and the arguments of a call."""
    module, arguments = shared_model(name)
    module = copy.deepcopy(module)
    vars(module).pop("forward", None)
    return module, arguments


def output(module: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    return run(module, **arguments)[0]


def members(module: nn.Module) -> list[nn.Module]:
    return [block for _, blocks in block_lists(module) for block in blocks]


def state(module: nn.Module) -> list[tuple[type, set[str]]]:
    """What would show that something was put in between: classes and names of attributes."""
    return [(type(part), set(vars(part))) for part in module.modules()]


def rows(count: int = 4, width: int = WIDTH) -> torch.Tensor:
    """As tensors within a stage are: others would be a second kind to torch, and compiled for again."""
    with torch.inference_mode():
        return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def placed(module: nn.Module, device: torch.device, share: float = 0.0) -> Engine:
    """Streamed in whole blocks, with so much more than the least."""
    least = least_bytes(module, BLOCKS)
    weights_bytes = least + int(share * (nbytes(module) - least))
    placement = streamed_engine(module, device, weights_bytes, calls=BLOCKS)
    placement.place()
    rests(placement)
    return placement


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ballast"]


# Compiling


@pytest.mark.parametrize("name", few(["flux", "lumina2", "sd3", "wan"], "flux", "wan"))
def test_streamed_blocks_compile_once(name: str) -> None:
    """Wherever in the ring the blocks come, and however many stay: the same results from the same few graphs."""
    module, arguments = model(name)
    expected, before = output(module, arguments), state(module)
    compiler, classes, started = Counting(), {type(block) for block in members(module)}, compiles()
    graphs, streamed = [], []
    for share in (0, 0.5, 1):
        with kernels([module], compile=True, backend=compiler):
            placement = placed(module, CPU, share)
            for _ in range(3):
                torch.testing.assert_close(output(module, arguments), expected, atol=1e-5, rtol=0)
                graphs.append(compiler.graphs)
            streamed.append(placement.layout.copied_bytes)
            placement.remove()
        assert state(module) == before
    assert graphs == [graphs[0]] * 9, "compiled again after the first step"
    assert compiles() - started == graphs[0]
    # At most one more for a class whose blocks differ: in parts, in the length of a prompt.
    assert len(classes) <= graphs[0] <= 2 * len(classes)
    assert streamed[0] > streamed[-1] == 0


@pytest.mark.parametrize("name", few(["wan", "zimage"], "wan"))
def test_a_pipeline_compiles_in_its_first_step(
    name: str, tiny_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, compiler, seen = tiny.FAMILIES[name], Counting(), []
    denoise, compiled = DiffusersModel.denoise, False

    def within(
        self: Any, cond: Any, arguments: Any, on_step: Any, device: Any, modules: Any, answers: Any = None
    ) -> torch.Tensor:
        with kernels(modules.values(), compile=compiled, backend=compiler):
            return denoise(self, cond, arguments, on_step, device, modules, answers)

    monkeypatch.setattr(DiffusersModel, "denoise", within)
    pipe = ballast.open_pipeline(tiny_folders(name), device="cpu")
    cond = pipe.encode("a red boat", "blurry, grey", **family.encode_kwargs)

    def sample() -> torch.Tensor:
        return pipe.sample(
            cond,
            width=family.size[0],
            height=family.size[1],
            steps=3,
            guidance=family.guidance,
            frames=family.frames,
            on_step=lambda *_: seen.append(compiler.graphs),
            **family.call_kwargs,
        )

    expected = sample()
    assert seen == [0, 0, 0]
    compiled = True
    for _ in range(2):
        torch.testing.assert_close(sample(), expected, atol=1e-5, rtol=0)
    assert seen[3] > 0
    assert len(set(seen[3:])) == 1


def test_other_sizes_compile_once_more() -> None:
    module, compiler, graphs = Blocks(4), Counting(), []
    with kernels([module], compile=True, backend=compiler):
        for count in (4, 5, 6, 4, 7):
            run(module, rows(count))
            graphs.append(compiler.graphs)
    assert graphs == [1, 2, 2, 2, 2]


@pytest.mark.long
def test_inductor_compiles_streamed_blocks_or_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Blocks(5), rows()
    expected, started = run(module, x), compiles()
    with kernels([module], compile=True):
        placement = placed(module, CPU)
        for _ in range(3):
            torch.testing.assert_close(run(module, x), expected, atol=1e-5, rtol=0)
        placement.remove()
    assert [compiles() - started, len(lines(caplog))] in ([1, 0], [0, 1])


def test_nothing_compiled_keeps_weights() -> None:
    module, arguments = model("wan")
    with kernels([module], compile=True, backend=Counting()):
        placement = placed(module, CPU)
        output(module, arguments)
        assert placement._ring is not None
        views = [view for place in placement._ring.slots for *_, view in place._views or ()]
        kept = [weakref.ref(tensor) for tensor in (*views, *(place.memory for place in placement._ring.slots))]
        placement.remove()
    kept += [weakref.ref(block) for block in members(module)]
    del views, placement, module
    gc.collect()
    assert len(kept) > 10
    assert not any(ref() is not None for ref in kept)


# Where it does not compile


def test_a_compiler_that_fails_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    module, arguments = model("wan")
    expected, before, asked = output(module, arguments), state(module), []

    def broken(graph: Any, _: Any) -> Any:
        asked.append(graph)
        raise OSError("no compiler\non this machine")

    for _ in range(2):
        with kernels([module], compile=True, backend=broken):
            for _ in range(2):
                assert torch.equal(output(module, arguments), expected)
    assert len(asked) == len(lines(caplog)) == 1
    assert "WanTransformerBlock runs uncompiled" in lines(caplog)[0]
    assert "no compiler on this machine" in lines(caplog)[0]
    assert state(module) == before


def test_running_out_of_memory_is_no_failure_of_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """It goes to the ladder, and the block is compiled still."""
    module, compiler, short = Blocks(3), Counting(), [True]

    def compiled(graph: Any, inputs: Any) -> Any:
        forward = compiler(graph, inputs)

        def call(*args: Any) -> Any:
            if short:
                raise torch.OutOfMemoryError("out of memory")
            return forward(*args)

        return call

    x = rows()
    with kernels([module], compile=True, backend=compiled):
        with pytest.raises(torch.OutOfMemoryError):
            run(module, x)
        short.clear()
        result = run(module, x)
    assert torch.equal(result, run(module, x))
    assert compiler.graphs == 1
    assert not lines(caplog)


def test_what_a_model_raises_itself_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    module, before = Blocks(2), state(Blocks(2))
    with pytest.raises(RuntimeError, match="shape"), kernels([module], compile=True, backend=Counting()):
        run(module, rows(width=WIDTH + 1))
    assert not lines(caplog)
    assert state(module) == before


def test_a_device_unknown_to_torch_compile_runs_as_it_is(
    sim: ModuleType, tiny_folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    module, arguments = model("wan")
    expected, compiler = output(module, arguments), Counting()
    moved = {key: value.to("sim") if torch.is_tensor(value) else value for key, value in arguments.items()}
    with kernels([module], compile=True, backend=compiler):
        placement = placed(module, torch.device("sim:0"))
        for _ in range(2):
            torch.testing.assert_close(output(module, moved).cpu(), expected, atol=1e-5, rtol=0)
        placement.remove()
    assert [compiler.graphs, len(lines(caplog))] == [0, 1]
    assert "no device sim" in lines(caplog)[0]


# What is left


def test_all_is_restored_after_an_error() -> None:
    module, _ = model("flux")
    before, backends = state(module), [p._attention_backend for p in module.attn_processors.values()]
    with pytest.raises(KeyError), kernels([module], compile=True, attention="native", backend=Counting()):
        assert state(module) != before
        raise KeyError
    assert state(module) == before
    assert [p._attention_backend for p in module.attn_processors.values()] == backends


def test_a_placement_may_outlive_it_and_be_used_again() -> None:
    """As a transformer that is kept between runs: compiled in those that ask for it."""
    module, compiler, x = Blocks(4), Counting(), rows()
    expected, before = run(module, x), state(module)
    with kernels([module], compile=True, backend=compiler):
        placement = placed(module, CPU)
        assert torch.equal(run(module, x), expected)
    assert compiler.graphs == 1
    torch._dynamo.reset()
    assert torch.equal(run(module, x), expected)
    assert compiler.graphs == 1, "compiled though nobody asked"
    with kernels([module], compile=True, backend=compiler):
        assert torch.equal(run(module, x), expected)
    assert compiler.graphs == 2
    placement.remove()
    assert state(module) == before


def test_a_kept_transformer_is_divided_anew_for_compiled_blocks(
    sim: ModuleType, tiny_folders: Callable[[str], Path]
) -> None:
    """Its gates lie around the blocks then, which call what was compiled; else around what is inside them."""
    family = tiny.FAMILIES["wan"]
    pipe = ballast.open_pipeline(tiny_folders("wan"), device="sim", keep=True)
    cond = pipe.encode("a red boat", "blurry, grey", **family.encode_kwargs)
    size = {"width": family.size[0], "height": family.size[1], "frames": family.frames, **family.call_kwargs}
    made, gates = [], []
    for compile in (False, True, True, False):
        made.append(pipe.sample(cond, **size, steps=2, strategy="streamed", compile=compile))
        placement = pipe.denoisers[0].placement
        assert placement is not None
        paths = {owner.path for group in placement._groups for owner in group.owners}
        gates.append(len([path for path in paths if path.startswith("blocks.")]))
    count = len(pipe.denoisers[0].module.blocks)
    assert gates[1] == gates[2] == count < gates[0] == gates[3]
    assert all(torch.equal(latents, made[0]) for latents in made)
    pipe.manager.free()


# Attention


def test_attention_is_used_and_restored() -> None:
    module, arguments = model("flux")
    expected, processors = output(module, arguments), list(module.attn_processors.values())
    processors[0]._attention_backend = "native"  # somebody's own choice
    before = [dict(vars(processor)) for processor in processors]
    called = []
    math = Registry._backends["_native_math"]

    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return math(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Registry._backends, "_native_math", watched)
        with kernels([module], attention="_native_math"):
            torch.testing.assert_close(output(module, arguments), expected, atol=1e-5, rtol=0)
        assert len(called) == len(processors)
        output(module, arguments)
    assert len(called) == len(processors)
    assert [dict(vars(processor)) for processor in processors] == before


def test_compiled_blocks_follow_the_attention() -> None:
    module, arguments = model("wan")
    expected, compiler, graphs = output(module, arguments), Counting(), []
    for attention in ("auto", "_native_math", "auto", "_native_math"):
        with kernels([module], compile=True, attention=attention, backend=compiler):
            torch.testing.assert_close(output(module, arguments), expected, atol=1e-5, rtol=0)
        graphs.append(compiler.graphs)
    assert graphs == [1, 2, 2, 2]


def test_auto_and_uncompiled_touch_nothing() -> None:
    module, _ = model("flux")
    before = state(module)
    with kernels([module]):
        assert state(module) == before
    check_attention("auto")


def test_an_unknown_attention_is_refused_with_the_known() -> None:
    with pytest.raises(ValueError, match="unknown attention 'fast'. Use auto, .*native, .*xformers") as caught:
        check_attention("fast")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "flag", "package"),
    [
        ("flash", "_CAN_USE_FLASH_ATTN", "flash-attn"),
        ("sage", "_CAN_USE_SAGE_ATTN", "sageattention"),
        ("xformers", "_CAN_USE_XFORMERS_ATTN", "xformers"),
    ],
)
def test_a_missing_package_is_named(name: str, flag: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_dispatch, flag, False)
    with pytest.raises(ImportError, match=f"attention '{name}' cannot be used here: .*{package}") as caught:
        check_attention(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lumina2", "sd3", "hidream"])
def test_a_model_with_attention_of_its_own_is_named(name: str) -> None:
    module, _ = model(name)
    before = state(module)
    with pytest.raises(ValueError, match=f"{type(module).__name__} takes no attention but its own, .*Use 'auto'"):
        kernels([module], compile=True, attention="native").__enter__()
    assert state(module) == before
    flux, _ = model("flux")
    check_attention("native", [module, flux])  # one that takes it is enough
