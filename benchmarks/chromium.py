"""Opens a page in Debian's chromium without a window, controls and photographs it, and lists the hosts it asked for.

It speaks the DevTools protocol over the `websockets` package.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from websockets.sync.client import connect

SWITCHES = """
    --headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --remote-debugging-port=0
    --disable-background-networking --disable-component-update --disable-sync --disable-domain-reliability
    --disable-extensions --disable-default-apps --disable-client-side-phishing-detection --no-pings
    --disable-features=OptimizationHints,AutofillServerCommunication,MediaRouter,Translate
"""
"""From the second line on: switches that keep the browser from asking its maker's hosts, as far as possible."""
WAIT_SECONDS = 120.0


class Chromium:
    """A separate browser with an empty profile.

    Attributes:
        problems: errors that pages had.
        asked: every URL that pages asked for.
        hosts: after closing, the hosts that were asked according to the net log, by who asked.
    """

    def __enter__(self) -> Self:
        self._home = Path(tempfile.mkdtemp(prefix="chromium-"))
        program = shutil.which("chromium")
        if program is None:
            raise FileNotFoundError("chromium is not on this machine: apt-get install chromium")
        self.net_log = self._home / "net-log.json"
        own = (f"--user-data-dir={self._home}", f"--log-net-log={self.net_log}")
        self._process = subprocess.Popen(
            [program, *SWITCHES.split(), *own, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port = self._wait_for(lambda: (self._home / "DevToolsActivePort").read_text().split()[0])
        pages = self._wait_for(lambda: json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list")))
        page = next(one for one in pages if one["type"] == "page")
        self._socket = connect(page["webSocketDebuggerUrl"], max_size=None)
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.call("Browser.close")  # so that the net log is complete
            self._process.wait(20)
        except Exception:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self.hosts = hosts_of(self.net_log)
        shutil.rmtree(self._home, ignore_errors=True)

    @staticmethod
    def _wait_for(look: Any) -> Any:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return look()
            except (OSError, ValueError, IndexError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the browser. Errors that the browser reports meanwhile are kept in `problems`."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=WAIT_SECONDS))
            if told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        if told.get("method") == "Network.requestWillBeSent":
            self.asked.append(told["params"]["request"]["url"])
        elif told.get("method") == "Runtime.exceptionThrown":
            details = told["params"]["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description") or details.get("text")))
        elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            entry = told["params"]["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, after awaiting it if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def shape(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the system's light or dark mode. A phone has a touch screen."""
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> float:
        """Open a page of ours; return the seconds from its request until it says that it is ready."""
        self.call("Page.navigate", url=url)
        until = time.monotonic() + WAIT_SECONDS
        while not (ready := self.evaluate("document.documentElement?.dataset.ready")):
            if time.monotonic() > until:
                raise TimeoutError(f"{url} was not ready: {self.problems}")
            time.sleep(0.05)
        return int(ready) / 1000

    def busy_seconds(self) -> float:
        """Return the CPU time of the page's main thread, to which other processes add little."""
        found = {one["name"]: one["value"] for one in self.call("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"])

    def photograph(self, path: Path, *, whole: bool = False) -> None:
        """Save a PNG of the visible part, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def hosts_of(net_log: Path) -> dict[str, list[str]]:
    """Return the hosts that a browser asked for anything, by who asked: a page's origin, or the browser itself."""
    text = net_log.read_text(errors="replace")
    try:
        log = json.loads(text)
    except ValueError:  # the browser did not end in order, so the log is cut
        log = json.loads(text.rstrip().rstrip(",") + "]}")
    found: dict[str, set[str]] = {}
    for event in log["events"]:
        parameters = event.get("params")
        if not isinstance(parameters, dict) or "initiator" not in parameters:
            continue
        url, asker = urlsplit(str(parameters.get("url"))), str(parameters["initiator"])
        if url.scheme in ("http", "https", "ws", "wss"):
            found.setdefault("the browser" if asker == "not an origin" else asker, set()).add(url.netloc)
    return {asker: sorted(hosts) for asker, hosts in found.items()}
