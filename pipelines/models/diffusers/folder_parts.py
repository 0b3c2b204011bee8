"""The components of a diffusers folder, which all classes that drive them share."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....memory.weights.unit import ManagedModel
from ...encoding.truncation import Truncation, encoder_title
from ...files.components import Component, names_class, parse_dtype, pipeline_class, read_components
from ...files.recognition import title_of
from ...files.single.controlnets import ControlNetFile, kind_of
from ...files.single.given import GivenFiles
from ...stock.obstacles import obstacle
from ...stock.signatures import encoding_of, needed_inputs, own_words
from ...stock.tasks import INPUTS, controlnet_class
from ..claims import Claims

HOST = torch.device("cpu")
SEEING = ("image_encoder",)  # modules that see a picture before the loop begins, as the VAE does
CONTROLNET = "controlnet"  # what modules of the loop that come before the transformer are called, or _2 after it
_COMPONENT = re.compile(r"(text_encoder|tokenizer|transformer|controlnet|scheduler)(_\d+)?")


@dataclass(frozen=True)
class Components:
    """The components of a folder, their units, and what its index says.

    `makers` make tools in place of what the folder has.
    """

    folder: Path
    name: str  # of the class that the index names
    title: str
    knows: str
    components: Mapping[str, Component]
    config: Mapping[str, Any]
    claims: Claims
    units: Mapping[str, ManagedModel]
    titles: Mapping[str, str]
    truncation: Truncation = field(default_factory=Truncation)
    makers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    _tools: dict[str, Any] = field(default_factory=dict)

    @property
    def encoders(self) -> list[ManagedModel]:
        """The units that encode prompts."""
        return [unit for unit in self.units.values() if unit.role == "text_encoder"]

    @property
    def denoisers(self) -> list[ManagedModel]:
        """The units that sample."""
        return [u for u in self.units.values() if u.role in ("transformer", "other") and u.name not in SEEING]

    @property
    def controlnets(self) -> list[str]:
        """The names of its ControlNets, in the order in which they are called."""
        return [unit.name for unit in self.denoisers if unit.name.startswith(CONTROLNET)]

    @property
    def beside(self) -> list[str]:
        """The names of modules of the loop that are neither its transformers nor called by them."""
        return [u.name for u in self.denoisers if u.role == "other" and not u.name.startswith(CONTROLNET)]

    def tool(self, name: str) -> Any:
        """Return a component without weights. Schedulers and guiders keep state, so each run gets its own."""
        if name in self.makers:
            return self.makers[name]()
        if name.startswith("scheduler"):
            return self.components[name].create()
        if name not in self._tools:
            tool = self.components[name].create()
            if name.startswith("tokenizer"):
                tool = self.truncation.attach(tool, self._encoder_title(name.replace("tokenizer", "text_encoder")))
            self._tools[name] = tool
        tool = self._tools[name]
        # Making a guider logs a line. Tokenizers are large, and code of LTX-2 sets the side on which its own pads.
        return copy.deepcopy(tool) if name.endswith("guider") else copy.copy(tool)

    def _encoder_title(self, name: str) -> str:
        """Return the common name of an encoder."""
        component = self.components.get(name)
        return self.titles.get(name) or (encoder_title(component.cls) if component else self.title)

    def without_weights(self, *prefixes: str) -> list[str]:
        """Return the names of components without weights that begin with one of `prefixes`."""
        return [n for n, c in self.components.items() if not c.is_module and n.startswith(prefixes)]


@dataclass(frozen=True)
class Source:
    """A folder to read: its index, and the folders of components that lie elsewhere."""

    folder: Path
    index: dict[str, Any]
    elsewhere: Mapping[str, Path] = field(default_factory=dict)
    files: GivenFiles | None = None
    makers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    controlnets: Mapping[str, tuple[Path, str]] = field(default_factory=dict)  # and their classes, by name
    controlled: Any = None  # the class that runs the model with its ControlNets

    def with_controlnets(self, paths: Sequence[Path]) -> Source:
        """Return the same with the ControlNet of each picture, a folder in diffusers' layout or a single file.

        FileNotFoundError or ValueError, in one line, for what is no ControlNet, and where no class runs them.
        """
        kinds = {path: kind_of(path) for path in paths}
        controlled = controlnet_class(self.index, kinds)
        nets = paths if len(kinds) > 1 else paths[:1]  # one for several pictures is called for each
        found = {f"{CONTROLNET}_{at + 1}" if at else CONTROLNET: (path, kinds[path]) for at, path in enumerate(nets)}
        return replace(self, controlnets=found, controlled=controlled)

    def read(
        self, dtype: str | torch.dtype, claims: Claims, adapted: Callable[[Component], Component] = lambda one: one
    ) -> tuple[Components, Any]:
        """Return the components, each `adapted`, and the class that the index names. Reads no weights.

        Raises ValueError, in one line, for a class that cannot be staged.
        """
        index, files, name = self.index, self.files, self.index["_class_name"]
        cls: Any = pipeline_class(name)
        given = files.components(index) if files else {}
        elsewhere = {**self.elsewhere, **(files.folders(index) if files else {})}
        found = read_components(self.folder, index, parse_dtype(dtype), elsewhere, given)
        if files:
            files.check_read(found.values())
        found |= self._read_controlnets(dtype, found)
        components = {name: adapted(component) for name, component in found.items()}
        if encoding_of(cls) is None or "vae" not in components:
            raise ValueError(f"{name} has no text stage or no VAE, and cannot be staged.")
        needed = needed_inputs(cls)
        if not INPUTS.issuperset(needed):
            why = obstacle(cls) or f"it starts from {', '.join(needed)}"
            raise ValueError(f"{name} cannot be staged: {why}. Run it with diffusers itself.")
        self._check_complete(cls, components)
        label = files.transformer.stem if files else self.folder.name
        units = [claims.claim(c, label) for c in components.values() if c.is_module]
        title = own_words(index, "_title") or title_of(files.transformer if files else self.folder)
        config = {k: v for k, v in index.items() if not k.startswith("_") and not names_class(v)}
        parts = Components(
            self.folder, name, title, own_words(index, "_knows"), components, config, claims,
            {unit.name: unit for unit in units}, self.titles, makers=self.makers,
        )  # fmt: skip
        return parts, cls

    def _read_controlnets(self, dtype: str | torch.dtype, found: Mapping[str, Component]) -> dict[str, Component]:
        """Return the ControlNets that lie elsewhere, by name, beside the components that are `found`."""
        index: dict[str, Any] = {name: ["diffusers", kind] for name, (_, kind) in self.controlnets.items()}
        files = {name: ControlNetFile(path) for name, (path, _) in self.controlnets.items() if path.is_file()}
        folders = {name: files[name].folder if name in files else path for name, (path, _) in self.controlnets.items()}
        makers = {name: partial(file.component, found["transformer"].config) for name, file in files.items()}
        return read_components(self.folder, index, parse_dtype(dtype), folders, makers)

    def _check_complete(self, cls: Any, components: Mapping[str, Component]) -> None:
        """Raise ValueError for what would only fail when it is used."""
        parts = {n: found for n in inspect.signature(cls).parameters if (found := _COMPONENT.fullmatch(n))}
        absent = [n for n in parts if n not in components and n not in cls._optional_components]
        # A second or third one may be left out by [null, null], such as T5 of Stable Diffusion 3.
        if missing := [n for n in absent if not parts[n][2] or self.index.get(n) != [None, None]]:
            raise ValueError(
                f"{self.folder} lacks {', '.join(missing)}, which {self.index['_class_name']} needs. Put each into a "
                "folder of that name and list it in model_index.json."
            )
