"""A Chromium without a window, spoken to by a pipe, where one is installed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
_FLAGS = (
    "--headless", "--no-sandbox", "--no-zygote", "--in-process-gpu", "--disable-gpu",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


def browser() -> str | None:
    """The path of a browser: from PATH, or one of Playwright's."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    kept = Path.home() / ".cache" / "ms-playwright"
    return next((str(path) for path in sorted(kept.glob("chromium*/chrome-linux*/*")) if path.name in _HEADS), None)


_HEADS = ("chrome", "headless_shell", "chrome-headless-shell")


class Browser:
    """One page in a browser, by the DevTools protocol: messages end with a zero byte, on file descriptors 3 and 4."""

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.requests: list[str] = []
        self._number = 0
        ends = [*os.pipe(), *os.pipe()]
        take, self._out, self._in, give = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 20) for each in ends)  # not 3 or 4
        for each in ends:
            os.close(each)
        program = [browser(), *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        moved = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, str(take), str(give), *program],
            pass_fds=(take, give),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(take), os.close(give)
        self._rest = b""
        self._session: str | None = None
        targets = self._ask("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Network.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out), os.close(self._in)
        self._folder.cleanup()

    def show(self, html: str, width: int, scheme: str) -> None:
        """Load a page, `width` px wide. scheme: light or dark."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        frame = self._ask("Page.getFrameTree")["frameTree"]["frame"]["id"]
        self._ask("Page.setDocumentContent", frameId=frame, html=html)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self._ask("Runtime.evaluate", expression=expression)["result"]["value"]

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._in, 1 << 16)
                assert read, "the browser has ended"
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
