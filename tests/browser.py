"""A real browser without a window, steered over a pipe in its own protocol."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

TROUBLE = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


def installed() -> str | None:
    """The browser of this machine, None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page; `trouble` is what its console says, `requests` the addresses it asks for."""

    def __init__(self, commands: int, answers: int) -> None:
        self.trouble: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self._loaded = False
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def open(self, address: str, *, dark: bool = False, width: int = 1240) -> None:
        """Go there, and return when it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._note(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, file: Path) -> None:
        """Write what the page looks like, all of it."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> Any:
        """Do something and return the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _note(self, event: dict[str, Any]) -> None:
        method = event.get("method")
        if method in TROUBLE:
            self.trouble.append(event)
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser() -> Iterator[Page]:
    """A page in a browser of its own, which is gone afterwards."""
    program = installed()
    assert program is not None
    commands_in, commands = os.pipe()
    answers, answers_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "--no-first-run"]

        def as_3_and_4() -> None:  # where the browser expects them
            ends = os.dup(commands_in), os.dup(answers_out)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        process = subprocess.Popen(
            [program, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=as_3_and_4,
            start_new_session=True,
        )
        os.close(commands_in)
        os.close(answers_out)
        try:
            yield Page(commands, answers)
        finally:
            os.close(commands)  # then it ends, and all its processes
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(answers)
