"""How a pipeline that has a guider of diffusers is guided: by another guider, which is named or given."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers.guiders.guider_utils import BaseGuidance

GUIDER = "guider"  # option of `sample`
CHOICE = "guider_choice"  # argument of a run: what `guider_of` returns

# Those that combine the two predictions of classifier-free guidance in other ways.
GUIDERS = {
    "cfg": "ClassifierFreeGuidance",
    "cfg_zero_star": "ClassifierFreeZeroStarGuidance",
    "apg": "AdaptiveProjectedGuidance",
    "tcfg": "TangentialClassifierFreeGuidance",
}


def guider_of(title: str, own: Iterable[BaseGuidance], asked: Any) -> str:
    """Return the class and config of a guider that takes the place of `own`, as text.

    Raises ValueError, in one line, for what is none, or takes the place of none.
    """
    from diffusers import guiders
    from diffusers.guiders.guider_utils import BaseGuidance

    if strange := next((name for each in own if (name := type(each).__name__) not in GUIDERS.values()), ""):
        raise ValueError(f"{title} takes no guider in place of its {strange}. Leave it out.")
    if isinstance(asked, str) and asked in GUIDERS:
        return json.dumps([GUIDERS[asked], {}])
    name = type(asked).__name__
    if isinstance(asked, BaseGuidance) and getattr(guiders, name, None) is type(asked):
        config = {key: value for key, value in asked.config.items() if not key.startswith("_")}
        return json.dumps([name, config], default=lambda value: value.to_dict(), sort_keys=True)
    raise ValueError(
        f"guider is {str(asked)[:80]!r}; it takes {', '.join(GUIDERS)}, or an object of diffusers.guiders."
    )


def guider_for(own: BaseGuidance, choice: str | None, scale: float | None) -> BaseGuidance:
    """Return the guider of one run: that of the choice, by default `own`, with this scale unless it is None.

    One that is named has the scale of `own`.
    """
    from diffusers import guiders

    scaled = {} if scale is None else {"guidance_scale": scale, "enabled": True}
    if not choice:
        return own.new(**scaled) if scaled else own
    name, config = json.loads(choice)
    return getattr(guiders, name)(**(config or {"guidance_scale": own.guidance_scale}) | scaled)
