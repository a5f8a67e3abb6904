"""A headless chromium, driven over its debugging pipe with the standard library alone.

Why not a driver package: the browser speaks JSON over two file descriptors (3 in, 4 out, messages
end with a zero byte), and these tests need five of its commands. Time is the real one; the
command line's `--virtual-time-budget` outruns layout, so that what comes into sight is not drawn.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--process-per-site",  # pages opened again have their scripts compiled: reports hold 5 MB
    "--remote-debugging-pipe",
)
_AS_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_QUIET = subprocess.DEVNULL


class Browser:
    """A started browser; a context manager that ends it."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = _high_pipe()
        self._in, theirs_out = _high_pipe()
        starter = [sys.executable, "-c", _AS_3_AND_4, str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            [*starter, str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=_QUIET,
            stdout=_QUIET,
            stderr=_QUIET,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._received = b""
        self._count = 0
        self.events: list[dict] = []
        self.front: Tab | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, session: str | None = None, **params: object) -> dict:
        """One command; blocks until it is answered. Events that arrive meanwhile are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def wait_for_event(self) -> None:
        """Block until something happens in a page; the event is kept."""
        self.events.append(self._next())

    def _next(self) -> dict:
        while b"\0" not in self._received:
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._received += read
        line, _, self._received = self._received.partition(b"\0")
        return json.loads(line)


_READER = (Path(__file__).parent / "reader.js").read_text()
"""What scripts call on a page, beside what they bring along."""


class Tab:
    """A page of a given width, in light or dark, with what scripts call: _READER and `look`."""

    def __init__(
        self, browser: Browser, page: Path | str, width: int, scheme: str = "light", look: str = ""
    ) -> None:
        self._look = look
        self._browser = browser
        self._num_loads = 0
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.show_as(width, scheme)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self._wait_for_load()

    def call(self, method: str, **params: object) -> dict:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.front = None
        self._browser.call("Target.closeTarget", targetId=self._target)

    def show_as(self, width: int, scheme: str) -> None:
        """Show the page, which may be open already, at a width and in light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def reload(self) -> None:
        self.call("Page.reload")
        self._wait_for_load()

    def evaluate(self, script: str) -> object:
        """The value of an expression; a promise is waited for."""
        if self._browser.front is not self:  # a page in the background is not laid out
            self.call("Page.bringToFront")
            self._browser.front = self
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def problems(self) -> list[str]:
        """The problems that the console, the page's policy and uncaught exceptions reported."""
        return [
            json.dumps(event["params"])
            for event in self._events()
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
            or (
                event["method"] == "Runtime.consoleAPICalled"
                and event["params"]["type"] in ("error", "warning", "assert")
            )
        ]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself included."""
        return [
            event["params"]["request"]["url"]
            for event in self._events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _wait_for_load(self) -> None:
        """Wait until one more page than before has loaded, an empty one left aside."""
        while True:
            while self._num_loads == sum(
                event["method"] == "Page.loadEventFired" for event in self._events()
            ):
                self._browser.wait_for_event()
            self._num_loads += 1
            if self.evaluate("location.protocol") != "about:":
                self.evaluate(_READER + self._look)
                return

    def _events(self) -> list[dict]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


def _high_pipe() -> tuple[int, int]:
    """A pipe's two ends, on numbers that 3 and 4 cannot collide with."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
