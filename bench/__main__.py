"""`python3 -m bench SECTION` in a checkout: no install, no network. It is `ballast bench`, from this folder.

Where diffusers is not installed, its wheel is taken from `.whl` in the checkout, as are others that lie beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def load() -> None:
    """Make `import ballast` mean this checkout, installed or not, and no folder of it a package of its own."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "bench")]
    spec = importlib.util.spec_from_file_location(
        "ballast", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec and spec.loader
    sys.modules["ballast"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def carry(folder: str) -> None:
    """Unpack the wheels that the checkout carries, for this process and those that it starts."""
    for wheel in (ROOT / ".whl").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> int:
    """Run a section as `ballast bench` does, or, after `--worker`, one in a process of its own."""
    load()
    if sys.argv[1:2] == ["--worker"]:
        importlib.import_module("ballast.bench.harness").work(*sys.argv[2:])
        return 0
    with tempfile.TemporaryDirectory(prefix="ballast-wheels-") as folder:
        if importlib.util.find_spec("diffusers") is None:
            carry(folder)
        return importlib.import_module("ballast.commands.main").main(["bench", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
