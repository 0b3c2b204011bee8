"""Judge a pipeline class: is it staged as stock diffusers runs it, or refused in a clear line?"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .borrowing import lenders
from .building import Built, build
from .catalogue import Testers
from .quirks import by_default, small
from .running import Case, Staged, Stock

CLOSE = 1e-4
_LESS_CLOSE = {
    "SkyReelsV2Pipeline": 1e-3,  # whose test makes latents of 1e7: their rounding shows
    "SkyReelsV2ImageToVideoPipeline": 1e-3,  # the same
    "LTX2HDRPipeline": 1e-3,  # whose light of up to 55 moves by 500 times what its pictures move by
    **dict.fromkeys(  # which give their pictures in 8 bits: one step of these
        (
            "CosmosTextToWorldPipeline",
            "CosmosVideoToWorldPipeline",
            "Cosmos2TextToImagePipeline",
            "Cosmos2VideoToWorldPipeline",
            "Cosmos2_5_PredictBasePipeline",
            "Cosmos2_5_TransferPipeline",
        ),
        5e-3,
    ),
    "WanImageToVideoPipeline": 0.03,  # whose test's VAE moves a pixel by 0.02 where its latents move by 1e-6
}
OTHER = "two small cats sit in a blue house"
GOOD = ("equal", "refused", "not text", "not built")
_ELSEWHERE = {
    "HiDreamImagePipeline": "a family of its own, which draws the size that it is asked for; test_families compares it"
}
_TRIES = 3  # of the tests of a class
_SOUND = re.compile(r"audio|music|ace_step")


@dataclass(frozen=True)
class Verdict:
    """`word` is one of GOOD, or "refused later", "differs", "leaves bytes" or "failed"; `reason` is a line."""

    word: str
    reason: str = ""


class HarnessError(Exception):
    """Stock diffusers does not run what the harness built."""


def judge(cls: Any, testers: Testers, folder: Path, sim: Any) -> Verdict:
    """Build a class with the first of the tests that can, and compare all its cases on the simulated card."""
    if cls.__name__ in _ELSEWHERE:
        return Verdict("not built", _ELSEWHERE[cls.__name__])
    own = testers.get(cls.__name__, [])
    reasons = []
    for number, tester in enumerate((own or lenders(cls, testers))[:_TRIES]):
        try:
            built = build(tester, folder / str(number) / "tiny", None if own else cls)
        except Exception as error:
            reasons.append(f"{tester.__name__}: {said(error)}")
            continue
        found = _judge_built(built, sim)
        if found.word != "not built":
            return found
        reasons.append(found.reason)
    return Verdict("not built", reasons[0] if reasons else "diffusers tests neither it nor a pipeline of its parts")


def makes_pictures(cls: Any) -> bool:
    """Whether a pipeline makes pictures or videos of texts."""
    return "prompt" in inspect.signature(cls.__call__).parameters and not _SOUND.search(cls.__module__)


def said(error: BaseException) -> str:
    """The first line of an error, without the folders of the run."""
    first = str(error).strip().partition("\n")[0]
    first = re.sub(r"/\S*?/tiny(?=[/ ]|$)", "FOLDER", first)
    return f"{type(error).__name__}: {first[:200]}"


def _judge_built(built: Built, sim: Any) -> Verdict:
    import ballast

    pipes = {}
    try:
        with small(built.cls), by_default(built.cls, built.inputs):
            pipes = {device: ballast.open_pipeline(built.folder, device=device) for device in ("sim", "cpu")}
            if pipes["cpu"].model.fails and makes_pictures(built.cls):
                Staged(pipes["cpu"], built, int).encode(Case())  # refused here, where its options do not help
    except (ValueError, FileNotFoundError) as error:
        clear = _is_clear(error)
        if clear and makes_pictures(built.cls) and (fails := _stock_fails(built)):
            return Verdict("not built", f"stock: {fails}")
        word = ("refused" if makes_pictures(built.cls) else "not text") if clear else "failed"
        return Verdict(word, said(error).partition(": ")[2] if clear else f"open: {said(error)}")
    except Exception as error:
        return Verdict("failed", f"open: {said(error)}")
    if not makes_pictures(built.cls):
        return Verdict("failed", "open: it makes no picture of a text, and is not refused")
    try:
        return _compare(built, pipes, sim)
    except NotImplementedError as error:
        found = _compare(built, pipes | {"sim": pipes["cpu"]}, sim)
        return replace(found, reason=f"only on the CPU, for {said(error)} {found.reason}".strip())
    except HarnessError as error:
        return Verdict("not built", str(error))


def _compare(built: Built, pipes: dict[str, Any], sim: Any) -> Verdict:
    try:
        stock = Stock(built)
    except Exception as error:
        raise HarnessError(f"stock: {said(error)}") from error
    staged = {device: Staged(pipe, built, lambda: sim.stats().allocated_bytes) for device, pipe in pipes.items()}
    base = Case()
    try:
        expected = stock(base)
    except Exception as error:
        base = Case(guidance=None, negative=None)
        try:
            expected = stock(base)
        except Exception:
            raise HarnessError(f"stock: {said(error)}") from error
    notes = _weaknesses(stock, base, expected)
    for case in _cases(built, base):
        run = staged["sim" if case.name in ("plain", "streamed", "leafwise") else "cpu"]
        try:
            wanted = expected if case.strategy != "auto" else stock(case)
        except Exception:
            continue
        try:
            made = run(case)
        except Exception as error:
            _raise_for_sim(error)
            clear = isinstance(error, ValueError) and _is_clear(error)
            if clear and case.name == "frames" and "one section" in str(error):
                continue
            return Verdict("refused later" if clear else "failed", f"{case.name}: {run.stage}: {said(error)}")
        if found := difference(wanted, made, _LESS_CLOSE.get(built.cls.__name__, CLOSE)):
            return Verdict("differs", f"{case.name}: {found}")
        if run.left:
            stage, count = next(iter(run.left.items()))
            return Verdict("leaves bytes", f"{case.name}: {stage}: {count} bytes")
    return Verdict("equal", "; ".join(notes))


def _stock_fails(built: Built) -> str:
    """Why stock diffusers itself does not run what was built; empty where it does."""
    try:
        stock = Stock(built)
        for case in (Case(more=built.own), Case(guidance=None, negative=None, more=built.own)):
            try:
                stock(case)
                return ""
            except Exception as error:
                fails = said(error)
    except Exception as error:
        fails = said(error)
    return fails


def _raise_for_sim(error: Exception) -> None:
    if isinstance(error, NotImplementedError) and "sim:0" in str(error):
        raise error


def _is_clear(error: Exception) -> bool:
    return "\n" not in str(error).strip() and len(str(error)) < 500


def _cases(built: Built, base: Case) -> Iterator[Case]:
    yield base
    if base.guidance is not None:
        yield Case("defaults", negative=None, guidance=None)
        yield replace(base, name="guidance off", guidance=1.0)
    if base.negative is not None and built.scales.true_cfg:
        yield replace(base, name="true cfg", true_cfg=3.0)
    yield replace(base, name="streamed", strategy="streamed")
    yield replace(base, name="leafwise", strategy="leafwise")
    if "height" in built.inputs and built.inputs["height"]:
        yield replace(base, name="wide", width=2 * built.inputs["width"], height=built.inputs["height"])
    if count := built.inputs.get("num_frames"):
        yield replace(base, name="frames", frames=2 * count - (count % 2) if count > 1 else 9)


def _weaknesses(stock: Stock, base: Case, expected: torch.Tensor) -> list[str]:
    """What makes the comparison say little."""
    notes = []
    if not torch.isfinite(expected).all():
        notes.append("stock makes no finite picture")
    elif float(expected.std()) < 1e-3:
        notes.append("stock makes an even picture")
    try:
        if difference(expected, stock(replace(base, prompt=OTHER))) is None:
            notes.append("the prompt changes nothing")
    except Exception:
        return notes
    return notes


def difference(wanted: torch.Tensor, made: torch.Tensor, close: float = CLOSE) -> str | None:
    if wanted.shape != made.shape:
        return f"shape {list(made.shape)}, not {list(wanted.shape)}"
    by = float((wanted - made).abs().nan_to_num(9.0).max())
    return None if by < close else f"by {by:.1g}"
