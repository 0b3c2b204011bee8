"""Draw one picture on several cards: each process has its share of the tokens, by diffusers' context parallelism.

The tokens of a call are split between the processes of torch.distributed's group, each of which streams all weights to
its own card. In attention (Ulysses) every process has all tokens of its share of the heads. What a transformer returns
is put together again in all of them, so that their loops go on alike.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..encoding.conditioning import Conditioning
from .kernels import AUTO

# Transformers of diffusers that tests have shown to give what one process gives.
PROVED = (
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel",
)  # fmt: skip
_CONFIG = "_parallel_config"  # of an attention processor
_MASK = "encoder_hidden_states_mask"


def check_cards(cards: int, modules: Mapping[str, Any], *, compile: bool = False, attention: str = AUTO) -> None:
    """Raise ValueError, in one line, for what cannot be drawn on so many cards."""
    if cards == 1:
        return
    if cards < 1:
        raise ValueError(f"cards is {cards}; it takes at least 1.")
    if compile:
        raise ValueError("compiled blocks run on one card only. Leave compile or cards out.")
    for name, module in modules.items():
        cls = type(module)
        if cls.__name__ not in PROVED or not cls.__module__.startswith("diffusers."):
            known = ", ".join(PROVED)
            raise ValueError(f"{name}, a {cls.__name__}, runs on one card only; {known} run on several. Use 1 card.")
        heads = module.config.num_attention_heads
        more = -heads % cards  # heads of nothing, which the last card gets
        if more and more >= (heads + more) // cards:
            raise ValueError(f"{name} has {heads} attention heads, which {cards} cards cannot share. Use fewer cards.")
    _check_attention(attention)
    from diffusers.models import _modeling_parallel as parallel

    if "ulysses_anything" not in parallel.ContextParallelConfig.__dataclass_fields__:
        raise ImportError("this diffusers is too old for several cards. Run pip install -U diffusers, or use 1 card.")


def _check_attention(attention: str) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    supported = getattr(Registry, "_supports_context_parallel", ())
    backend = Registry.get_active_backend()[0] if attention == AUTO else AttentionBackendName(attention)
    if backend.value not in supported:
        names = ", ".join(sorted(name for name in supported if not name.endswith("_hub")))
        raise ValueError(f"attention {backend.value!r} runs on one card only. On several use {names}.")


def check_group(cards: int) -> None:
    """Raise ValueError where this process is not one of so many in torch.distributed's group."""
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    size = torch.distributed.get_world_size() if here else 1
    if size != cards:
        raise ValueError(
            f"cards is {cards}, and {size} {'process draws' if size == 1 else 'processes draw'}. Start one for each "
            "card, as `ballast generate --cards` and torchrun do, and let it join torch.distributed's group."
        )


def same_everywhere(cond: Conditioning) -> Conditioning:
    """Send the conditioning of the first process to all. Theirs must have its shapes."""
    copy = cond.copy()
    for _, value in sorted(copy.tensors.items()):  # of a cache they come in another order
        for tensor in value if isinstance(value, list) else [value]:
            torch.distributed.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor, 0)
    return dataclasses.replace(copy, pictures=cond.pictures)


@contextmanager
def shared(modules: Iterable[Any], cards: int) -> Iterator[None]:
    """Share the calls of these modules among the processes of the group, until the block ends.

    For what `check_cards` and `check_group` let pass. With one card nothing changes.
    """
    if cards == 1:
        yield
        return
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    modules = list(modules)
    # Of any length: that of a prompt is seldom a multiple of the cards.
    split = ContextParallelConfig(ulysses_degree=cards, ulysses_anything=True)
    config = ParallelConfig(context_parallel_config=split)
    device = torch.device(_mesh_device())
    config.setup(torch.distributed.get_rank(), cards, device, mesh=_mesh(device.type, torch.distributed.group.WORLD))
    with ExitStack() as exits:
        for module in modules:
            _set_config(module, config, exits)
            for path, plan in module._cp_plan.items():
                _hook(module, path, plan, split, cards, exits)
        yield


def _set_config(module: nn.Module, config: Any, exits: ExitStack) -> None:
    """Tell a module's attention that it has a share of the tokens."""
    for processor in filter(None, (getattr(part, "processor", None) for part in module.modules())):
        if not hasattr(processor, _CONFIG):
            raise ValueError(f"{type(processor).__name__} computes attention on one card only. Use 1 card.")
        own = vars(processor)
        own[_CONFIG] = config
        exits.callback(own.pop, _CONFIG, None)


def _hook(module: nn.Module, path: str, plan: Any, split: Any, cards: int, exits: ExitStack) -> None:
    """Split what the modules of that path take or give, or gather what they give, as the plan says.

    By torch's hooks: those of diffusers replace `forward`, which placements do as well, in an order of their own.
    """
    from diffusers.hooks.context_parallel import ContextParallelSplitHook

    pattern = re.compile(re.escape(path).replace(r"\*", r"[^.]+"))
    for part in [part for name, part in module.named_modules() if pattern.fullmatch(name)]:
        if not isinstance(plan, dict):
            gather = functools.partial(_gather, plan.gather_dim, split._flattened_mesh.get_group())
            exits.callback(part.register_forward_hook(gather).remove)
            continue
        hook = ContextParallelSplitHook(plan, split)
        hook.initialize_hook(part)
        takes = functools.partial(_split, hook, cards)
        exits.callback(part.register_forward_pre_hook(takes, with_kwargs=True).remove)
        if any(isinstance(key, int) for key in plan):  # of what it gives
            exits.callback(part.register_forward_hook(functools.partial(_split_result, hook)).remove)


def _split(
    hook: Any, cards: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if cards > 2 and kwargs.get(_MASK) is not None:
        # diffusers puts the shares of a mask together right only if no share but the last is shorter.
        raise ValueError(f"prompts of different lengths cannot be shared by {cards} cards. Give one, or use 2 cards.")
    return hook.pre_forward(module, *args, **kwargs)


def _split_result(hook: Any, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    return hook.post_forward(module, result)


def _gather(dim: int, group: Any, module: nn.Module, args: tuple[Any, ...], share: torch.Tensor) -> torch.Tensor:
    """All shares, one after the other. They may differ in length, which gloo does not gather."""
    from diffusers.models._modeling_parallel import gather_size_by_comm

    sizes = gather_size_by_comm(share.shape[dim], group)
    if missing := max(sizes) - share.shape[dim]:
        share = torch.cat([share, share.narrow(dim, 0, missing)], dim)
    shares = [torch.empty_like(share, memory_format=torch.contiguous_format) for _ in sizes]
    torch.distributed.all_gather(shares, share.contiguous(), group=group)
    return torch.cat([each.narrow(dim, 0, size) for each, size in zip(shares, sizes, strict=True)], dim)


def _mesh_device() -> str:
    """Return the type of device that the processes talk by: the cards', or the CPU for simulated ones."""
    return "cuda" if torch.cuda.is_available() and "nccl" in torch.distributed.get_backend() else "cpu"


@functools.lru_cache(maxsize=1)
def _mesh(device_type: str, group: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, (1, group.size()), mesh_dim_names=("ring", "ulysses"))
