"""Inputs of the Sampler Options nodes: those for every model, and those for families with a loop of their own."""

from __future__ import annotations

from comfy_api.latest import io

AUTO = "auto"
# Of diffusers' attention backends. A run reports one that this machine lacks.
_ATTENTION = ["native", "flash", "_flash_3", "sage", "xformers", "flex", "_native_cudnn", "_native_efficient"]


def compute_inputs() -> list[io.Input]:
    """Return the inputs for every model."""
    return [
        io.Boolean.Input(
            "compile",
            default=False,
            tooltip="Compile the transformer's blocks (torch.compile), also streamed ones. The first step then "
            "takes a minute or so, later ones less than without. Off by default.",
        ),
        io.Combo.Input(
            "attention",
            options=[AUTO, *_ATTENTION],
            default=AUTO,
            tooltip="auto is PyTorch's own. Others need a package of their own or a certain GPU, and not every "
            "model takes them; the message says which.",
        ),
    ]


def newbie_inputs() -> list[io.Input]:
    """Return the inputs for NewBie's loop."""
    return [
        io.Combo.Input(
            "sampler",
            options=[AUTO, "euler", "midpoint"],
            default=AUTO,
            tooltip="NewBie only. auto is euler; midpoint, the official one, calls the model twice a step.",
        ),
        io.Float.Input(
            "shift",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="NewBie only: above 1, more of the steps are spent while the picture is still mostly "
            "noise. 0 for its own value, 6.",
        ),
        io.Float.Input(
            "cfg_trunc",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="NewBie only: the time from which on there is no guidance, 0 for noise, 1 for the picture. "
            "Steps without it take half as long. The official script has 0.25; 1 is guidance in all steps.",
        ),
        io.Float.Input(
            "renorm_cfg",
            default=0.0,
            min=0.0,
            max=10.0,
            step=0.1,
            tooltip="NewBie only: tames guidance, against burnt colours. With 1 the guided prediction may be "
            "no stronger than the unguided one, with 2 twice as strong. 0 sets no limit. Try 1.",
        ),
    ]


def pyramid_flow_inputs() -> list[io.Input]:
    """Return the inputs for Pyramid-Flow's loop."""
    return [
        io.String.Input(
            "first_frame_steps",
            default="",
            tooltip="Pyramid-Flow only: steps of the three stages of the first frame, such as 20,20,20. Empty "
            "for twice the sampler's steps.",
        ),
        io.String.Input(
            "video_steps",
            default="",
            tooltip="Pyramid-Flow only: steps of the three stages of each later frame, such as 10,10,10 or the "
            "faster 8,8,8. Empty for the sampler's steps.",
        ),
        io.Float.Input(
            "video_guidance",
            default=5.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="Pyramid-Flow only: guidance of all frames but the first, which takes the sampler's. 4 "
            "suits videos that start with a picture.",
        ),
        io.Boolean.Input(
            "linear_guidance",
            default=False,
            tooltip="Pyramid-Flow only: let guidance fall by 0.5 with each frame, down to 2.",
        ),
    ]
