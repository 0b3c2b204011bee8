"""CI, publishing, hooks and issue forms: they say what the project says."""

from __future__ import annotations

import json
import re
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def steps(workflow: Any) -> list[Any]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("ascii"), re.MULTILINE))


@each_workflow
def test_actions_are_pinned_and_may_only_read(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if "uses" in step:
            assert re.search(r"@[0-9a-f]{40}$", step["uses"]), step["uses"]


def test_all_systems_run_the_targets_of_the_makefile() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "tests.yml")
    systems = workflow["jobs"]["tests"]["strategy"]["matrix"]["os"]
    assert {name.split("-")[0] for name in systems} == {"ubuntu", "windows", "macos"}
    called = [step["run"].split()[1] for step in steps(workflow) if step.get("run", "").startswith("make ")]
    assert called == ["demo", "test"] and set(called) <= targets()


def test_hosts_are_the_oldest_one_that_of_the_tests_and_the_newest() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "hosts.yml")
    hosts = workflow["jobs"]["host"]["strategy"]["matrix"]["include"]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    oldest = re.findall(r'^requires-comfyui = ">=(.+)"$', text, re.MULTILINE)
    assert [f"v{oldest[0]}", "master"] == [hosts[0]["comfyui"], hosts[-1]["comfyui"]]
    assert hosts[0]["python"] == re.findall(r'^requires-python = ">=(.+)"$', text, re.MULTILINE)[0]
    assert {host["os"].split("-")[0] for host in hosts} == {"ubuntu", "windows", "macos"}
    assert workflow[True]["schedule"]
    for step in steps(workflow):
        for path in re.findall(r"pytest (\S+)", step.get("run", "")):
            assert (ROOT / path).is_file()


def test_only_a_tag_that_passed_the_tests_is_published() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "publish.yml")
    assert workflow[True] == {"push": {"tags": ["v*.*.*"]}}  # `on`, which YAML takes for a boolean
    job = workflow["jobs"]["publish"]
    assert job["needs"] == "tests" and workflow["jobs"]["tests"]["uses"] == "./.github/workflows/tests.yml"
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.search(r'^version = "\d+\.\d+\.\d+"$', text, re.MULTILINE), "the form that the job looks for"
    publisher = re.findall(r'^PublisherId = "(.+)"$', text, re.MULTILINE)
    assert re.findall(r"owner == '(.+)'", job["if"]) == publisher


def test_hooks_are_those_of_make_lint() -> None:
    hooks = {hook["id"]: hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    wanted = re.findall(r'"(ruff==[^"]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert hooks["ruff-check"]["additional_dependencies"] == wanted
    assert hooks["ruff-format"]["additional_dependencies"] == wanted
    command, target = hooks["import-linter"]["entry"].split()
    assert command == "make" and target in targets()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_whole(path: Path) -> None:
    form = load(path)
    if path.name == "config.yml":
        assert all(set(link) == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_a_bug_report_asks_for_the_doctor() -> None:
    (doctor,) = [field for field in load(FORMS[0].parent / "bug.yml")["body"] if field.get("id") == "doctor"]
    assert doctor["validations"]["required"] and "`ballast doctor`" in doctor["attributes"]["label"]


def test_what_runs_nothing_in_comfyui_is_not_shipped() -> None:
    ignored = (ROOT / ".comfyignore").read_text("ascii").split()
    assert {".ci/", ".github/", ".pre-commit-config.yaml", "tests/", "bench/", "Makefile"} <= set(ignored)
    assert all((ROOT / name).exists() for name in ignored)


def test_the_pack_of_the_registry_is_small() -> None:
    """Counted as `comfy node pack` does: files of the repository that .comfyignore does not name, zipped."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no clone of git")
    ignored = tuple((ROOT / ".comfyignore").read_text("ascii").split())
    files = [name for name in listed.stdout.split("\0") if name and not name.startswith(ignored)]
    assert len(files) > 500
    assert sum(len(zlib.compress((ROOT / name).read_bytes())) for name in files) < 4_000_000


def test_the_configs_of_published_models_are_shipped() -> None:
    """By pip, as a pattern says, and by the registry, as nothing keeps them out."""
    shipped = [path.relative_to(ROOT) for path in (ROOT / "pipelines" / "files" / "single" / "facts").rglob("*.json")]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    patterns = re.search(r"package-data]\nballast = (\[.*\])", project)
    assert patterns
    found = {path.relative_to(ROOT) for pattern in json.loads(patterns[1]) for path in ROOT.glob(pattern)}
    assert shipped and set(shipped) <= found
    assert sum((ROOT / path).stat().st_size for path in shipped) < 100_000
    ignored = (ROOT / ".comfyignore").read_text("ascii").split()
    assert not [path for path in shipped if str(path).startswith(tuple(ignored))]
