"""A headless Chromium over its debugging pipe: messages of the DevTools protocol, each ended by a zero."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

#: The program, if it is installed. It reads commands from descriptor 3 and answers on 4.
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_ANSWER_S = 30.0
#: The longest message is a screenshot.
_MAX_MESSAGE_BYTES = 32 << 20


class Page:
    """One tab. `errors` are the messages of exceptions and of the console."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader = reader
        self._write_fd = write_fd
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        found = await asyncio.wait_for(answer, _ANSWER_S)
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    async def close_browser(self) -> None:
        self._session = None
        await self.call("Browser.close")

    async def read(self) -> None:
        """Reads until the browser ends."""
        while True:
            try:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            params = message.get("params", {})
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                self.errors.append(json.dumps(params["args"]))
            elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(params["entry"]))

    async def go_to(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def screenshot(self) -> bytes:
        """A PNG file."""
        image = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(image["data"])

    async def resize(self, width: int, height: int, scheme: str) -> None:
        """`scheme`: light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])


@asynccontextmanager
async def open_page(profile: Path) -> AsyncIterator[Page]:
    """A tab of a separate browser; `profile` is an empty folder."""
    assert PROGRAM is not None
    for_browser, write_fd = os.pipe()
    read_fd, of_browser = os.pipe()
    # Above 4, so that neither is overwritten before it is copied.
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (for_browser, of_browser)]

    def place() -> None:
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = await asyncio.create_subprocess_exec(
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=place, pass_fds=(3, 4),
    )  # fmt: skip
    for fd in (for_browser, of_browser, *ends):
        os.close(fd)
    reader = asyncio.StreamReader(limit=_MAX_MESSAGE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
    )
    page = Page(reader, write_fd)
    reading = asyncio.create_task(page.read())
    try:
        await page.open()
        yield page
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await page.close_browser()
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        reading.cancel()
        transport.close()
        with contextlib.suppress(OSError):
            os.close(write_fd)
