"""One of several processes that draw a picture together. `python card_ranks.py RANK CARDS FOLDERS FAMILY ...`.

They do so with all weights streamed, each on its own simulated card; the first also draws it alone, before and after.
Prints what was made and what it took as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from import_pack import import_pack


def traces(pipe: Any) -> list[str]:
    """What hooks, processors and placements have left in the modules of a pipeline."""
    parts = [part for unit in pipe.denoisers for part in unit.module.modules()]
    hooked = [type(part).__name__ for part in parts if part._forward_hooks or part._forward_pre_hooks]
    told = [type(part).__name__ for part in parts if "_parallel_config" in vars(getattr(part, "processor", part))]
    return [*hooked, *told, *(type(part).__name__ for part in parts if "forward" in vars(part))]


def drawn(name: str, folder: Path, cards: int) -> dict[str, Any]:
    import ballast
    import tiny
    from ballast.memory import simulated

    family = tiny.FAMILIES[name]
    pipe = ballast.open_pipeline(folder, device="sim")
    cond = pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)
    # Tokens of pictures and of prompts that no number of cards shares evenly.
    given = {"width": 48, "height": 48, "frames": 9 if family.frames else None, "steps": 2, "strategy": "leafwise"}

    def taken(**more: Any) -> tuple[torch.Tensor, int, int]:
        simulated.reset_stats()
        made = pipe.sample(cond, **given, guidance=family.guidance, **family.call_kwargs, **more)
        return made, simulated.stats().h2d_bytes, simulated.stats().peak_bytes

    together, copied, peak = taken(cards=cards)
    # What is on its way between cards goes when its thread has done with it, which may be a little late.
    peak = min(peak, taken(cards=cards)[2])
    found = {"sum": float(together.double().sum()), "copied": copied, "peak": peak}
    if torch.distributed.get_rank() == 0:
        clean = traces(pipe) == [] and simulated.stats().allocated_bytes == 0
        alone, copied, peak = taken()
        apart, most = float((alone - together).abs().max()), float(alone.abs().max())
        found |= {"apart": apart, "most": most, "copied alone": copied, "peak alone": peak, "clean": clean}
    return found


def main(rank: int, cards: int, folders: Path, names: list[str]) -> dict[str, Any]:
    import_pack()
    from ballast.memory import simulated

    torch.set_num_threads(1)
    simulated.enable(total="1GB")
    store = torch.distributed.FileStore(str(folders / f"meeting-{cards}"), cards)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=cards)
    try:
        return {name: drawn(name, folders / name, cards) for name in names}
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])))
