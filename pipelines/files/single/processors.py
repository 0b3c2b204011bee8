"""Processors of text with pictures, whose tokenizer and whose settings for pictures lie in different places."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ....memory.files import one_line, read_json
from ..components import Component
from ..trust import component_class

_SETTINGS = "preprocessor_config.json"
_PARTS = ("image_processor", "tokenizer")


@dataclass(frozen=True)
class PairedProcessor(Component):
    """A processor made of a tokenizer, and of what its folder says of pictures."""

    tokenizer: Component = None  # type: ignore[assignment]  # it follows fields that have defaults

    def create(self) -> Any:
        """Create the processor. Raises ValueError, in one line, if the tokenizer has no token for a picture."""
        path = self.folder / _SETTINGS
        seeing: Any = component_class("transformers", read_json(path)["image_processor_type"])
        with one_line(path, f"read as {seeing.__name__}"):
            pictures = seeing.from_pretrained(self.folder, local_files_only=True)
        made = without_videos(self.cls)(pictures, self.tokenizer.create())
        if made.image_token not in made.tokenizer.get_vocab():
            raise ValueError(
                f"the tokenizer in {self.tokenizer.folder} has no {made.image_token}, which stands for a picture. "
                "Give that of the model."
            )
        return made

    def identity(self) -> list[str]:
        """Digests of both, for cache keys."""
        return [*super().identity(), *self.tokenizer.identity()]


@functools.cache
def without_videos(cls: Any) -> type:
    """Return a processor class without its video part, which no pipeline uses and which needs torchvision."""

    def init(self: Any, image_processor: Any = None, tokenizer: Any = None) -> None:
        for name in ("image", "video"):
            token = getattr(tokenizer, f"{name}_token", f"<|{name}_pad|>")
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        super(cls, self).__init__(image_processor, tokenizer)

    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__, "attributes": list(_PARTS)})
