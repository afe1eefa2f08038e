"""The page in a real browser: it shows the samples' numbers, asks for a key, and reports a lost gateway."""

import asyncio
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import chromium
import pytest
from tandem_gateway import dashboard
from waiting import pause_async, until_async

FOLDER = Path(dashboard.__file__).parent / "static"
needs_browser = pytest.mark.skipif(
    chromium.PROGRAM is None, reason="no Chromium is on PATH; Debian's package is chromium"
)


@pytest.fixture
async def browser(tmp_path):
    """`await browser(url)` opens the page."""
    async with chromium.open_page(tmp_path / "profile") as page:
        await page.resize(1440, 1400, "light")

        async def open_url(url: str) -> chromium.Page:
            await page.go_to(url)
            return page

        yield open_url


async def until_page(page: chromium.Page, condition: str) -> None:
    """Waits until a JavaScript expression is true."""

    async def is_there() -> bool:
        await pause_async(0.1)
        return await page.evaluate(f"Boolean({condition})")

    await until_async(is_there, limit_s=20.0)


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).textContent"


def cells(table: str, row: int) -> str:
    """The texts of a row, counted from 0."""
    return f"[...document.querySelectorAll('#{table} tbody tr')[{row}].cells].map((cell) => cell.textContent)"


@needs_browser
async def test_the_page_shows_the_numbers_of_the_samples(pods, gateway, browser):
    front = await gateway(await pods(free_blocks=40))
    for number in range(3):
        await front.openai.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "hello"}],
            extra_headers={"x-request-id": f"mine-{number}"},
        )
    page = await browser(f"{front.url}/dashboard")
    await until_page(page, "document.querySelectorAll('#requests tbody tr').length === 3")
    row = await page.evaluate(cells("classes", 0))
    assert row[0] == "standard"
    assert row[5:] == ["100 %", "0.0", "0.0", "0"]
    assert (await page.evaluate(cells("drafts", 0)))[:4] == ["prompt", "9", "6", "66.7 %"]
    assert (await page.evaluate(cells("pods", 0)))[:3] == ["d-0", "decode", "healthy"]
    ids = [(await page.evaluate(cells("requests", row)))[1] for row in range(3)]
    assert sorted(ids) == ["mine-0", "mine-1", "mine-2"]
    await page.evaluate("document.querySelectorAll('#requests tbody tr')[2].click()")
    await until_page(page, f"{text('#request dd')} === '{ids[2]}'")
    # All charts are drawn.
    assert await page.evaluate("document.querySelectorAll('.uplot canvas').length") == 6
    assert page.errors == []


@needs_browser
async def test_the_page_shows_earlier_samples(pods, gateway, browser):
    front = await gateway(await pods())
    page = await browser(f"{front.url}/dashboard")
    await until_page(page, "document.querySelector('#panels')?.hidden === false")
    await pause_async(1.2)  # a second in which there was no request
    await front.openai.chat.completions.create(model="", messages=[{"role": "user", "content": "hello"}])
    await until_page(page, "document.querySelectorAll('#requests tbody tr').length === 1")
    slide = (
        "(() => { const slider = document.querySelector('#rewind-slider'); slider.value = slider.min;"
        "slider.dispatchEvent(new Event('input')); })()"
    )
    await page.evaluate(slide)
    assert await page.evaluate("document.querySelectorAll('#requests tbody tr').length") == 0
    assert (await page.evaluate(text("#rewind-label"))).startswith("at ")
    await page.evaluate("document.querySelector('#live').click()")
    assert await page.evaluate("document.querySelectorAll('#requests tbody tr').length") == 1
    assert page.errors == []


@needs_browser
async def test_the_page_asks_for_an_operators_key_and_reports_a_lost_gateway(
    pods, gateway, browser, tmp_path
):
    lines = [
        {"key_sha256": hashlib.sha256(b"acme-key").hexdigest(), "tenant": "acme"},
        {"key_sha256": hashlib.sha256(b"ops-key").hexdigest(), "tenant": "ops", "operator": True},
    ]
    path = tmp_path / "keys.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    front = await gateway(await pods(), api_keys_file=path)
    page = await browser(f"{front.url}/dashboard/")
    await until_page(page, text("#key-message") + ".includes('asks for a key')")

    async def type_key(key: str) -> None:
        typed = (
            f"(() => {{ document.querySelector('#key').value = {json.dumps(key)};"
            "document.querySelector('#key-form').requestSubmit(); })()"
        )
        await page.evaluate(typed)

    await type_key("acme-key")
    await until_page(page, text("#key-message") + ".includes('operator')")
    assert await page.evaluate("document.querySelector('#panels').hidden")
    await type_key("ops-key")
    await until_page(page, "document.querySelector('#panels')?.hidden === false")
    await asyncio.wait_for(front.process.stop(), 10)
    await until_page(page, text("#status") + ".includes('does not answer; trying again')")
    assert await page.evaluate("document.body.classList.contains('stale')")


#: Prints after each answer what the feed says and how long it waits. The arguments say which gateway answers.
FEED = """
import { Feed } from "./feed.js";
const starts = process.argv.slice(2);
const said = [];
globalThis.sessionStorage = { getItem: () => null };
globalThis.setTimeout = (resolve, milliseconds) => {
  said.push([feed.trouble, milliseconds]);
  resolve();
};
globalThis.fetch = async () => {
  if (!starts.length) {
    console.log(JSON.stringify(said));
    process.exit();
  }
  const body = { about: { start: starts.shift() }, next: 7, newest: 6, samples: [] };
  return { status: 200, ok: true, json: async () => body };
};
const feed = new Feed(() => {});
await feed.run();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node is on PATH; Debian's package is nodejs")
def test_the_page_reports_several_gateways_and_pauses_between_requests(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "page")
    (tmp_path / "page" / "package.json").write_text('{"type": "module"}')
    (tmp_path / "page" / "test.js").write_text(FEED)
    starts = "aabbabaa"
    ran = subprocess.run(
        ["node", "test.js", *starts], cwd=tmp_path / "page", capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    several = "several gateways answer at this address"
    # One change is a restarted gateway.
    troubles = ["", "", "", "", "", several, several, ""]
    assert json.loads(ran.stdout) == [[trouble, 1000] for trouble in troubles]


def test_the_wheel_takes_every_file_of_the_page():
    """The wheel takes the files of the package that git does not ignore."""
    files = sorted(path for path in FOLDER.rglob("*") if path.is_file())
    assert FOLDER / "vendor" / "uPlot.LICENSE" in files
    if subprocess.run(["git", "rev-parse"], cwd=FOLDER, capture_output=True).returncode:
        pytest.skip("this is no git checkout")
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=FOLDER, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (1, "")
