"""A page in Debian's chromium, without a window: opened, asked, photographed, and what hosts it asked for.

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
"""From the second line on: what keeps the browser itself from asking its maker's hosts, as far as it lets itself be."""
WAIT_SECONDS = 120.0


class Chromium:
    """A browser of its own, with an empty profile.

    Attributes:
        problems: errors that pages had.
        asked: every URL that pages asked for.
        hosts: once it is closed, the hosts that its net log says were asked, by who asked.
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
            self.call("Browser.close")  # so that the net log is whole
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
        """Have the browser do something; what it tells meanwhile of errors is kept in `problems`."""
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
        """The value of an expression in the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def shape(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """The size of the window, in CSS pixels, and what the system says of light and dark."""
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> float:
        """Open a page of ours; returns the seconds until it says that it is ready, which it counts from its request."""
        self.call("Page.navigate", url=url)
        until = time.monotonic() + WAIT_SECONDS
        while not (ready := self.evaluate("document.documentElement?.dataset.ready")):
            if time.monotonic() > until:
                raise TimeoutError(f"{url} was not ready: {self.problems}")
            time.sleep(0.05)
        return int(ready) / 1000

    def busy_seconds(self) -> float:
        """CPU time that the page's main thread has used: what other processes do adds little to it."""
        found = {one["name"]: one["value"] for one in self.call("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"])

    def photograph(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is to be seen, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def hosts_of(net_log: Path) -> dict[str, list[str]]:
    """The hosts that a browser asked for anything, by who asked: a page's origin, or the browser itself."""
    text = net_log.read_text(errors="replace")
    try:
        log = json.loads(text)
    except ValueError:  # not ended in order
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
