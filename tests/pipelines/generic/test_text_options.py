"""Options of `encode` that are texts or embeddings: of the prompt or of the negative prompt, as in the stock call."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import tiny_image
import torch
import transformers
from ballast.pipelines.equivalence import check as proving
from ballast.pipelines.equivalence.verdicts import Verdict
from ballast.pipelines.stock.signatures import encoding_of, negative_arguments
from pictured.pictures import mask, picture, pil
from selection import few

Folders = Callable[[str], Path]
PROMPT, NEGATIVE = "a red boat", "blurry, grey"
CFG = 3.0  # without which a distilled model reads no negative prompt
TEXTS = [
    pytest.param("flux", {"prompt_2": "a lake"}, marks=pytest.mark.soak),
    ("flux", {"prompt_2": "a lake", "negative_prompt_2": "noise"}),
    pytest.param("sd3", {"prompt_3": "a lake"}, marks=pytest.mark.soak),
    ("sd3", {"prompt_2": "a lake", "negative_prompt_3": "noise"}),
]


def staged(pipe: Any, family: tiny.Family, **options: Any) -> torch.Tensor:
    cond = pipe.encode(PROMPT, NEGATIVE, **family.encode_kwargs | options)
    width, height = family.size
    further = {"true_cfg": CFG} if family.distilled else {}
    return pipe.sample(cond, width=width, height=height, steps=2, guidance=family.guidance, **further)


def stock(folder: Path, family: tiny.Family, *texts: str | None, **options: Any) -> torch.Tensor:
    return tiny.stock(folder, *texts, **({"true_cfg_scale": CFG} if family.distilled else {}), **options)[0]


@pytest.mark.parametrize(("name", "options"), TEXTS)
def test_texts_beside_the_prompt_count_as_in_stock(name: str, options: dict[str, str], tiny_folders: Folders) -> None:
    """Flux's call encodes the two prompts one by one, and that of Stable Diffusion 3 both at once."""
    folder, family = tiny_folders(name), tiny.FAMILIES[name]
    made = staged(ballast.open_pipeline(folder, device="cpu"), family, **options)
    torch.testing.assert_close(made, stock(folder, family, PROMPT, NEGATIVE, **options), atol=1e-5, rtol=0)
    assert not torch.allclose(made, stock(folder, family, PROMPT, NEGATIVE), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "negative"),
    [
        ("flux", False),
        ("qwenimage", True),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("flux", True), ("sd3", False), ("sd3", True), ("qwenimage", False))
        ),
    ],
)
def test_given_embeddings_count_as_in_stock(name: str, negative: bool, tiny_folders: Folders) -> None:
    """As from prompt weighting; those of the negative prompt are its own, or made of its words."""
    pipe, family = ballast.open_pipeline(tiny_folders(name), device="cpu"), tiny.FAMILIES[name]
    found = pipe.encode(PROMPT, NEGATIVE, **family.encode_kwargs).tensors
    given = {n: t.flip(-1) for n, t in found.items() if n.endswith("embeds")}
    given = {n: t for n, t in given.items() if n.startswith("negative_") is negative}
    words = (PROMPT, None) if negative else (None, NEGATIVE)
    expected = stock(tiny_folders(name), family, *words, **given)
    torch.testing.assert_close(staged(pipe, family, **given), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(expected, stock(tiny_folders(name), family, PROMPT, NEGATIVE), atol=1e-4)


def stock_zimage(folder: Path, kind: str, **given: Any) -> torch.Tensor:
    """Run a class of Z-Image whole. Embeddings stand in place of a prompt that is None."""
    pipe = getattr(diffusers, f"ZImage{kind}Pipeline").from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    run = {"num_inference_steps": 2, "guidance_scale": 4.0, "width": 48, "height": 32, "output_type": "pt"}
    made = pipe(**run, **given, generator=torch.Generator("cpu").manual_seed(0))[0]
    return made.float().movedim(1, -1)


@pytest.mark.parametrize("kind", few(["", "Img2Img", "Inpaint"], "", "Inpaint"))
def test_lists_of_embeddings_count_as_in_stock(kind: str, tiny_folders: Folders) -> None:
    """As the classes of Z-Image take them: a tensor a prompt, each as long as its text."""
    folder = tiny_folders("zimage")
    pipe = ballast.open_pipeline(folder, device="cpu")
    found = pipe.encode(PROMPT, NEGATIVE).tensors
    given = {name: [one.flip(-1) for one in several] for name, several in found.items()}
    one, half = picture(48, 32), mask(48, 32)
    pictures = {"image": one, "strength": 0.6} if kind else {}
    handed = {"image": pil(one), "strength": 0.6} if kind else {}
    if kind == "Inpaint":
        pictures, handed = pictures | {"mask": half}, handed | {"mask_image": pil(half)}
    cond = pipe.encode(PROMPT, NEGATIVE, **given)
    made = pipe.decode(pipe.sample(cond, width=48, height=32, steps=2, guidance=4.0, **pictures))
    expected = stock_zimage(folder, kind, prompt=None, **handed, **given)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    words = stock_zimage(folder, kind, prompt=PROMPT, negative_prompt=NEGATIVE, **handed)
    assert not torch.allclose(expected, words, atol=1e-4)


def test_lists_of_embeddings_are_of_one_text_or_of_several(tiny_folders: Folders) -> None:
    folder, family = tiny_folders("zimage"), tiny.FAMILIES["zimage"]
    pipe = ballast.open_pipeline(folder, device="cpu")
    prompts = ["a boat", "two birds above a very wide lake"]
    found = pipe.encode(prompts, NEGATIVE).tensors
    given = {name: tuple(one.flip(0) for one in several) for name, several in found.items()}
    assert len({len(one) for one in given["prompt_embeds"]}) == 2
    cond = pipe.encode(prompts, NEGATIVE, **given)
    made = pipe.sample(cond, width=48, height=32, steps=2, guidance=4.0, batch=1)
    expected = stock(folder, family, None, None, **given)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    negative = {"negative_prompt_embeds": [found["negative_prompt_embeds"][0] * 2]}
    torch.testing.assert_close(
        staged(pipe, family, **negative), stock(folder, family, PROMPT, NEGATIVE, **negative), atol=1e-5, rtol=0
    )
    with pytest.raises(ValueError, match=r"^ZImagePipeline cannot be given [^\n]+$"):  # which it would add up
        pipe.encode(PROMPT, NEGATIVE, **{name: several[0][None] for name, several in given.items()})


def test_options_that_are_no_text_are_for_both_prompts(tiny_folders: Folders) -> None:
    made = ballast.open_pipeline(tiny_folders("flux"), device="cpu").encode(PROMPT, NEGATIVE, max_sequence_length=16)
    assert {made.tensors[name].shape[1] for name in ("prompt_embeds", "negative_prompt_embeds")} == {16}


def test_texts_are_options_of_encode_alone(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    cond = pipe.encode(PROMPT, NEGATIVE, max_sequence_length=16)
    with pytest.raises(TypeError, match="negative_prompt_2: .* Give it to encode"):
        pipe.sample(cond, width=48, height=32, steps=1, negative_prompt_2="noise")


def test_options_that_would_not_count_as_in_stock_are_refused(
    tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    asked: list[Any] = []

    def differing(*given: Any) -> Verdict:
        asked.append(given[2])
        return Verdict("its transformer gets other values in stages")

    monkeypatch.setattr(proving, "rehearse", differing)
    with pytest.raises(ValueError, match="FluxPipeline cannot be given negative_prompt_2 in stages: its transformer"):
        pipe.encode(PROMPT, NEGATIVE, negative_prompt_2="noise", max_sequence_length=17)
    assert asked == [{"negative_prompt_2": "noise"}]
    pipe.encode(PROMPT, NEGATIVE, max_sequence_length=17)


def classes() -> dict[str, Any]:
    """Those that encode the negative prompt by a call of its own."""
    found = {}
    for name in dir(diffusers):
        try:
            cls = getattr(diffusers, name)
            encode = encoding_of(cls) if name.endswith("Pipeline") and hasattr(cls, "encode_prompt") else None
        except (ImportError, RuntimeError):  # of a package that is not installed
            continue
        if encode and "negative_prompt" not in inspect.signature(encode).parameters and negative_arguments(cls):
            found[name] = cls
    return found


def test_every_class_with_two_calls_gives_the_negative_prompt_its_own_texts() -> None:
    """What belongs to a text goes by its negative name, wherever the call takes one."""
    found = classes()
    assert len(found) >= 31 and {"FluxPipeline", "QwenImagePipeline", "HunyuanVideoPipeline"} <= found.keys()
    for name, cls in found.items():
        call, given = inspect.signature(cls.__call__).parameters, negative_arguments(cls)
        for parameter in inspect.signature(encoding_of(cls)).parameters:
            negative = f"negative_{parameter}"
            if negative in call:
                assert given[parameter] == negative, (name, parameter)
            assert parameter not in given or "embeds" not in given[parameter] or negative == given[parameter], name


def of_a_short_prompt(folder: Path, tiny_folders: Folders) -> dict[str, Any]:
    """Write a model whose learned positions hold 16 tokens, where its call pads prompts to 226 by default."""
    shutil.copytree(tiny_folders("cogvideox"), folder)
    config = folder / "transformer" / "config.json"
    sizes = {"max_text_seq_length": 16, "use_rotary_positional_embeddings": False}
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | sizes), "utf-8")
    return {"max_sequence_length": 16}


def of_a_shallow_encoder(folder: Path, tiny_folders: Folders) -> dict[str, Any]:
    """Write a model whose encoder has 6 layers, where its call reads the 27th by default."""
    del tiny_folders
    pipe = tiny_image.flux2_klein()
    sizes = transformers.Qwen3Config(**tiny_image.decoder_sizes(layers=6, head_dim=8))
    pipe.text_encoder = transformers.Qwen3ForCausalLM(sizes).eval()
    pipe.save_pretrained(folder)
    return {"text_encoder_out_layers": (1, 3, 5), "max_sequence_length": 48}


@pytest.mark.parametrize("write", [of_a_short_prompt, pytest.param(of_a_shallow_encoder, marks=pytest.mark.long)])
def test_a_model_whose_call_fails_by_default_is_compared_with_what_the_first_run_gives(
    write: Callable[[Path, Folders], dict[str, Any]], tiny_folders: Folders, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    options = write(folder, tiny_folders)
    name = next(iter(options))
    pipe = ballast.open_pipeline(folder, device="cpu")
    advice = r"^\S+ cannot be staged: it cannot be compared with its own call .* Or give encode [^\n]+\.$"
    for refused in ({}, {"max_sequence_length": 7, **({name: (1, 99)} if name != "max_sequence_length" else {})}):
        with pytest.raises(ValueError, match=advice):
            pipe.encode(PROMPT, **refused)
    for use in (lambda: pipe.decode(torch.zeros(1, 4, 4, 4)), lambda: pipe.plan(vram="1GB", prompt=PROMPT)):
        with pytest.raises(ValueError, match=advice):
            use()

    size: dict[str, Any] = {"width": 64, "height": 64}
    words = {"negative_prompt": NEGATIVE} if pipe.is_video else {}  # Flux2-klein's call takes none
    cond = pipe.encode(PROMPT, *words.values(), **options)
    frames = {"frames": 5} if pipe.is_video else {}
    made = pipe.decode(pipe.sample(cond, steps=2, guidance=3.0, seed=3, **size, **frames))
    own = diffusers.DiffusionPipeline.from_pretrained(folder)
    own.set_progress_bar_config(disable=True)
    given = size | words | options | ({"num_frames": 5} if frames else {})
    given |= {"prompt": PROMPT, "num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "pt"}
    expected = own(**given, generator=torch.Generator("cpu").manual_seed(3))[0]
    torch.testing.assert_close(made, expected.float().movedim(-3, -1), atol=1e-4, rtol=0)

    for later in (pipe, ballast.open_pipeline(folder, device="cpu")):  # the verdict is kept
        later.encode("a lake", **options)
        with pytest.raises(ValueError, match=rf"^The own call of \S+ fails without .*{name}.*\. Give encode .*\.$"):
            later.encode("a lake")
