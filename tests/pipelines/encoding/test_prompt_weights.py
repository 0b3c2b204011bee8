"""Prompt weights: read as ComfyUI reads them, and applied to what stock makes of the prompt without brackets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from ballast.pipelines.encoding.conditioning import Conditioning
from ballast.pipelines.encoding.prompt_weights import WeightedPrompt, Weighting
from ballast.pipelines.stages.batch_runs import BatchRuns, Item
from ballast.pipelines.stages.encode import text_of
from host import find_host, host_python
from tiny_parts import TEXT_TOKENS, tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Folders = Callable[[str], Path]
# A prompt, and its parts whose weight is not 1. The host's own function reads them alike, see the last test.
READ: list[tuple[str, str, dict[str, float]]] = [
    ("a (red:1.3) boat", "a red boat", {"red": 1.3}),
    ("a (red) boat", "a red boat", {"red": 1.1}),
    ("((red)) boat", "red boat", {"red": 1.21}),
    ("(a (red:1.2) boat:0.5)", "a red boat", {"a ": 0.5, "red": 1.2, " boat": 0.5}),
    ("(a (red) boat:0.5)", "a red boat", {"a ": 0.5, "red": 0.55, " boat": 0.5}),
    (r"a \(red\) boat", "a (red) boat", {}),
    (r"a (red \(dark\):1.4) boat", "a red (dark) boat", {"red (dark)": 1.4}),
    ("(16:9)", "16", {"16": 9.0}),
    ("(note: red)", "note: red", {"note: red": 1.1}),
    ("(a:b:1.5)", "a:b", {"a:b": 1.5}),
    ("(:1.5)", ":1.5", {":1.5": 1.1}),
    ("(red:-0.5) ()boat", "red boat", {"red": -0.5}),
    ("a (red", "a (red", {}),
    ("a) (red:2)", "a) (red:2)", {}),
    ("(a (red:2)", "a (red", {"a (red": 2.0}),
    ("a boat: 1.3, [red]", "a boat: 1.3, [red]", {}),
]
FAMILIES = ("flux", "sd3", "wan")  # T5; two CLIPs and T5; UMT5, whose padding is cleared
PROMPT, WORDS, RED = "a (red:1.5) boat", "a red boat", range(2, 5)  # the tiny tokenizers take a token for each letter


@pytest.mark.parametrize(("prompt", "text", "weights"), READ)
def test_a_prompt_is_read_as_the_host_reads_it(prompt: str, text: str, weights: dict[str, float]) -> None:
    found = WeightedPrompt.read(prompt)
    assert found.text == text
    assert {text[start:end]: weight for start, end, weight in found.spans} == pytest.approx(weights)


@pytest.mark.parametrize("prompt", ["(red:nan)", "(red:inf)", "(" * 200 + "red" + ")" * 200])
def test_a_weight_that_is_none_is_refused_in_one_line(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"^a prompt has [^\n]*\.$"):
        WeightedPrompt.read(prompt)


def stock_embeddings(folder: Path, name: str, words: str) -> dict[str, torch.Tensor]:
    """What the unmodified class makes of a prompt: the states of its tokens, and pooled ones if it has any."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    made = pipe.encode_prompt(**{"prompt": words, **tiny.FAMILIES[name].encode_kwargs} | more_texts(name))
    names = {"flux": ("prompt_embeds", "pooled_prompt_embeds"), "wan": ("prompt_embeds",)}
    kept = names.get(name, ("prompt_embeds", "", "pooled_prompt_embeds"))
    return {each: tensor for each, tensor in zip(kept, made, strict=False) if each}


def more_texts(name: str) -> dict[str, Any]:
    return {"flux": {"prompt_2": None}, "sd3": {"prompt_2": None, "prompt_3": None}}.get(name, {})


def moved(states: torch.Tensor, empty: torch.Tensor, places: Sequence[int], weight: float) -> torch.Tensor:
    """The rule, written down once more."""
    found = states.clone()
    found[:, places] = empty[:, places] + weight * (states[:, places] - empty[:, places])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_states_are_moved_from_those_of_the_empty_prompt(name: str, tiny_folders: Folders) -> None:
    folder, options = tiny_folders(name), tiny.FAMILIES[name].encode_kwargs
    plain, empty = (stock_embeddings(folder, name, words) for words in (WORDS, ""))
    pipe = ballast.open_pipeline(folder, device="cpu")
    found = pipe.encode(PROMPT, "(blurry:0.5)", **options)
    clips = 77 if name == "sd3" else 0  # tokens of CLIP, before those of T5
    places = [*RED, *(clips + at for at in RED)] if clips else list(RED)
    expected = moved(plain["prompt_embeds"], empty["prompt_embeds"], places, 1.5)
    torch.testing.assert_close(found.tensors["prompt_embeds"], expected, atol=1e-6, rtol=1e-5)
    assert (expected - plain["prompt_embeds"]).abs().max() > 1e-2
    others = [at for at in range(expected.shape[1]) if at not in places]
    assert torch.equal(
        found.tensors["prompt_embeds"][:, others], pipe.encode(WORDS, "", **options).tensors["prompt_embeds"][:, others]
    )
    blurry = moved(stock_embeddings(folder, name, "blurry")["prompt_embeds"], empty["prompt_embeds"], range(6), 0.5)
    part = found.tensors["negative_prompt_embeds"][:, :6]
    torch.testing.assert_close(part, blurry[:, :6], atol=1e-6, rtol=1e-5)
    if "pooled_prompt_embeds" in plain:
        torch.testing.assert_close(found.tensors["pooled_prompt_embeds"], plain["pooled_prompt_embeds"])
    assert found.notes == ["Brackets are weights: 'red' 1.5, 'blurry' 0.5. Write \\( and \\) for plain ones."]


def test_brackets_without_weights_run_nothing_more(tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 1 and plain brackets are the bits of stock; with `prompt_weights=False` all are plain."""
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    options = tiny.FAMILIES["flux"].encode_kwargs
    plain = pipe.encode("a (red:1.5) boat", "", prompt_weights=False, **options)
    stock = stock_embeddings(tiny_folders("flux"), "flux", "a (red:1.5) boat")["prompt_embeds"]
    torch.testing.assert_close(plain.tensors["prompt_embeds"], stock)
    assert plain.notes == []
    ones = pipe.encode("a (red:1) boat", "", **options)
    assert torch.equal(ones.tensors["prompt_embeds"], pipe.encode(WORDS, "", **options).tensors["prompt_embeds"])
    pipe.cache.clear()
    monkeypatch.setattr(Weighting, "within", None)
    found = pipe.encode(r"a \(red:1.5\) boat", "", **options)
    assert torch.equal(found.tensors["prompt_embeds"], plain.tensors["prompt_embeds"])


def test_weights_are_part_of_what_is_kept(tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    first, second, again = (pipe.encode(f"a (red:{n}) boat", "").tensors["prompt_embeds"] for n in (1.5, 0.5, 1.5))
    assert torch.equal(first, again) and not torch.equal(first, second)
    monkeypatch.setattr(type(pipe.model), "encode", None)
    assert torch.equal(pipe.encode("a (red:0.5) boat", "").tensors["prompt_embeds"], second)


def test_prompts_of_one_run_have_weights_of_their_own(tiny_folders: Folders) -> None:
    """The same words twice, and texts beside the prompt."""
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="cpu")
    alone = [pipe.encode(prompt, "").tensors["prompt_embeds"] for prompt in (PROMPT, "a (red:0.5) boat", "a lake")]
    found = pipe.encode([PROMPT, "a (red:0.5) boat", "a lake"], "").tensors["prompt_embeds"]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-6, rtol=1e-5)
    third = pipe.encode("a lake", "", prompt_3="a (red:2) boat").tensors["prompt_embeds"]
    plain = pipe.encode("a lake", "", prompt_3=WORDS).tensors["prompt_embeds"]
    empty = pipe.encode("", "").tensors["prompt_embeds"]
    torch.testing.assert_close(third, moved(plain, empty, [77 + at for at in RED], 2.0), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"^'a red boat' has several weights. Encode these prompts one by one.$"):
        pipe.encode(WORDS, PROMPT)


def test_states_that_are_normed_later_are_not_weighted() -> None:
    """By classes of Stable Diffusion 1 and 2 with `clip_skip`; ComfyUI norms them first."""
    told = "^clip_skip and prompt weights: some model norms the states after they are weighted. Leave one out.$"
    model: Any = SimpleNamespace(encoders=[], title="some model", pipeline_class=diffusers.StableDiffusionPipeline)
    with pytest.raises(ValueError, match=told):
        text_of(model, PROMPT, "", {"clip_skip": 1})
    assert text_of(model, PROMPT, "", {"clip_skip": None}).weighted and not text_of(model, WORDS, "", {}).weighted
    model.pipeline_class = diffusers.StableDiffusionXLPipeline
    assert text_of(model, PROMPT, "", {"clip_skip": 1}).weighted


def test_encoders_without_a_rule_read_brackets_as_words(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("lumina2"), device="cpu")
    literal = pipe.encode(PROMPT, "")
    assert torch.equal(
        literal.tensors["prompt_embeds"], pipe.encode(PROMPT, "", prompt_weights=False).tensors["prompt_embeds"]
    )
    assert literal.notes == ["Prompt weights are read as plain text here, as in (red:1.5). Remove them."]


def test_what_only_the_page_knows_is_said_to_be_plain_text(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    for prompt, told in (
        ("a boat, embedding:bright", "embedding:bright. Pipelines load no embeddings. Remove it."),
        ("a {red|blue} boat", "{red|blue}. Only ComfyUI's page chooses among words. Write one of them."),
    ):
        assert pipe.encode(prompt, "").notes == [f"This is read as plain text: {told}"]


def test_encoders_that_take_turns_in_little_room(tiny_folders: Folders, sim: ModuleType) -> None:
    """On the simulated card, where a dry run plans the encoders, and each is loaded once for all prompts."""
    prompts = [PROMPT, "a lake (at night:0.7)", "a lake"]
    on_cpu = ballast.open_pipeline(tiny_folders("sd3"), device="cpu")
    expected = [on_cpu.encode(prompt, "").tensors["prompt_embeds"] for prompt in prompts]
    on_cpu.cache.clear()
    pipe = ballast.open_pipeline(tiny_folders("sd3"), device="sim", vram="6MB")
    torch.testing.assert_close(pipe.encode(PROMPT, "").tensors["prompt_embeds"], expected[0], atol=1e-6, rtol=1e-5)
    (stage,) = pipe.manager.timeline.stages
    assert stage.own_peak_bytes <= stage.planned.peak_vram_bytes <= 1.05 * stage.own_peak_bytes
    pipe.cache.clear()
    made = BatchRuns(pipe).encode([Item(prompt, "") for prompt in prompts])
    assert len(pipe.manager.timeline.stages) == 1 + len(pipe.encoders), "once each, for all prompts"
    for cond, states in zip(made, expected, strict=True):
        assert isinstance(cond, Conditioning), cond
        torch.testing.assert_close(cond.tensors["prompt_embeds"], states, atol=1e-6, rtol=1e-5)


def unigram() -> PreTrainedTokenizerFast:
    """A tokenizer like that of T5: a token has the blank before its word."""
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": -9.0, "\u2581a": -1.0, "\u2581red": -1.0, "\u2581boat": -1.0}
    core = Tokenizer(models.Unigram([*pieces.items(), (",", -2.0), ("\u2581", -3.0)], unk_id=2))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("a (red:1.5) boat", "a red boat", [1, 1.5, 1]),
        ("a( red:1.5) boat", "a red boat", [1, 1.5, 1]),
        ("A  (Red:1.5) \uff0c boat", "a red, boat", [1, 1.5, 1, 1]),  # as a pipeline cleans it
        ("(red:1.5), boat", "a red, boat", [1, 1.5, 1, 1]),  # with words around it
        ("(green:1.5)", "a red boat", [1, 1, 1]),
    ],
)
def test_tokens_have_the_weights_of_their_words(prompt: str, text: str, expected: list[float]) -> None:
    weighting = Weighting([WeightedPrompt.read(prompt)])
    weighting.tokenized(PreTrainedTokenizerFast, unigram(), [text], {"padding": True})
    assert weighting._seen[0].weights == [expected]


def test_a_prompt_that_is_not_found_is_refused(tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    monkeypatch.setattr("ballast.pipelines.encoding.prompt_weights._alignment", lambda text, prompt: {})
    monkeypatch.setattr(Weighting, "_prompts_in", lambda self, texts: [None] * len(texts))
    told = r"^the weights of 'a red boat' cannot be placed: [^\n]*$"
    with pytest.raises(ValueError, match=told):
        pipe.encode(PROMPT, "")


# Reads prompts by the host's own functions, and encodes one by its own encoders with the weights of a diffusers folder.
HOST_SCRIPT = """
import json, sys
folder, texts, ids = sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
sys.path.insert(0, sys.argv[1])
del sys.argv[1:]
from comfy.cli_args import args
args.cpu = True
import torch
from comfy.clip_model import CLIPTextModel
from comfy.sd1_clip import SDClipModel, escape_important, token_weights, unescape_important
from comfy.text_encoders.t5 import T5
from safetensors.torch import load_file

def encode(name, kind, **more):
    config = json.load(open(f"{folder}/{name}/config.json"))
    if "dense_act_fn" in config:
        config["dense_act_fn"] = "gelu_pytorch_tanh"  # another name of gelu_new
    special = {"end": 3, "pad": 1}
    made = SDClipModel(textmodel_json_config=config, dtype=torch.float32, special_tokens=special, model_class=kind,
                       layer_norm_hidden_state=False, **more)
    own = load_file(f"{folder}/{name}/model.safetensors")
    for key, table in made.transformer.state_dict().items():
        if "token_embedding" in key:  # the host's is of 49408 tokens, whatever its config says
            own[key] = torch.cat([own[key], torch.zeros(len(table) - len(own[key]), table.shape[1])])
    missing = made.load_sd(own)
    assert not [each for each in missing.missing_keys if "embed_tokens" not in each], missing
    with torch.inference_mode():
        return made.encode_token_weights([[tuple(pair) for pair in ids[name]]])[0].tolist()

read = [[(unescape_important(part), w) for part, w in token_weights(escape_important(text), 1.0)] for text in texts]
states = {
    "text_encoder": encode("text_encoder", CLIPTextModel, layer="hidden", layer_idx=-2),
    "text_encoder_3": encode("text_encoder_3", T5),
}
print(json.dumps([read, states]))
"""


@pytest.mark.host
def test_the_host_reads_and_encodes_alike(tiny_folders: Folders) -> None:
    """By functions of a real ComfyUI: all prompts above, and the states of two of its encoders."""
    if find_host() is None:
        pytest.skip("no ComfyUI: set COMFYUI_PATH, or put one in ~/ComfyUI")
    folder = tiny_folders("sd3")
    pairs: dict[str, list[tuple[int, float]]] = {}
    for name, length in (("text_encoder", 77), ("text_encoder_3", TEXT_TOKENS)):
        padded = tokenizer()(WORDS, padding="max_length", max_length=length)["input_ids"]
        pairs[name] = [(number, 1.5 if at in RED else 1.0) for at, number in enumerate(padded)]
    given = [str(find_host()), str(folder), json.dumps([prompt for prompt, _, _ in READ]), json.dumps(pairs)]
    ran = subprocess.run([host_python(), "-c", HOST_SCRIPT, *given], capture_output=True, text=True, timeout=300)
    if "ModuleNotFoundError" in ran.stderr:
        pytest.skip(f"{host_python()} lacks what ComfyUI needs: set COMFYUI_PYTHON")
    assert ran.returncode == 0, ran.stderr
    read, states = json.loads(ran.stdout.splitlines()[-1])
    for (prompt, _, _), parts in zip(READ, read, strict=True):
        found = WeightedPrompt.read(prompt)
        assert found.text == "".join(part for part, _ in parts)
        letters = [weight for part, weight in parts for _ in part]
        assert [found.weight_at(at) for at in range(len(found.text))] == letters, prompt
    made = ballast.open_pipeline(folder, device="cpu").encode(PROMPT, "", **tiny.FAMILIES["sd3"].encode_kwargs)
    clip, t5 = (torch.tensor(states[name])[0] for name in pairs)
    ours = made.tensors["prompt_embeds"][0]
    torch.testing.assert_close(ours[:77, : clip.shape[1]], clip, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours[77:, : t5.shape[1]], t5, atol=1e-5, rtol=1e-4)
