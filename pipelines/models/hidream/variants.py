"""The three published HiDream-I1 models: Full, and Dev and Fast, which are distilled from it.

They differ in their weights alone, not in their configs, and each is to be run with numbers and a scheduler of its own:
MODEL_CONFIGS in inference.py of the HiDream-ai/HiDream-I1 repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"hidream[-_ ]?i1[-_ ](full|dev|fast)(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class Variant:
    """How one of the models is run. `shift` moves the noise levels of flow matching towards more noise."""

    name: str
    steps: int
    guidance: float
    shift: float
    scheduler: str  # a class of diffusers

    def scheduler_config(self) -> dict[str, Any]:
        """Return the config of its scheduler."""
        if self.scheduler == "UniPCMultistepScheduler":
            return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": self.shift}
        return {"shift": self.shift}

    def is_scheduled_by(self, scheduler: str, config: Mapping[str, Any]) -> bool:
        """Return whether a scheduler of this class and config is its own."""
        return scheduler == self.scheduler and self.scheduler_config().items() <= dict(config).items()


# FlowMatchLCMScheduler does what the repository's FlashFlowMatchEulerDiscreteScheduler does.
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("full", 50, 5.0, 3.0, "UniPCMultistepScheduler"),
        Variant("dev", 28, 0.0, 6.0, "FlowMatchLCMScheduler"),
        Variant("fast", 16, 0.0, 3.0, "FlowMatchLCMScheduler"),
    )
}


def detect(folder: Path, scheduler: str, config: Mapping[str, Any]) -> Variant | None:
    """Detect the variant in a folder by its scheduler and its name; None if neither tells.

    The name of the folder counts, or that of one around it, as in a download cache. Where both speak the scheduler's
    class has the word: a folder is easier to rename.
    """
    paths = (folder.absolute(), folder.resolve())  # a link's own name before that of what it leads to
    names = [name for path in paths for name in reversed(_NAMED.findall("/".join(path.parts[-4:])))]
    named = VARIANTS[names[0].lower()] if names else None
    alike = [variant for variant in VARIANTS.values() if variant.scheduler == scheduler]
    if named in alike or not alike:
        return named
    return next((variant for variant in alike if variant.is_scheduled_by(scheduler, config)), alike[0])
