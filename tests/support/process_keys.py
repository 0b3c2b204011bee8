"""What one process calls models and what it caches of them: `python process_keys.py MODEL...`, told as JSON.

In a process of its own: the order of a set follows PYTHONHASHSEED.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from import_pack import import_pack


def keys(model: Path) -> dict[str, Any]:
    """The digest of a model, the files that its weights are converted to, and the keys of a prompt and of forecasts."""
    import ballast
    from ballast.pipelines.encoding.prompts import Text
    from ballast.pipelines.stages.encode import encoding_key

    pipe: Any = ballast.open_pipeline(model, device="sim", weights="exact12")
    made = [unit.conversion.path.name for unit in (*pipe.encoders, *pipe.denoisers)]
    prompt = encoding_key(pipe.model, pipe.runner, Text("a red boat", ""))
    forecast = pipe.model.forecaster.key(stage="sample")
    return {"digest": pipe.digest(), "made": made, "prompt": prompt, "forecast": forecast}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_pack()
    torch.set_num_threads(1)
    from ballast.memory import simulated

    simulated.enable(total="4GB")
    print(json.dumps({Path(name).name: keys(Path(name)) for name in sys.argv[1:]}))
