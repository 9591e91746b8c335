"""A headless Chromium, driven over its DevTools pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60  # seconds for an answer; a busy machine needs some for the start


def program() -> str | None:
    """Where Chromium is, None where it is not installed."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


class Browser:
    """One page of a Chromium of its own."""

    def __init__(self, profile: Path) -> None:
        command = program()
        assert command is not None
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4. bash, as it
        # takes descriptors of any number; through others, as the pipes may be 3 and 4 themselves.
        script = 'exec {a}<&"$IN" {b}>&"$OUT"; exec "$@" 3<&$a 4>&$b'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", command, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            env=os.environ | {"IN": str(to_browser), "OUT": str(from_browser)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        try:
            self._session = None
            self.send("Browser.close")
            self._process.wait(timeout=10)
        except (OSError, TimeoutError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._commands)
            os.close(self._answers)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        answer, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(answer)

    def open(self, file: Path, fragment: str = "") -> None:
        # From an empty page: a new fragment alone would not load the file again.
        self._load("about:blank")
        self.events.clear()
        self._load(f"{file.resolve().as_uri()}{fragment}")

    def _load(self, address: str) -> None:
        self.events.clear()
        self.send("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def look(self, *, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def run(self, expression: str) -> Any:
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Enter": 13, " ": 32, "Tab": 9}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )  # fmt: skip

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """A mouse click in the middle of an element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, *, whole: bool = True) -> bytes:
        result = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(result["data"])

    def print(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])
