"""The pack as `ballast`, from this checkout, whatever folder it lies in and whether it is installed or not.

ComfyUI itself loads the folder under another name still.
"""

from __future__ import annotations

import importlib.util
import sys

from places import ROOT


def import_pack() -> None:
    """Let `import ballast` mean the working tree, in this process."""
    spec = importlib.util.spec_from_file_location(
        "ballast", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec and spec.loader
    sys.modules["ballast"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["ballast"])
