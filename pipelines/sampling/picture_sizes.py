"""Which sizes a model draws: the multiple that they must be of, and how far its tables of positions reach."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_FACTOR = 16  # of the model's own multiple that a pipeline's check is asked for

Sides = tuple[int, int]  # rows and columns


@dataclass(frozen=True)
class PictureSizes:
    """Sizes in pixels: `least` of both sides, `most` of the height and the width, `area` where the sides differ."""

    multiple: int
    most: Sides | None = None
    area: int | None = None
    least: int = 0

    def check(self, title: str, width: int | None, height: int | None) -> None:
        """Raise ValueError, in one line, for a size that the model `title` cannot draw. None is its own size."""
        highest, widest = self.most or (None, None)
        for key, size, most in (("width", width, widest), ("height", height, highest)):
            if size is None:
                continue
            most = most and most // self.multiple * self.multiple
            least = -(-max(self.least, self.multiple) // self.multiple) * self.multiple
            if size < least or size % self.multiple or (most and size > most):
                near = max(least, round(size / self.multiple) * self.multiple)
                reach = (f" from {least}" if self.least else "") + (f" up to {most}" if most else "")
                raise ValueError(
                    f"{key} is {size}; {title} takes multiples of {self.multiple}{reach}, such as "
                    f"{min(near, most or near)}."
                )
        if self.area and width and height and width != height and width * height > self.area:
            raise ValueError(
                f"{width} x {height} are {width * height} pixels; where the sides differ {title} takes up to "
                f"{self.area}. Choose a smaller size, or a square."
            )


def most_tokens(kind: type, config: Mapping[str, Any]) -> Sides | None:
    """Rows and columns of tokens that a transformer of diffusers has positions for; None where it has them for any.

    Beyond them it fails (`index 64 is out of bounds`) or, as AuraFlow does, draws on with the wrong positions.
    """
    reach = _REACH.get(kind.__name__)
    if reach is None:
        return None
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    try:
        rows, columns = reach(defaults | dict(config))
    except (LookupError, TypeError, ValueError):  # a bad config is reported elsewhere
        return None
    return (rows, columns) if rows > 0 and columns > 0 else None


def _axes(config: Mapping[str, Any]) -> Sides:
    _, rows, columns = config["axes_lens"]  # the first one is for text, or frames
    return int(rows), int(columns)


def _square(key: str) -> Callable[[Mapping[str, Any]], Sides]:
    return lambda config: (int(config[key]), int(config[key]))


def _auraflow(config: Mapping[str, Any]) -> Sides:
    side = math.isqrt(int(config["pos_embed_max_size"]))
    return side, side


def _cosmos(config: Mapping[str, Any]) -> Sides:
    frames, rows, columns = (
        size // patch for size, patch in zip(config["max_size"], config["patch_size"], strict=True)
    )
    if config["extra_pos_embed_type"] == "learnable":
        return rows, columns
    return (max(frames, rows, columns),) * 2  # one table serves all


_REACH: dict[str, Callable[[Mapping[str, Any]], Sides]] = {
    "AuraFlowTransformer2DModel": _auraflow,
    "BriaFibo2Transformer2DModel": _axes,
    "CogView3PlusTransformer2DModel": _square("pos_embed_max_size"),
    "CosmosTransformer3DModel": _cosmos,
    "Kandinsky5Transformer3DModel": lambda config: (128, 128),
    "Lumina2Transformer2DModel": _axes,
    "SD3Transformer2DModel": _square("pos_embed_max_size"),
    "SanaVideoTransformer3DModel": _square("rope_max_seq_len"),
    "SkyReelsV2Transformer3DModel": _square("rope_max_seq_len"),
    "WanTransformer3DModel": _square("rope_max_seq_len"),
    "WanVACETransformer3DModel": _square("rope_max_seq_len"),
    "ZImageTransformer2DModel": _axes,
}


def multiple_of(pipe: Any, own: int) -> int:
    """Return the number that a stock pipeline takes multiples of: its model's `own`, or more if it checks for more.

    Some round a size down in silence; those say by their image processor to what.
    """
    processor = getattr(getattr(pipe, "image_processor", None), "config", {})
    rounds_to = processor.get("vae_scale_factor") if isinstance(processor, Mapping) else None
    own = math.lcm(own, rounds_to) if isinstance(rounds_to, int) and rounds_to > 0 else own
    return next((own * n for n in range(1, _MOST_FACTOR + 1) if not _refuses(pipe, own * n)), own)


def _refuses(pipe: Any, side: int) -> bool:
    """Return whether its own check refuses a square of this side for its size."""
    check = getattr(pipe, "check_inputs", None)
    if check is None:
        return False
    known = inspect.signature(check).parameters
    given = {name: None for name, parameter in known.items() if parameter.default is inspect.Parameter.empty}
    sides = {name: side for name in ("height", "width") if name in known}
    try:
        check(**given | sides)
    except Exception as error:  # for what was not given, once the size has passed
        return "divisible" in str(error)
    return False
