"""A headless Chromium that tests drive by the DevTools protocol over a pipe; needs the program alone."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page; `errors` holds exceptions and messages of its console, `requests` the addresses that it loads."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process, self._to, self._back = process, to, back
        self._count, self._room, self._session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Network", "Log"):
            self._send(f"{domain}.enable")

    def _receive(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._room:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._back, 1 << 16) if ready else b""
            if not part:
                raise TimeoutError(f"the browser did not answer in {seconds} s")
            self._room += part
        text, _, self._room = self._room.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        name, about = message.get("method"), message.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"].get("exception", {}).get("description", about)))
        elif name == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive(60)
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result

    def open(self, address: str, width: int = 1280, height: int = 900) -> None:
        """Load a page in a window of this size."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._send("Emulation.setDeviceMetricsOverride", **sizes)
        self._send("Page.navigate", url="about:blank")
        self._send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        found = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 20) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > until:
                raise TimeoutError(f"not true after {seconds} s: {script}")
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key."""
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        text = {" ": " ", "Enter": "\r"}.get(key)
        self._send("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self._send("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drop(self, path: Path, x: float, y: float) -> None:
        """Drag a file over the page and drop it."""
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self._send("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def choose_file(self, selector: str, path: Path) -> None:
        """Choose a file in an input."""
        root = self._send("DOM.getDocument")["root"]["nodeId"]
        node = self._send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        found = self._send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(chromium: str) -> Iterator[Browser]:
    """Start Chromium, and end it after the block."""
    (reads, to), (back, writes) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        command = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        shell = ["/bin/bash", "-c", command, chromium, *flags, "--allow-file-access-from-files"]
        with subprocess.Popen(
            shell, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            os.close(reads)
            os.close(writes)
            try:
                yield Browser(process, to, back)
            finally:
                process.terminate()
                process.wait(timeout=20)
                os.close(to)
                os.close(back)
