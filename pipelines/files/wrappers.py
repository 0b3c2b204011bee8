"""Names of weights that were saved with what wraps the model: torch.compile, FSDP, DDP, DeepSpeed or peft."""

from __future__ import annotations

import re

# Around a model or parts of it, and around the whole.
_WRAPPERS = re.compile(r"(?<![A-Za-z\d])_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)[._]")
_AROUND = re.compile(
    r"^((?:(?:model\.)?diffusion_model\.|transformer(?:_2)?\.|unet\.|text_encoder(?:_\d)?\.)?)"
    r"(?:(?:module|_forward_module|base_model\.model)\.)+"
)


def unwrapped(name: str) -> str:
    """Strip the names of wrappers around the model or its parts, such as `_orig_mod`."""
    return _AROUND.sub(r"\1", _WRAPPERS.sub("", name))
