"""`ballast batch --ray`: the results of a run on one machine, whatever becomes of the workers. Needs Ray."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ballast.commands.main
import numpy as np
import psutil
import pytest
from ballast.commands import results, workers
from ballast.commands.request import Request
from ballast.memory import simulated
from places import ROOT

ray = pytest.importorskip("ray", reason='needs Ray: pip install -e ".[ray]"')
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(simulated.supported() is not None, reason=str(simulated.supported())),
]
DEMO = ROOT / "demo" / "shapes"
COLOURS, SHAPES = ("red", "green", "blue", "yellow", "white"), ("circle", "square", "triangle", "circle, left")


@pytest.fixture(autouse=True)
def _workers_find_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where it is installed."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "ballast").symlink_to(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    yield
    assert not ray.is_initialized()


def lines_of(path: Path, count: int, different: int = 20) -> Path:
    prompts = [f"a {colour} {shape}" for shape in SHAPES for colour in COLOURS][:different]
    lines = [{"prompt": prompts[number % len(prompts)], "seed": number} for number in range(count)]
    lines[count // 2] = {"prompt": "x", "steps": 0}
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def batch(lines: Path, out: Path, *more: str) -> int:
    given = ["batch", str(lines), "--model", str(DEMO), "--out", str(out), "--device", "sim", "--steps", "2"]
    return ballast.commands.main.main([*given, *more])


def seen(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.png")}


def test_a_worker_dies_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 lines on two simulated cards: 39 results once, bit by bit those of one machine, and one line is told."""
    lines, out = lines_of(tmp_path / "prompts.jsonl", 40), tmp_path / "out"
    assert batch(lines, tmp_path / "alone") == 1
    capsys.readouterr()
    killed: list[int] = []

    def kill() -> None:
        while len(seen(out)) < 8:
            time.sleep(0.02)
        of_ray = [each for each in psutil.Process().children(recursive=True) if "ray::Worker" in each.name()]
        of_ray = of_ray or [p for p in psutil.Process().children(recursive=True) if "ray::" in " ".join(p.cmdline())]
        killed.append(of_ray[0].pid)
        of_ray[0].kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert batch(lines, out, "--ray", "--workers", "2") == 1
    killer.join(5)
    said = capsys.readouterr()
    assert killed and len(seen(out)) == 39
    assert seen(out) == seen(tmp_path / "alone")
    assert said.err.split("ballast: ")[1:] == ["line 21: steps is 0; it takes at least 1.\n"]
    assert "worker  machine" in said.out and "wrote 39 of 40 lines" in said.out


def test_ctrl_c_ends_all_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While both workers draw; what is written stays, and the next run goes on."""
    lines, out = lines_of(tmp_path / "prompts.jsonl", 12), tmp_path / "out"
    write = results.Result.write

    def stopped(self: results.Result, *given: object) -> object:
        if len(seen(out)) == 3:
            raise KeyboardInterrupt
        return write(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(results.Result, "write", stopped)
        assert batch(lines, out, "--ray", "--workers", "2") == 130
    told = [line for line in capfd.readouterr().err.splitlines() if line.strip() and "%" not in line]
    assert told == ["ballast: stopped"]
    assert not [each for each in psutil.Process().children(recursive=True) if "ray::" in " ".join(each.cmdline())]
    before = seen(out)
    assert len(before) == 3
    assert batch(lines, out, "--ray", "--workers", "2") == 1
    assert len(seen(out)) == 11 and seen(out).items() >= before.items()


def test_two_machines_and_the_time_of_the_driver(tmp_path: Path) -> None:
    """Workers on two nodes, of which neither writes anything; the driver takes at most 5 ms a line of its own."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        lines, out = lines_of(tmp_path / "prompts.jsonl", 20, different=1), tmp_path / "out"
        assert batch(lines, tmp_path / "alone") == 1
        spent: list[float] = []
        run = workers.Cluster.run

        def timed(self: workers.Cluster, *given: object) -> Iterator[object]:
            running = run(self, *given)  # type: ignore[arg-type]
            while True:
                began = time.thread_time()
                made = next(running, None)
                spent.append(time.thread_time() - began)
                if made is None:
                    return
                yield made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers.Cluster, "run", timed)
            assert batch(lines, out, "--ray", nodes.address, "--workers", "2") == 1
        assert seen(out) == seen(tmp_path / "alone")
        assert sum(spent) / 20 <= 0.005, f"{1000 * sum(spent) / 20:.2f} ms a line"
    finally:
        nodes.shutdown()


def test_a_thousand_lines_leave_nothing_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quick:
        """A worker that takes no time."""

        def __init__(self, *_: object) -> None:
            self.made = np.zeros((1, 256, 256, 3), np.float32)

        def about(self) -> tuple[str, str]:
            return "here", "none"

        def encode(self, requests: list[Request]) -> list[str]:
            return [""] * len(requests)

        def run(self, requests: list[Request], *_: object) -> tuple[list[workers.Drawn], float, int]:
            return [workers.Drawn(self.made)] * len(requests), 0.0, 0

        def seen(self) -> tuple[int, int, int]:
            return 0, 0, 0

    monkeypatch.setattr(workers, "Worker", Quick)
    cluster = workers.Cluster({"device": "sim"}, workers.LOCAL, 2, None)
    requests = [Request(f"a boat {number}", "", {}, {}, {}) for number in range(1000)]
    level = []
    try:
        for done, made in enumerate(cluster.run(requests, False)):
            assert made.images is not None and made.images.shape == (1, 256, 256, 3)
            if done in (200, 999):
                level.append(psutil.Process().memory_full_info().uss)  # its own, without Ray's shared memory
    finally:
        cluster.close()
    assert done == 999 and level[1] - level[0] < 24 * 2**20, level


def test_steps_are_told_while_a_worker_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """A worker that is at step 3 of 7 of its second line for some seconds."""

        def __init__(self, *_: object) -> None:
            self.at = 0, 0, 0

        def about(self) -> tuple[str, str]:
            return "here", "none"

        def encode(self, requests: list[Request]) -> list[str]:
            return [""] * len(requests)

        def run(self, requests: list[Request], *_: object) -> tuple[list[workers.Drawn], float, int]:
            self.at = 1, 3, 7
            time.sleep(6)
            return [workers.Drawn(wrong="slow")] * len(requests), 6.0, 2**20

        def seen(self) -> tuple[int, int, int]:
            return self.at

    monkeypatch.setattr(workers, "Worker", Slow)
    cluster = workers.Cluster({"device": "sim"}, workers.LOCAL, 1, None)
    seen: set[tuple[int, int, int, str]] = set()
    try:

        def stepped(number: int, step: int, steps: int, _: object) -> None:
            seen.add((number, step, steps, cluster.table().split()[-1]))

        requests = [Request(f"a boat {number}", "", {}, {}, {}) for number in range(8)]
        made = [each.number for each in cluster.run(requests, False, stepped)]
        assert sorted(made) == list(range(8))
        assert seen == {(number, 3, 7, "3/7") for number in (1, 3, 5, 7)}
        assert cluster.table().split()[-6:] == ["none", "8", "20.0", "1.00", "MB", "-"]
    finally:
        cluster.close()


def test_what_cannot_run_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(tmp_path / "prompts.jsonl", 4)
    given = ["batch", str(lines), "--model", str(DEMO), "--out", str(tmp_path / "out"), "--ray"]
    assert ballast.commands.main.main([*given, "local", "--device", "auto"]) == 1
    assert "Ray knows of no GPU" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert ballast.commands.main.main([*given, "local", "--device", "cpu"]) == 1
    assert 'pip install -e ".[ray]"' in capsys.readouterr().err
