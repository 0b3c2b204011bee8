"""What a user is told of a run: a prompt that is cut, words that no encoder knows, a negative prompt without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ballast
import folder_paths
import newbie_folders
import pyramid_folders
import pytest
import tiny
import torch
from ballast.commands import main as cli
from ballast.nodes.encode import TextEncode
from ballast.nodes.encode_image import VaeEncode, cropping
from ballast.nodes.load import LoadPipeline
from ballast.nodes.sample import Sampler
from ballast.nodes.shared import running
from ballast.pipelines.encoding.embedding_cache import shared_cache
from ballast.pipelines.encoding.truncation import Truncation, encoder_title
from host import run_node
from import_pack import ROOT
from selection import few
from tiny_parts import tokenizer

Folders = Callable[[str], Path]
DEMO = ROOT / "demo" / "shapes"
WORDS = ", ".join(["a red circle", "a blue square", "a green triangle"] * 40) + ", left"
LETTERS = "boat " * 500  # the tiny tokenizers take a token for each letter
SOME = ("flux", "sd3", "hidream", "lumina2", "wan", "ltx")  # whose encoders and calls differ most


def opened(folder: Path, **more: Any) -> Any:
    return ballast.open_pipeline(folder, device="cpu", **more)


# A prompt that is cut


def test_a_cut_prompt_says_what_was_kept() -> None:
    notes = opened(DEMO).encode(WORDS).notes
    assert len(notes) == 1
    given = 4 * 120 + 1  # words and commas
    before, _, last = notes[0].partition(", up to ")
    head, _, counts = before.partition(": ")
    assert head == "The prompt is cut"
    kept, of = (int(word) for word in counts.split() if word.isdigit())
    assert counts == f"Gemma2 reads {kept} of {of} tokens"
    assert kept == 256 < given <= of
    words = last.removeprefix("'... ").removesuffix("'.").split()
    assert len(words) == 5 and " ".join(words) in WORDS.replace(",", " ,")


class Processor:
    """Reads a word as a token, and a text with a place for a picture only with that picture."""

    def __call__(self, text: list[str], images: Any = None, truncation: bool = False, **more: Any) -> dict[str, Any]:
        if "<picture>" in text[0] and images is None:
            raise ValueError("no picture was passed")
        return {"input_ids": [list(range(len(one.split())))[: 3 if truncation else None] for one in text]}

    def decode(self, ids: list[int], **more: Any) -> str:
        return " ".join(map(str, ids))


def test_a_text_that_is_read_with_pictures_is_measured_with_them() -> None:
    listener = Truncation()
    read = listener.attach(Processor(), "Qwen")
    read(text=["<picture> a red boat"], images=[object()], truncation=True, max_length=3)
    (note,) = listener.notes("Kandinsky", ["a red boat"], [], "")
    assert note == "The prompt is cut: Qwen reads 3 of 4 tokens, up to '... 0 1 2'."


def test_the_note_is_that_of_the_cut_itself() -> None:
    """What the words that are named lie before: another end of the prompt changes nothing."""
    pipe = opened(DEMO)
    one, other = (pipe.encode(f"{WORDS}, {end}") for end in ("purple", "white, right"))
    assert torch.equal(one.tensors["prompt_embeds"], other.tensors["prompt_embeds"])
    assert one.notes and one.notes[0].partition(" of ")[0] == other.notes[0].partition(" of ")[0]
    assert one.notes[0].partition("up to")[2] == other.notes[0].partition("up to")[2]


@pytest.mark.parametrize("name", few(tiny.FAMILIES, *SOME))
def test_every_family_tells_of_a_cut_and_only_then(name: str, tiny_folders: Folders) -> None:
    family = tiny.FAMILIES[name]
    pipe = opened(tiny_folders(name))
    assert pipe.encode("a red boat", "blurry" if family.negative else "", **family.encode_kwargs).notes == []
    notes = pipe.encode(LETTERS, "blurry" if family.negative else "", **family.encode_kwargs).notes
    assert len(notes) == 1, notes
    assert notes[0].startswith("The prompt is cut: ") and "up to '... " in notes[0]


def test_encoders_that_read_all_of_it_are_named(tiny_folders: Folders) -> None:
    """Of Stable Diffusion 3's, two cut at 77 and one at 256: nothing is lost then."""
    notes = opened(tiny_folders("sd3")).encode("a red boat " * 10).notes
    assert len(notes) == 1
    assert notes[0].startswith("The prompt is cut: CLIP reads 77 of 111 tokens, up to '... ")
    assert notes[0].endswith("; T5 reads all of it.")


def test_the_negative_prompt_and_one_of_many(tiny_folders: Folders) -> None:
    pipe = opened(tiny_folders("lumina2"))
    (note,) = pipe.encode("a boat", LETTERS).notes
    assert note.startswith("The negative prompt is cut: Gemma2 reads 256 of ")
    (note,) = pipe.encode(["a boat", LETTERS], "").notes
    assert note.startswith("Prompt 2 is cut: ")
    (note,) = pipe.encode("boat", LETTERS).notes  # which holds the prompt
    assert note.startswith("The negative prompt is cut")


def test_the_cache_tells_it_too(tiny_folders: Folders, tmp_path: Path) -> None:
    folder = tiny_folders("sd3")
    first = opened(folder, cache_dir=tmp_path).encode(LETTERS).notes
    shared_cache(tmp_path)._ram.clear()  # from disk
    again = opened(folder, cache_dir=tmp_path)
    stages = list(again.manager.timeline.stages)
    assert again.encode(LETTERS).notes == first != []
    assert list(again.manager.timeline.stages) == stages, "no encoder ran"
    assert again.encode("short").notes == []


def test_families_with_tokenizers_of_their_own(tmp_path: Path) -> None:
    newbie = opened(newbie_folders.official(tmp_path / "newbie"))
    (note,) = newbie.encode(LETTERS).notes
    assert note.startswith("The prompt is cut: Gemma 3 4B reads 512 of ")
    pyramid = opened(pyramid_folders.save("flux", tmp_path / "pyramid"))
    (note,) = pyramid.encode(LETTERS).notes
    assert "CLIP reads 77 of " in note and "T5 reads 128 of " in note
    assert pyramid.encode("a boat", "blurry").notes == newbie.encode("a boat", "blurry").notes == []


def test_a_tokenizer_in_comfyuis_files_tells_it(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the sentencepiece package is not installed")
    import newbie_folders as files
    from ballast.pipelines.models.newbie.tokenizers import embedded_tokenizer

    path = files.piece_file(tmp_path / "j.safetensors", bos_id=0, pad_id=1, eos_id=2, unk_id=3)
    plain, listener = embedded_tokenizer(path), Truncation()
    heard = listener.attach(embedded_tokenizer(path), "Jina")
    text = "a red boat on the water, a red boat on the water"
    given = {"max_length": 8, "padding": True, "truncation": True, "return_tensors": "pt"}
    assert torch.equal(heard([text], **given)["input_ids"], plain([text], **given)["input_ids"])
    (note,) = listener.notes("NewBie", [text], [""], "")
    whole = plain([text], max_length=1000)["attention_mask"].sum()
    assert note.startswith(f"The prompt is cut: Jina reads 8 of {whole} tokens, up to '... ")


# Words that it does not know


def test_words_that_the_demo_does_not_know() -> None:
    pipe = opened(DEMO)
    assert pipe.encode("A red circle on a blue background, left").notes == []
    (note,) = pipe.encode("\u4e00\u4e2a\u7ea2\u8272\u7684\u5706").notes
    assert note.startswith("Shapes demo knows none of the prompt's words. It knows few words, in English only: ")
    (note,) = pipe.encode("a cat on the mat").notes
    assert note.startswith("Shapes demo does not know: cat, mat. It knows few words")
    assert pipe.encode("", "cat").notes == []


# A negative prompt without effect


@pytest.mark.parametrize("guidance", few([None, 0.5, 1.0, 3.0], 1.0))
@pytest.mark.parametrize("name", few(tiny.FAMILIES, *SOME))
def test_a_negative_prompt_without_effect_is_told(name: str, guidance: float | None, tiny_folders: Folders) -> None:
    """As the pictures have it: told where another negative prompt gives the same one, and nowhere else."""
    family = tiny.FAMILIES[name]
    pipe = opened(tiny_folders(name), keep=True)
    width, height = family.size
    run = {"width": width, "height": height, "steps": 2, "guidance": guidance, "frames": family.frames}
    options = {key: value for key, value in family.call_kwargs.items() if not key.startswith("decode_")}
    conds = [pipe.encode("a red boat", text, **family.encode_kwargs) for text in ("blurry, grey", "bright colours")]
    one, other = (pipe.sample(cond, **run, **options) for cond in conds)
    told = [note for note in [*conds[0].notes, *pipe.sampling_notes(conds[0], guidance)] if "no effect" in note]
    assert len(told) == bool((one - other).abs().max() < 1e-6)
    bare = pipe.encode("a red boat", "", **family.encode_kwargs)
    assert not [note for note in [*bare.notes, *pipe.sampling_notes(bare, guidance)] if "no effect" in note]


def test_families_with_loops_of_their_own_tell_it(tmp_path: Path) -> None:
    newbie = opened(newbie_folders.official(tmp_path / "newbie"))
    cond = newbie.encode("a boat", "blurry")
    assert newbie.sampling_notes(cond) == newbie.sampling_notes(cond, 2.0, cfg_trunc=0.25) == []
    assert newbie.sampling_notes(cond, 1.0)[0].startswith("The negative prompt has no effect: guidance is 1. ")
    assert "cfg_trunc is 0" in newbie.sampling_notes(cond, 4.0, cfg_trunc=0.0)[0]
    pyramid = opened(pyramid_folders.save("flux", tmp_path / "pyramid"))
    cond = pyramid.encode("a boat", "blurry")
    assert pyramid.sampling_notes(cond) == pyramid.sampling_notes(cond, 1.0) == []
    assert len(pyramid.sampling_notes(cond, 1.0, video_guidance=0.0)) == 1


# Where it is seen


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(running, "show_text", lambda node, text: texts.append(text))
    return texts


@pytest.fixture(scope="module")
def reference(tiny_folders: Folders) -> Iterator[Any]:
    link = Path(folder_paths.get_folder_paths("diffusers")[0]) / "noted"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tiny_folders("sd3"), target_is_directory=True)
    yield run_node(LoadPipeline, pipeline="noted", device="cpu").result[0]
    link.unlink()


def test_the_nodes_show_the_notes_once(reference: Any, shown: list[str]) -> None:
    words = {"pipeline": reference, "prompt": f"{LETTERS} noted", "negative_prompt": "blurry"}
    cond = run_node(TextEncode, **words).result[0]
    (note,) = cond.notes
    first = shown[-1]
    assert first.startswith(f"{note}\n") and first.count(note) == 1
    run_node(TextEncode, **words)
    assert shown[-1] == f"{note}\nfrom the cache, no encoder loaded"
    size = {"pipeline": reference, "conditioning": cond, "width": 32, "height": 32, "steps": 1}
    run_node(Sampler, **size, guidance=1.0)
    assert shown[-1].count("The negative prompt has no effect: guidance is 1. Above 1") == 1
    run_node(Sampler, **size, guidance=4.0)
    assert "no effect" not in shown[-1]


def test_the_command_line_prints_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = ["generate", "--model", str(DEMO), "--device", "cpu", "--out", str(tmp_path / "a.png"), "--steps", "1"]
    run += ["--width", "64", "--height", "64", "--negative", "blue", "--guidance", "1", "--prompt", "cat"]
    assert cli.main(run) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: ")]
    assert [line.split(":")[1].strip()[:20] for line in notes] == ["Shapes demo knows no", "The negative prompt "]


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ((96, 64), None),
        ((100, 71), "The picture is cropped to 96 x 64, from 100 x 71."),
        ((16, 31), "The picture is cropped to 16 x 24, from 16 x 31."),
    ],
)
def test_vae_encode_says_what_it_cropped_to(size: tuple[int, int], says: str | None, tmp_path: Path) -> None:
    width, height = size
    pipe = opened(newbie_folders.official(tmp_path / "newbie"))
    image = torch.rand(1, height, width, 3)
    latents = pipe.encode_image(image)
    assert cropping(image, latents) == ([says] if says else [])
    if says:  # what it says it is of, it is of
        assert list(pipe.decode(latents).shape[1:3]) == [int(n) for n in says.split(", ")[0].split()[-1:-4:-2]]


def test_vae_encode_shows_it(reference: Any, shown: list[str]) -> None:
    run_node(VaeEncode, pipeline=reference, image=torch.rand(1, 70, 64, 3))
    assert shown[-1].startswith("The picture is cropped to 64 x 64, from 64 x 70.\n")
    run_node(VaeEncode, pipeline=reference, image=torch.rand(1, 64, 64, 3))
    assert "cropped" not in shown[-1]


# Listening


def test_listening_changes_nothing_that_is_read() -> None:
    plain, heard = tokenizer(77), Truncation().attach(tokenizer(77), "CLIP")
    given = {"padding": "max_length", "max_length": 20, "truncation": True, "return_tensors": "pt"}
    for texts in ("a boat", ["a boat", "a red boat on the wide water"]):
        one, other = plain(texts, **given), heard(texts, **given)
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.attention_mask, other.attention_mask)
    assert heard("a boat").input_ids == plain("a boat").input_ids
    assert type(heard).__name__ == type(plain).__name__ and isinstance(heard, type(plain))


def test_titles_of_encoders() -> None:
    import transformers

    names = {
        "CLIPTextModelWithProjection": "CLIP",
        "T5EncoderModel": "T5",
        "UMT5EncoderModel": "UMT5",
        "Gemma2Model": "Gemma2",
        "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VL",
        "Qwen3ForCausalLM": "Qwen3",
        "LlamaModel": "Llama",
    }
    assert {name: encoder_title(getattr(transformers, name)) for name in names} == names
