"""ComfyUI's own tokenizers, as models whose configs come with the pack are given them: the numbers of the published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from ballast.nodes.shared.folders import _TOKENIZERS
from ballast.pipelines.files.single.published import FACTS
from host import find_host

HOST = find_host()
NUMBERS = {
    "clip": [49406, 320, 1125, 539, 320, 2368, 49407],
    "t5": [3, 9, 1202, 13, 3, 9, 1712, 1],
    "qwen": [64, 6548, 315, 264, 8251],
    "llama": [128000, 64, 6685, 315, 264, 8415],
}
CHAT = [151644, 872, 198, 64, 8251, 151645, 198, 151644, 77091, 198]  # what Qwen3 reads of a question
USES = [
    (folder.name, name, kind)
    for folder in sorted((FACTS / "models").iterdir())
    for name, (kind, _) in json.loads((folder / "model_index.json").read_text("utf-8"))["_tokenizers"].items()
]

pytestmark = pytest.mark.host


@pytest.mark.parametrize(("model", "name", "kind"), USES)
def test_numbers_are_those_of_the_published_tokenizer(model: str, name: str, kind: str) -> None:
    if HOST is None or kind not in _TOKENIZERS:
        pytest.skip("no ComfyUI" if HOST is None else "it lies in the encoder's file")
    folder: Path = HOST / "comfy" / _TOKENIZERS[kind]
    if not {"tokenizer.json", "vocab.json"} & {path.name for path in folder.iterdir()}:
        pytest.skip("this ComfyUI lacks the words")
    index = json.loads((FACTS / "models" / model / "model_index.json").read_text("utf-8"))
    settings = index["_tokenizers"][name][1]
    made = getattr(transformers, index[name][1]).from_pretrained(folder, local_files_only=True, **settings)
    assert made("a photo of a cat").input_ids == NUMBERS[kind]
    assert made.padding_side == "right" and made.pad_token_id in (0, 49407, 151643, None)
    if "chat_template" in settings:
        asked = [{"role": "user", "content": "a cat"}]
        text = made.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, enable_thinking=True)
        assert made(text).input_ids == CHAT
