"""Free VRAM: evicts models, Ballast's and ComfyUI's, and passes a value through."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io, ui

from .. import memory
from ..memory.host import management as host
from ..memory.sizes import format_bytes
from ..memory.vocabulary import Role
from .shared.progress import show_text
from .shared.running import prompt_id, shows_failure

if TYPE_CHECKING:
    from ..memory.accelerator import Accelerator

ON_CPU = "On the CPU: nothing in VRAM."
_WORDS = {"text_encoder": "text encoder", "transformer": "diffusion model", "vae": "VAE", "other": "other"}


@dataclass(frozen=True)
class Held:
    """Bytes of one model, or of all on a device, before and after."""

    name: str
    before: int
    after: int
    remark: str = ""

    def __str__(self) -> str:
        change = f"{format_bytes(self.before)} -> {format_bytes(self.after)}"
        return f"{self.name}: {change}{self.remark and ', ' + self.remark}"


class FreeVram(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        anything = io.MatchType.Template("value")
        return io.Schema(
            node_id="BallastFreeVRAM",
            display_name="Free VRAM",
            category="Ballast",
            description="Evicts models from VRAM when its input is ready, and hands the input on. Whatever "
            "left is loaded again when it is needed.",
            search_aliases=["unload models", "clear vram", "empty cache"],
            inputs=[
                io.MatchType.Input(
                    "value",
                    template=anything,
                    optional=True,
                    tooltip="Anything. Put the node into any connection: it runs when that value is ready.",
                ),
                io.Boolean.Input("text_encoders", default=True, tooltip="Evict text encoders."),
                io.Boolean.Input("transformers", default=True, tooltip="Evict diffusion models: transformers, UNets."),
                io.Boolean.Input(
                    "vaes",
                    default=True,
                    tooltip="Evict VAEs, and what is neither text encoder nor diffusion model, such as ControlNets.",
                ),
                io.Boolean.Input(
                    "host_models",
                    default=True,
                    tooltip="Evict ComfyUI's own models too, of the kinds chosen above; without, only Ballast's.",
                ),
            ],
            outputs=[
                io.MatchType.Output(
                    template=anything, id="value_out", display_name="value", tooltip="The input, as it came."
                ),
                io.String.Output(
                    "report",
                    tooltip="Each model in VRAM with its bytes before and after, and the sums; RAM too if copies of "
                    "models went that nothing uses any more.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    @shows_failure
    def execute(
        cls, text_encoders: bool, transformers: bool, vaes: bool, host_models: bool, value: Any = None
    ) -> io.NodeOutput:
        chosen = {"text_encoder": text_encoders, "transformer": transformers, "vae": vaes, "other": vaes}
        roles: list[Role] = [role for role, wanted in chosen.items() if wanted]  # type: ignore[misc]
        report = compose(*free(roles, host_models))
        show_text(cls, report)
        return io.NodeOutput(value, report, ui=ui.PreviewText(report))


def free(roles: Collection[Role], host_models: bool) -> tuple[list[Held], list[Held]]:
    """Evict models of these roles. Return the bytes of each model in VRAM, and of all models on each device.

    The last of the models is RAM, if copies there went that no open pipeline refers to.
    """
    units = [unit for manager in memory.managers() for unit in manager.units()]
    ours = [(unit, unit.resident_bytes) for unit in units if unit.resident_bytes]
    copies = sum(unit.host_bytes for unit in units)
    theirs = host.loaded_models()
    cards = _cards()
    before = {str(card.device): _in_use(card, theirs) for card in cards}
    for manager in memory.managers():
        manager.free(roles)
    if host_models:
        host.evict([model.patcher for model in theirs if model.role in roles])
    models = [
        Held(", ".join(filter(None, (unit.label, unit.name))), held, unit.resident_bytes, "pinned" * unit.pinned)
        for unit, held in ours
    ]
    for model in theirs:
        name = f"{model.name} (ComfyUI, {_WORDS[model.role]})"
        models.append(Held(name, model.bytes, int(model.patcher.loaded_size())))
    if gone := copies - (left := sum(unit.host_bytes for unit in units)):
        models.append(Held("RAM", copies, left, f"freed {format_bytes(gone)} of copies that no open model uses"))
    after = {str(card.device): _in_use(card, theirs) for card in cards}
    freed = {device: f"freed {format_bytes(max(0, held - after[device]))}" for device, held in before.items()}
    return models, [Held(device, held, after[device], freed[device]) for device, held in before.items()]


def compose(models: list[Held], totals: list[Held]) -> str:
    """Compose the report: a line for each device, one for each model, and one for RAM if copies there were freed."""
    held = [total for total in totals if total.before or total.after]
    lines = [str(one) for one in (*held, *models)]
    if not totals:
        lines.insert(0, ON_CPU)
    elif not held:
        left = "what no open workflow uses had left it" if models else "no model is there"
        lines.insert(0, f"Nothing to free in VRAM: {left}.")
    return "\n".join(lines)


def _cards() -> list[Accelerator]:
    """Return the host's device and those on which something is, or on which this prompt ran something of ours."""
    from ..memory.accelerator import Accelerator, resolve_device

    own, run = resolve_device(host.device() or "cpu"), prompt_id()
    ours = memory.managers()
    ran = {manager.device for manager in ours if any(stage.run == run for stage in manager.timeline.stages)}
    cards = [Accelerator(device) for device in {manager.device for manager in ours} | {own}]
    used = [card for card in cards if card.device in {own, *ran} or card.allocated_bytes()]
    return sorted((card for card in used if not card.is_cpu), key=lambda card: str(card.device))


def _in_use(card: Accelerator, theirs: Collection[host.HostModel]) -> int:
    """Return the bytes in use: tensors, and the pages of the host's dynamic models, which torch does not count."""
    from ..memory.accelerator import resolve_device

    card.empty_cache()
    is_own = card.device == resolve_device(host.device() or "cpu")
    return card.allocated_bytes() + sum(host.page_bytes(model.patcher) for model in theirs) * is_own
