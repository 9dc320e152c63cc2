"""Takes the pictures of the execution pages from real runs of the patient flow: docs/images/pages_*.png.

The records API of these runs has no conditions of one patient, so one of many iterations fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from playwright.sync_api import Page, sync_playwright
from starlette.types import ASGIApp, Receive, Scope, Send

from examples.records_api import create_app

PROJECT = Path(__file__).parents[1]
IMAGES = PROJECT / "docs" / "images"
PROGRAM = PROJECT / ".venv" / "bin" / "noetl-dagster"

WIDTH = 1200
MISSING = "/facilities/3/patients/47/conditions"
FLOW = {"facilities": 5, "patients": 100, "batch_size": 5}
OTHERS = ("duckdb_report", "cycle_until_ready", "child_playbooks", "worker_pool")
SPECIAL = "special"  # the pool of a step of worker_pool
CLIENT = {"x-noetl-client": "screenshots"}
MOST_BYTES = 150_000


def without(app: ASGIApp, path: str) -> ASGIApp:
    """Returns an application that knows nothing of one path."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == path:
            scope = {**scope, "path": "/nothing"}
        await app(scope, receive, send)

    return answer


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serves an application on a free port; gives its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical")
    listener, server = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


class Platform:
    """The service and two workers, in a folder of their own."""

    def __init__(self, folder: Path, records: str) -> None:
        self.folder = folder
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("NOETL_")},
            "NOETL_PLAYBOOKS_PATH": str(copied_playbooks(folder / "playbooks")),
            "NOETL_DEFAULT_POSTGRES_CREDENTIAL": "embedded",
            "NOETL_CREDENTIAL_RECORDS_API": records,
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.client = httpx.Client(timeout=60, headers=CLIENT)

    def open(self) -> None:
        """Starts the processes, and waits until the service answers."""
        serving = self.start("serve", "--port", "0")
        assert serving.stdout is not None
        for line in serving.stdout:
            if found := re.search(r"HTTP API on (\S+)", line):
                self.client.base_url = httpx.URL(found[1])
                break
        for name in ("worker-a", "worker-b"):
            self.start("worker", "--id", name, "--slots", "8")
        self.start("worker", "--id", "worker-c", "--pool", SPECIAL)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts ``noetl-dagster`` with some arguments."""
        process = subprocess.Popen(
            [PROGRAM, *arguments], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def execute(self, path: str, workload: dict[str, Any]) -> str:
        """Starts a playbook; returns the id of its execution."""
        answer = self.client.post("/api/executions/execute", json={"path": path, "workload": workload})
        answer.raise_for_status()
        return str(answer.json()["execution_id"])

    def wait(self, execution_id: str) -> str:
        """Waits for the end of an execution; returns its state."""
        while (status := self.client.get(f"/api/executions/{execution_id}").json()["status"]) == "RUNNING":
            time.sleep(0.5)
        return str(status)

    def close(self) -> None:
        """Ends everything."""
        for process in self.processes:
            process.terminate()
            process.wait(30)
        subprocess.run([PROGRAM, "services", "down"], cwd=self.folder, env=self.environment, check=True)


def copied_playbooks(folder: Path) -> Path:
    """Copies the playbooks into a folder. The flow's fan-outs go to the pool of workers."""
    folder.mkdir()
    flow = (PROJECT / "playbooks" / "patient_flow.yaml").read_text(encoding="utf-8")
    (folder / "patient_flow.yaml").write_text(
        flow.replace("fanout: {max_groups", "fanout: {engine: workers, max_groups")
    )
    shutil.copy(PROJECT / "playbooks" / "patient_flow_spark.py", folder)
    for name in OTHERS:
        shutil.copytree(PROJECT / "examples" / name, folder / name)
    return folder


class Camera:
    """Takes pictures of pages."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url

    def take(self, name: str, path: str = "", *, height: int = 800, dark: bool = False) -> None:
        """Writes the picture of a page; without a path, of the one that is open."""
        self.page.set_viewport_size({"width": WIDTH, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion="reduce")
        if path:
            self.page.goto(self.url + path)
        file = IMAGES / f"pages_{name}.png"
        self.page.screenshot(path=file, animations="disabled")
        subprocess.run(["pngquant", "--force", "--strip", "--speed", "1", "--output", file, "128", file], check=True)
        size = file.stat().st_size
        print(f"{file.relative_to(PROJECT)}  {size / 1000:.0f} kB")
        if size > MOST_BYTES:
            sys.exit(f"{file} has {size} bytes, more than {MOST_BYTES}")


def photograph(camera: Camera, platform: Platform) -> None:
    """Runs the playbooks, and takes all pictures."""
    for name in OTHERS:
        platform.wait(platform.execute(f"examples/{name}", {}))
    failed = platform.execute("examples/patient_flow", FLOW)
    print(f"{failed} {platform.wait(failed)}")
    step = f"/executions/{failed}/steps/fetch_conditions"
    camera.take("step", step, height=900)
    camera.page.get_by_role("link", name="All failed iterations").click()
    camera.page.get_by_role("region", name="Iterations").locator("tbody a").first.click()
    camera.take("iteration", height=820)
    camera.take("events", f"/executions/{failed}/events?step=fetch_conditions&type=command.*", height=640)
    camera.take("execution_dark", f"/executions/{failed}", height=1000, dark=True)
    camera.take("playbook", "/playbooks/examples/patient_flow", height=900)

    running = platform.execute("examples/patient_flow", {**FLOW, "facilities": 20})
    camera.page.goto(f"{camera.url}/executions/{running}")
    camera.page.locator("#steps progress").nth(4).wait_for()
    camera.page.wait_for_timeout(12_000)  # some way on
    camera.take("execution", height=1000)
    camera.take("executions", "/executions", height=520)
    camera.take("workers", "/workers", height=640)
    platform.client.post(f"/api/executions/{running}/cancel", json={}).raise_for_status()


def main() -> None:
    """Takes the pictures."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if browser is None:
        sys.exit("no Chromium is installed; see scripts/browser")
    if shutil.which("pngquant") is None:
        sys.exit("no pngquant is installed, which makes the pictures small: apt-get install pngquant")
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="noetl-pictures-") as folder,
        served(without(create_app(seed=7, faults=0.05), MISSING)) as records,
        sync_playwright() as playwright,
    ):
        platform = Platform(Path(folder), records)
        try:
            platform.open()
            opened = playwright.chromium.launch(executable_path=browser)
            photograph(Camera(opened.new_page(), str(platform.client.base_url).rstrip("/")), platform)
            opened.close()
        finally:
            platform.close()


if __name__ == "__main__":
    main()
