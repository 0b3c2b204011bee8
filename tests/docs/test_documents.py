"""README, docs/, CONTRIBUTING and the help pages: links, tables, words, and both languages saying the same."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
PAIRS = [READMES, *((f"docs/{name}", f"docs/zh/{name}") for name in PAGES)]
HELP = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "web" / "docs").rglob("*.md"))
DOCUMENTS = [*(name for pair in PAIRS for name in pair), "CONTRIBUTING.md", "CHANGELOG.md", "SKILL.md", *HELP]
FORMS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*.yml"))
REPOSITORY = "https://github.com/comfyui-ballast/ComfyUI-Ballast/blob/main/"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
PLANNED = re.compile(r"^<!-- rows: .*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)  # the same in both languages
CODE = re.compile(r"`([^`]+)`")

each_document = pytest.mark.parametrize("name", DOCUMENTS)
each_pair = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[pair[0] for pair in PAIRS])


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def prose(text: str) -> str:
    """The text without its code."""
    return CODE.sub("", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings."""
    found: Counter[str] = Counter()
    names = set()
    for head in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def links(text: str) -> list[str]:
    plain = prose(text)
    return [
        *re.findall(r"\]\(([^)\s]+)\)", plain),
        *re.findall(r"^\[[^\]]+\]: (\S+)", plain, re.MULTILINE),
        *re.findall(r"""(?:src|href)=["']([^"']+)""", plain),
    ]


def target(name: str, link: str) -> tuple[Path, str]:
    """The file and the anchor that a link in a document leads to."""
    path, _, anchor = unquote(link).partition("#")
    return ((ROOT / name).parent / path).resolve() if path else ROOT / name, anchor


def assert_leads_somewhere(file: Path, anchor: str, link: str) -> None:
    assert file.is_relative_to(ROOT) and file.exists(), link
    if anchor:
        assert anchor in anchors(file.read_text("utf-8")), f"{link}: no such heading"


# Links


@each_document
def test_links_lead_somewhere(name: str) -> None:
    for link in links(read(name)):
        if not re.match(r"\w+:", link):
            assert_leads_somewhere(*target(name, link), link)


@pytest.mark.parametrize("name", [*DOCUMENTS, *FORMS])
def test_links_to_this_repository_by_its_address_lead_somewhere(name: str) -> None:
    for link in re.findall(re.escape(REPOSITORY) + r"([^)\s]+)", read(name)):
        assert_leads_somewhere(*target("README.md", link), link)


@pytest.mark.parametrize("name", READMES)
def test_every_page_is_linked_from_the_readme(name: str) -> None:
    linked = {target(name, link)[0] for link in links(read(name)) if ":" not in link}
    folder = ROOT / "docs" if name == "README.md" else ROOT / "docs" / "zh"
    assert {folder / page for page in PAGES} <= linked


# The READMEs


@pytest.mark.parametrize("name", READMES)
def test_the_readme_is_short_and_begins_with_a_picture(name: str) -> None:
    lines = read(name).splitlines()
    assert len(lines) <= 120
    assert any(line.startswith("![") for line in lines[:13])
    for command in ("make demo", "make test"):
        assert any(line.startswith(command) for line in lines), command


@pytest.mark.parametrize("name", READMES)
def test_the_readme_puts_comfyui_before_the_command_line(name: str) -> None:
    text = read(name)
    assert text.index("git clone") < text.index("make demo")


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:2] == "| "]


def planned() -> dict[str, dict[str, str]]:
    """The table of models, whose rows the tests of their plans pin: by model and column."""
    table = rows(read("docs/models.md"))
    head = next(row for row in table if row[0] == "model")
    return {row[0]: dict(zip(head, row, strict=True)) for row in table if len(row) == len(head)}


def test_the_readme_has_the_figures_of_the_models() -> None:
    table = rows(read("README.md"))
    head = next(row for row in table if row[0] == "model")
    first = [row for row in table[table.index(head) + 2 :] if len(row) == len(head)]
    assert len(first) == 3
    for row in first:
        said = dict(zip(head, row, strict=True))
        del said["download"]
        assert said == {column: planned()[row[0]][column] for column in said}


def test_what_to_pick_says_what_the_planner_does() -> None:
    picks = [row for row in rows(read("docs/models.md")) if re.fullmatch(r"\d+ GB", row[0])]
    assert [row[0] for row in picks] == ["6 GB", "8 GB", "12 GB", "16 GB", "24 GB"]
    for card, first, also, _ in picks:
        for pick in (first, *also.split("; ")):
            model, figures = pick.rsplit(": ", 1)
            assert planned()[model][card] == figures, pick


# Tables and words


@each_document
def test_tables_have_as_many_cells_in_each_row(name: str) -> None:
    for table in re.findall(r"(?:^ *\|.*\n)+", FENCE.sub("", read(name)), re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", CODE.sub("", line))) for line in table.splitlines()}
        assert len(widths) == 1, table
        assert re.fullmatch(r" *\|(?: :?-+:? \|)+", table.splitlines()[1]), table


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_words_are_those_of_the_field(name: str) -> None:
    """Activations, dry run, layer by layer: what readers of other libraries know."""
    said = prose(read(name)).lower()
    for word in ("rehears", "what it works in", "what they work in", "leaf by leaf", "\u9884\u6f14"):
        assert word not in said, word


@pytest.mark.parametrize("name", ["docs/developing.md", "docs/how-it-works.md", "CONTRIBUTING.md"])
def test_developers_find_what_they_are_sent_to(name: str) -> None:
    text = FENCE.sub("", read(name))
    paths = {span for span in CODE.findall(text) if re.fullmatch(r"[\w.-]+/[\w./-]*\w/?|\w+/\w+/", span)}
    paths = {path for path in paths if not re.search(r"NAME|ID\b|Scripts", path)}
    assert len(paths) > 6
    assert not [path for path in paths if not (ROOT / path).exists()]
    named = re.findall(r"`(\w+)`(?: and `(\w+)`)? (?:in|of|from)\s+`([\w/]+\.py)`", text)
    assert len(named) >= 3 or name == "docs/how-it-works.md"
    for *names, path in named:
        assert all(re.search(rf"\b{each}\b", read(path)) for each in names if each), path


# Both languages


def outline(text: str) -> dict[str, list[str]]:
    plain = FENCE.sub("", text)
    return {kind: re.findall(kind, plain, re.MULTILINE) for kind in (r"^#+ ", r"^\|", r"^ *(?:- |\d\. )", r"!\[")}


def code_blocks(text: str) -> list[str]:
    """Code without what is translated: comments, and what a folder is for in a map of folders."""
    blocks = [re.sub(r" *#.*$", "", block, flags=re.MULTILINE) for block in FENCE.findall(text)]
    return [re.sub(r"^(\w+/) {2,}.*$", r"\1", block, flags=re.MULTILINE) for block in blocks]


def spans(text: str) -> set[str]:
    """Code in lines of text: options, paths, messages."""
    return {re.sub(r"\s+", " ", span) for span in CODE.findall(FENCE.sub("", text))}


def figures(text: str) -> list[str]:
    """Numbers, in the order in which tables and code have them."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return re.findall(r"\d[\d.]*", "\n".join([*lines, *FENCE.findall(text)]))


def in_english(path: Path) -> Path:
    """The English twin of a Chinese file."""
    name = path.relative_to(ROOT).as_posix()
    name = re.sub(r"^docs/zh/", "docs/", name).replace("README.zh-CN.md", "README.md").replace("-zh.jpg", ".jpg")
    return ROOT / re.sub(r"^web/docs/(\w+)/zh\.md$", r"web/docs/\1.md", name)


def test_every_page_has_a_twin() -> None:
    assert sorted(path.name for path in (ROOT / "docs" / "zh").glob("*.md")) == PAGES
    assert len(PAGES) >= 7
    assert not [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("docs", "zh")]


@each_pair
def test_twins_lead_to_each_other(english: str, chinese: str) -> None:
    for name, other in ((english, chinese), (chinese, english)):
        top = read(name).split("\n## ")[0]
        assert ROOT / other in [target(name, link)[0] for link in links(top)]


@each_pair
def test_twins_have_the_same_outline_and_figures(english: str, chinese: str) -> None:
    assert outline(read(english)) == outline(read(chinese))
    assert figures(read(english)) == figures(read(chinese))


@each_pair
def test_twins_have_the_same_code_and_paths(english: str, chinese: str) -> None:
    one, other = read(english), read(chinese)
    assert code_blocks(one) == code_blocks(other)
    assert spans(one) == spans(other)


@each_pair
def test_twins_link_to_the_same(english: str, chinese: str) -> None:
    top = len(links(read(english).split("\n## ")[0])) and 1  # the link to the twin itself
    one = [target(english, link)[0] for link in links(read(english))[top:] if ":" not in link]
    other = [in_english(target(chinese, link)[0]) for link in links(read(chinese))[top:] if ":" not in link]
    assert Counter(one) == Counter(other)


@each_pair
def test_each_is_in_its_language(english: str, chinese: str) -> None:
    assert not CHINESE.search(read(english).replace("\u7b80\u4f53\u4e2d\u6587", ""))
    untranslated = re.findall(r"(?:[A-Za-z',;-]+ ){8,}", prose(read(chinese)).replace("*", ""))
    assert not untranslated
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\]\([^)]*\)", "]", prose(PLANNED.sub("", read(english)))))
    assert len(CHINESE.findall(prose(PLANNED.sub("", read(chinese))))) > len(words), "something is not translated"
