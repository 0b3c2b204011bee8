"""Inputs for pictures that a run starts from, which the sampler and the plan have alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

if TYPE_CHECKING:
    import torch


def picture_inputs() -> list[io.Input]:
    """Return the inputs, all optional: those of saved graphs come before them."""
    return [
        io.Image.Input(
            "image",
            optional=True,
            tooltip="A picture to start from (image to image), to paint into (with mask), or the first frame of a "
            "video. Ballast takes the pipeline of diffusers for that, with the same weights. What an edit model works "
            "from goes to Staged Text Encode instead. Several pictures make a batch, or are for as many prompts.",
        ),
        io.Mask.Input(
            "mask", optional=True, tooltip="What to paint anew: 1 is new, 0 stays. It has the size of the picture."
        ),
        io.Float.Input(
            "strength",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.01,
            optional=True,
            advanced=True,
            tooltip="With an image connected, how much of it is replaced: 0.3 keeps most of it, 1 nearly nothing; so "
            "many of the steps run. 0 for the pipeline's own default. For NewBie's latent, set denoise.",
        ),
        io.Image.Input(
            "last_image",
            optional=True,
            tooltip="The last frame of a video, for models of a first and a last frame, such as Wan's.",
        ),
    ]


def control_input() -> io.Input:
    """Return the input for a picture that the model follows."""
    return io.Image.Input(
        "control",
        optional=True,
        tooltip="A picture of edges, depth or the like, for models that follow one, such as FLUX.1 Canny and Depth. "
        "Several make a batch, or are for as many prompts.",
    )


def video_input() -> io.Input:
    """Return the input for the frames of a video to start from."""
    return io.Image.Input(
        "video",
        optional=True,
        tooltip="The frames of a video to start from, for models such as Wan: strength is how much is replaced. mask "
        "and control may have as many frames.",
    )


def given_pictures(
    strength: float,
    image: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    last_image: torch.Tensor | None = None,
    control: torch.Tensor | None = None,
    video: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the arguments of `sample` and `plan` for these inputs; none for what is not connected."""
    pictures = {"image": image, "last_image": last_image, "control": control, "video": video}
    given: dict[str, Any] = {name: opaque(value) for name, value in pictures.items() if value is not None}
    given |= {} if mask is None else {"mask": mask}
    return given | ({"strength": strength} if strength else {})


def opaque(image: torch.Tensor) -> torch.Tensor:
    """Return a picture without its alpha channel, which some loaders add."""
    return image[..., :3]
