"""A real ComfyUI for the tests: where it is, and a server to run graphs on.

The host is looked for at COMFYUI_PATH, then two folders above this pack, then in ~/ComfyUI; the Python that
starts it at COMFYUI_PYTHON, then this one, then the host's own virtual environment, then ~/host-venv.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_runner import InputError, page, run_node, use_modules
from places import ROOT, SUPPORT

__all__ = [
    "HostError",
    "HostServer",
    "InputError",
    "can_run_host",
    "find_host",
    "host_python",
    "page",
    "run_node",
    "use_modules",
]

PACK = ROOT
SIM_DEVICE_PACK = SUPPORT / "sim_device_pack"
_NOTHING = {"nothing": {"class_type": "PreviewAny", "inputs": {"source": "nothing"}}}  # a graph that runs at once
_LAST_EVENT_SECONDS = 10.0  # that a busy machine has to read what the host has sent
NEEDED = ("torch", "torchsde", "torchvision", "torchaudio", "aiohttp", "av", "comfyui_frontend_package")


class HostError(RuntimeError):
    """The host did not start, refused a request, or reported a failed prompt."""


def _is_host(folder: Path) -> bool:
    return (folder / "main.py").is_file() and (folder / "comfy_api").is_dir()


def find_host() -> Path | None:
    named = os.environ.get("COMFYUI_PATH")
    if named:
        if not _is_host(Path(named)):
            raise HostError(f"COMFYUI_PATH={named} is not a ComfyUI folder")
        return Path(named).resolve()
    folders = [Path.home() / "ComfyUI"]
    if PACK.parent.name == "custom_nodes":
        folders.insert(0, PACK.parent.parent)
    return next((folder for folder in folders if _is_host(folder)), None)


def can_run_host() -> bool:
    """Whether this interpreter has what the host imports, so that tests can import its modules."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def host_python() -> str:
    named = os.environ.get("COMFYUI_PYTHON")
    if named:
        return named
    if can_run_host():
        return sys.executable
    host = find_host()
    homes = [host / "venv", host / ".venv"] if host else []
    for home in [*homes, Path.home() / "host-venv"]:
        for python in (home / "bin" / "python", home / "Scripts" / "python.exe"):
            if python.is_file():
                return str(python)
    return sys.executable


# A killed test run takes its server along.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execv(sys.argv[1], sys.argv[1:])"
)


def missing() -> str | None:
    """Why no host can be run here; None if one can."""
    if find_host() is None:
        return "no ComfyUI: set COMFYUI_PATH, or put one in ~/ComfyUI"
    ran = subprocess.run([host_python(), "-c", "import torchsde, aiohttp, diffusers"], capture_output=True, timeout=120)
    return f"{host_python()} lacks what ComfyUI or this pack needs: set COMFYUI_PYTHON" if ran.returncode else None


class HostServer:
    """A ComfyUI server on a free port, with this pack as its only custom node.

    `base` (a temporary folder unless given) holds models/, input/, output/, and server.log. `events` lists
    what a page would get, in order: ("progress_text", {"node", "text"}), ("executing", {...}), and so on.

    With `sim`, such as "64MB", the host's own device is this pack's simulated one, of that size, and the nodes of
    `sim_device_pack` are there; `device()` then tells what it holds.
    """

    def __init__(
        self,
        pack: str | os.PathLike = PACK,
        *,
        name: str = "ComfyUI-Ballast",
        base: str | os.PathLike | None = None,
        arguments: Sequence[str] = ("--cpu",),
        environment: dict[str, str] | None = None,
        start_seconds: float = 180,
        sim: str | None = None,
    ):
        self.pack, self.name = Path(pack).resolve(), name
        self.arguments, self.environment = list(arguments), environment or {}
        self.start_seconds = start_seconds
        self.sim = sim
        self._own_base = base is None
        self.base = Path(tempfile.mkdtemp(prefix="ballast_host_") if base is None else base).resolve()
        self.client_id = uuid.uuid4().hex
        self.events: list[tuple[str, Any]] = []
        self.process: subprocess.Popen | None = None
        self.port = 0

    def __enter__(self) -> HostServer:
        host = find_host()
        if host is None:
            raise HostError("No ComfyUI found: set COMFYUI_PATH")
        nodes = self.base / "custom_nodes"
        nodes.mkdir(parents=True, exist_ok=True)
        packs = {self.name: self.pack} | ({SIM_DEVICE_PACK.name: SIM_DEVICE_PACK} if self.sim else {})
        for name, pack in packs.items():
            if not (nodes / name).exists():
                (nodes / name).symlink_to(pack, target_is_directory=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            host_python(),
            *(("-c", _DIE_WITH_PARENT, host_python()) if sys.platform == "linux" else ()),
            str(host / "main.py"),
            "--port",
            str(self.port),
            "--listen",
            "127.0.0.1",
            "--disable-auto-launch",
            "--base-directory",
            str(self.base),
            "--disable-api-nodes",
            "--database-url",
            "sqlite:///:memory:",
            *self.arguments,
        ]
        with open(self.base / "server.log", "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=host,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self.environment,
            )
        try:
            self._wait_until_ready()
            self._listen()
            if self.sim:
                self.request("/sim_device", {"total": self.sim})
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for number in (signal.SIGINT, signal.SIGKILL):
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(5)
                    break
                except subprocess.TimeoutExpired:
                    continue
        if self._own_base:
            shutil.rmtree(self.base, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return
            except (OSError, HostError):
                time.sleep(0.25)
        raise HostError(f"ComfyUI did not start on port {self.port}:\n{self.log[-4000:]}")

    def _listen(self) -> None:
        stream = socket.create_connection(("127.0.0.1", self.port))
        key = base64.b64encode(os.urandom(16)).decode()
        stream.sendall(
            (
                f"GET /ws?clientId={self.client_id} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Key: {key}\r\n\r\n"
            ).encode()
        )
        reader = stream.makefile("rb")
        while reader.readline().strip():
            pass
        threading.Thread(target=self._read_events, args=(stream, reader), daemon=True).start()

    def _read_events(self, stream: socket.socket, reader: Any) -> None:
        while True:
            try:
                head = reader.read(2)
                if len(head) < 2:
                    return
                size = head[1] & 0x7F
                if size > 125:
                    size = int.from_bytes(reader.read(2 if size == 126 else 8), "big")
                payload = reader.read(size)
            except OSError:
                return
            opcode = head[0] & 0x0F
            if opcode == 1:
                message = json.loads(payload)
                self.events.append((message["type"], message.get("data")))
            elif opcode == 2 and payload[:4] == b"\0\0\0\3":
                end = 8 + int.from_bytes(payload[4:8], "big")
                text = {"node": payload[8:end].decode(), "text": payload[end:].decode()}
                self.events.append(("progress_text", text))
            elif opcode == 2:
                self.events.append(("preview", payload))
            elif opcode == 8:
                stream.close()
                return

    def request(self, path: str, body: Any = None) -> Any:
        """GET, or POST when there is a body; the answer as JSON where it is JSON, else as bytes."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer, kind = response.read(), response.headers.get_content_type()
        except urllib.error.HTTPError as error:
            raise HostError(f"{path}: {error.code} {error.read().decode(errors='replace')}") from None
        return json.loads(answer) if kind == "application/json" and answer else answer

    def get(self, path: str) -> Any:
        return self.request(path)

    def object_info(self, node_id: str) -> dict[str, Any]:
        """The node as the page sees it; KeyError if the host does not know it."""
        return self.get(f"/object_info/{node_id}")[node_id]

    def queue(self, prompt: dict[str, Any]) -> str:
        """Queue an API-format prompt. HostError carries the node errors of a refused one."""
        answer = self.request("/prompt", {"prompt": prompt, "client_id": self.client_id})
        if answer.get("node_errors"):
            raise HostError(f"refused in part: {json.dumps(answer['node_errors'])}")
        return answer["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry:
                return entry
            if self.process.poll() is not None:
                raise HostError(f"ComfyUI died:\n{self.log[-4000:]}")
            time.sleep(0.05)
        raise HostError(f"prompt {prompt_id} not done after {timeout} s:\n{self.log[-4000:]}")

    def run(self, prompt: dict[str, Any], timeout: float = 120, check: bool = True) -> dict[str, Any]:
        """Queue, wait, and return the history entry; with `check`, a failed run is a HostError.

        What the run told the page is in `events` then.
        """
        entry = self.wait(prompt_id := self.queue(prompt), timeout)
        deadline = time.monotonic() + _LAST_EVENT_SECONDS
        while not self._is_told(prompt_id) and time.monotonic() < deadline:
            time.sleep(0.01)
        if check and entry["status"]["status_str"] != "success":
            raise HostError(self.error(entry) or f"prompt failed: {entry['status']}")
        return entry

    def _is_told(self, prompt_id: str) -> bool:
        """Return whether the page was told that a run is over, which is the last that it hears of it."""
        told = (data for kind, data in reversed(self.events) if kind == "executing")
        return any(data["node"] is None and data.get("prompt_id") == prompt_id for data in told)

    @staticmethod
    def error(entry: dict[str, Any]) -> str | None:
        """Node, exception type and message of a failed history entry."""
        for kind, data in entry["status"]["messages"]:
            if kind == "execution_error":
                return f"{data['node_type']}: {data['exception_type']}: {data['exception_message'].strip()}"
            if kind == "execution_interrupted":
                return f"{data['node_type']}: interrupted"
        return None

    @staticmethod
    def cached(entry: dict[str, Any]) -> list[str]:
        """The nodes of a run whose outputs came from the host's cache."""
        return [
            node for kind, data in entry["status"]["messages"] if kind == "execution_cached" for node in data["nodes"]
        ]

    def free(self, unload_models: bool = True, free_memory: bool = True) -> None:
        """The page's unload buttons, until the host has obeyed: it looks at them after each prompt, and between."""
        self.request("/free", {"unload_models": unload_models, "free_memory": free_memory})
        for _ in range(2):  # when the second one runs, whatever came after the first is done
            self.run(_NOTHING)

    def device(self) -> dict[str, Any]:
        """What the simulated device holds now, with `sim` only."""
        return self.get("/sim_device")

    def ram_bytes(self) -> int:
        """RAM that the host's process uses now, with `sim` only."""
        return self.get("/sim_device/ram")["bytes"]

    def interrupt(self) -> None:
        self.request("/interrupt", {})

    @property
    def log(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", (self.base / "server.log").read_text(errors="replace"))

    @property
    def import_failed(self) -> bool:
        pattern = rf"[\d.]+ seconds( \(IMPORT FAILED\))?: \S*/{re.escape(self.name)}\s*$"
        match = re.search(pattern, self.log, re.MULTILINE)
        if match is None:
            raise HostError(f"the log has no import time of {self.name}:\n{self.log[-2000:]}")
        return match[1] is not None


if __name__ == "__main__":  # python host.py [BASE]: serve this pack until Ctrl-C
    with HostServer(base=sys.argv[1] if len(sys.argv) > 1 else None) as server:
        print(f"http://127.0.0.1:{server.port}  {server.base}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.process.wait()
