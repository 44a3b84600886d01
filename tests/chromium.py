"""A headless Chromium under test, driven through the pipe of its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0


class Page:
    """A page of the browser; calls of the protocol and what the page logged as an error."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._read, self._number, self._session = b"", 0, ""
        self._is_loaded = False
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._answers], [], [], WAIT_S)[0], "the browser does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser has ended"
            self._read += read
        text, _, self._read = self._read.partition(b"\0")
        message = dict(json.loads(text))
        method = message.get("method")
        self._is_loaded = self._is_loaded or method == "Page.loadEventFired"
        if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(message["params"]))
        return message

    def open(self, url: str, *, width: int, height: int, scheme: str = "light") -> None:
        """Returns when the page is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self._is_loaded = False
        self.call("Page.navigate", url=url)
        while not self._is_loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or what its promise brings."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression when it is true, which a change of the page makes it."""
        return self.evaluate(
            f"""new Promise((done) => {{
              const look = () => {{ const value = {expression}; if (value) done(value); }};
              const all = {{ subtree: true, childList: true, characterData: true }};
              new MutationObserver(look).observe(document, all);
              look();
            }})"""
        )

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser with its profile in a folder. Skips the test where there is no Chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    # It reads commands from descriptor 3, and writes answers to 4.
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
    line = f'exec 3<&{command_out} 4>&{answer_in}; exec "$@"'
    arguments = [program, *options.split(), f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", *arguments],
        pass_fds=(command_out, answer_in),
        stderr=subprocess.DEVNULL,
    )
    os.close(command_out)
    os.close(answer_in)
    try:
        yield Page(command_in, answer_out)
    finally:
        process.terminate()
        process.wait(WAIT_S)
        os.close(command_in)
        os.close(answer_out)
