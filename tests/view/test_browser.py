"""The viewer in a real browser: Chromium without a window. Skipped where there is no Chromium."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.view.runs import ViewedRun
from turnwise.view.server import ViewServer, export

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIEWS = {
    "curves": "#/curves",
    "curves of one run": "#/curves?shown=0",
    "conversations": "#/conversations",
    "conversation": "#/conversation?number=3",
    "tokens": "#/conversation?number=3&show=tokens&color=advantage",
    "trainer and engine": "#/conversation?number=3&show=tokens&color=ratio",
    "image": "#/conversation?number=0",
    "hostile text": "#/conversation?number=23",
    "group": "#/group?number=3",
    "timeline": "#/timeline",
    "comparison of runs": "#/compare?left=0&right=1&kind=train",
    "pair": "#/pair?left=0&right=1&kind=train&first=3&second=3",
    "evaluations": "#/evaluations",
}
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
"""Screenshots of all pages in light and dark, to be looked at."""
AXE = "https://registry.npmjs.org/axe-core/-/axe-core-4.14.1.tgz"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1300, "height": 800}, bypass_csp=False)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    # the page may ask once more when the server has ended
    ended = "ERR_CONNECTION_REFUSED"
    page.on(
        "console",
        lambda message: (
            problems.append(message.text) if message.type == "error" and ended not in message.text else None
        ),
    )
    page.set_default_timeout(60_000)
    yield page
    context.close()
    assert problems == []


@pytest.fixture
def address(run: Path, other: Path, evaluation: Path) -> Iterator[str]:
    runs = [ViewedRun(run), ViewedRun(other)]
    server = ViewServer(runs)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.address
    server.stop()
    thread.join()


def open_view(page: Any, address: str, view: str) -> None:
    page.goto(address)
    page.wait_for_selector("nav")
    page.evaluate("view => { location.hash = view }", view)


def test_curves(page: Any, address: str) -> None:
    open_view(page, address, "#/curves")
    page.wait_for_selector("section[aria-label='reward/mean'] canvas")
    label = page.get_attribute("section[aria-label='reward/mean'] [role=img]", "aria-label")
    assert label == "reward/mean: first 0.3, second 0.35"
    page.uncheck("label:has-text('second') input")
    page.wait_for_selector("[role=img][aria-label^='reward/mean: first 0.3, 90 %']")  # one run: with quantiles


def test_filter_sort_open_by_keyboard(page: Any, address: str) -> None:
    open_view(page, address, "#/conversations")
    page.wait_for_selector(".body .row")
    page.wait_for_selector("text=24 of 24")
    page.fill("label:has-text('Step') input", "2-3")
    page.keyboard.press("Tab")
    page.wait_for_selector("text=16 of 24")
    page.fill("input[type=search]", "owned")
    page.wait_for_selector("text=1 of 24")
    page.click("text=Reset")
    page.wait_for_selector("text=24 of 24")
    page.click(".head button:has-text('reward')")
    page.wait_for_selector("[aria-sort=descending]")
    assert page.inner_text(".body .row >> nth=0").startswith("3.0:1/3")  # the highest reward, 0.9
    page.click(".head button:has-text('reward')")
    page.wait_for_selector("[aria-sort=ascending]")
    assert page.inner_text(".body .row >> nth=0").startswith("1.0:0/0")
    page.locator(".scroll").focus()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("b:has-text('1.0:0/1')")
    page.keyboard.press("n")
    page.wait_for_selector("b:has-text('1.0:0/2')")
    page.keyboard.press("g")
    page.wait_for_selector("b:has-text('group 1.0:0')")
    assert page.locator(".pane").count() == 4
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector(".head")


KEYS_WITHOUT_A_FRAME = """async (keys) => {
  for (const key of keys) {
    window.document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    for (let wait = 0; wait < 10; wait++) await null; // the page is rendered, and nothing is drawn
  }
}"""


def test_keys_that_follow_each_other_within_a_frame(page: Any, address: str) -> None:
    """Each page answers from its first rendering on: two pages are left before the browser has drawn one."""
    open_view(page, address, "#/group?number=2")
    page.wait_for_selector(".pane")
    page.evaluate(KEYS_WITHOUT_A_FRAME, ["Escape", "Escape"])
    page.wait_for_selector("text=24 of 24", timeout=20_000)
    assert page.url.split("#/")[1].startswith("conversations")


def test_tokens_say_what_they_are(page: Any, address: str) -> None:
    open_view(page, address, "#/conversation?number=0&show=tokens&color=logprob")
    page.wait_for_selector(".token")
    assert page.locator(".token").count() == 12
    assert page.locator(".token.sampled").count() == 6
    assert page.locator(".token.off").count() == 3
    page.hover(".token >> nth=5")
    detail = page.inner_text(".detail")
    for fact in ("id 5", "turn 0", "log-probability -2.5", "advantage -0.5", "weights of step 2", "weight 1"):
        assert fact in detail, detail
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("text=context: not sampled")
    page.hover(".token >> nth=10")
    assert "advantage -0.2" in page.inner_text(".detail")  # one number for each token


def test_texts_of_the_model_are_texts(page: Any, address: str) -> None:
    open_view(page, address, "#/conversation?number=23")
    page.wait_for_selector("pre:has-text('</script><script>')")
    assert page.title() == "turnwise"
    assert page.locator("img[src=x]").count() == 0


def test_the_page_follows_the_run(page: Any, address: str, run: Path) -> None:
    open_view(page, address, "#/conversations")
    page.wait_for_selector("text=24 of 24")
    record = json.loads((run / "trajectories.jsonl").read_text().splitlines()[0])
    with (run / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps({**record, "step": 4, "id": "4.0:0/0"}) + "\n")
    page.wait_for_selector("text=25 of 25")
    page.wait_for_selector(".body .row:has-text('4.0:0/0')")


def test_compare_puts_the_same_row_beside_the_same_row(page: Any, address: str) -> None:
    open_view(page, address, "#/compare?left=0&right=1&kind=train&from=1&to=1")
    page.wait_for_selector(".body .row")
    assert page.locator(".body .row").count() == 2
    assert "2 better, 0 worse" in page.inner_text(".bar")
    page.click(".body .row >> nth=0")
    page.wait_for_selector(".pane >> nth=1")
    assert [text.split()[0] for text in page.locator(".pane h2").all_inner_texts()] == ["first", "second"]


def test_every_view_is_used_by_keyboard(page: Any, address: str) -> None:
    open_view(page, address, "#/compare?left=0&right=1&kind=train&from=1&to=1")
    page.wait_for_selector(".body .row[aria-rowindex='2'][aria-selected=true]")
    page.keyboard.press("j")
    second = page.wait_for_selector(".body .row[aria-rowindex='3'][aria-selected=true]").inner_text().split()[1]
    page.keyboard.press("Enter")
    page.wait_for_selector(f".pane [aria-label='Messages of 1.0:{second}/0']")
    page.keyboard.press("Escape")
    page.wait_for_selector(".table.pairs")
    page.keyboard.press("3")
    page.wait_for_selector("svg .engine")
    page.keyboard.press("k")
    page.wait_for_url(re.compile("step=2"))
    page.keyboard.press("j")
    page.wait_for_url(re.compile("step=3"))
    for key, view in (("1", "curves"), ("2", "conversations"), ("4", "compare"), ("5", "evaluations")):
        page.keyboard.press(key)
        page.wait_for_selector(f"nav a[aria-current=page][href='#/{view}']")
    page.wait_for_selector("main .scroll")
    for _ in range(40):  # the focus reaches the content of each view
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('main .scroll') !== null"):
            break
    else:
        raise AssertionError("the focus does not reach the content")


def test_the_exported_file_needs_nothing_else(page: Any, run: Path, other: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    size = export([ViewedRun(run), ViewedRun(other)], file)
    assert size == file.stat().st_size
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("section[aria-label='reward/mean'] canvas")
    page.evaluate("location.hash = '#/conversations?query=owned'")
    page.wait_for_selector("text=1 of 24")
    page.evaluate("location.hash = '#/conversation?number=23&show=tokens'")
    page.wait_for_selector(".token")
    page.evaluate("location.hash = '#/timeline'")
    page.wait_for_selector("svg .engine")
    assert page.title() == "turnwise"
    assert {url.partition(":")[0] for url in requests} <= {"file", "data"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_its_window(page: Any, address: str, scheme: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.emulate_media(color_scheme=scheme)
    for name, view in VIEWS.items():
        open_view(page, address, view)
        page.wait_for_selector("main :is(section, article, .body .row, .token, svg, table)")
        page.wait_for_timeout(500)
        page.screenshot(path=SCREENSHOTS / f"{name.replace(' ', '-')}-{scheme}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1300, name
        page.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_timeout(300)
        page.screenshot(path=SCREENSHOTS / f"{name.replace(' ', '-')}-{scheme}-400.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
        page.set_viewport_size({"width": 1300, "height": 800})
        assert page.locator("[role=alert]").count() == 0, name


def test_the_ratio_of_trainer_and_engine(page: Any, address: str) -> None:
    open_view(page, address, "#/conversation?number=0&show=tokens&color=ratio")
    page.hover(".token >> nth=5")
    page.wait_for_selector("text=trainer/engine 1.105")  # exp(0.1)
    assert page.get_attribute(".token >> nth=5", "style") is not None
    assert page.get_attribute(".token >> nth=10", "style") is None  # not trained on: unknown


def test_images_are_shown(page: Any, address: str) -> None:
    open_view(page, address, "#/conversation?number=0")
    image = page.wait_for_selector("img[alt='image in the message']")
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 8


def test_the_timeline_says_what_the_trainer_waited_for(page: Any, address: str) -> None:
    open_view(page, address, "#/timeline?step=2")
    page.wait_for_selector("svg rect.train")
    text = page.inner_text("[aria-label=Timeline]")
    assert "The trainer waited 1 s for the conversations, and trained 1 s." in text
    assert "The last group to end was 2.0:1" in text
    assert (
        page.locator("[aria-label=Timeline] rect.train").count() == 2
    )  # step 1 was trained while conversations of step 2 ran
    assert page.locator("[aria-label=Timeline] rect.tools").count() >= 8


def test_the_page_of_evaluations(page: Any, address: str, evaluation: Path) -> None:
    result = json.loads(evaluation.read_text())
    open_view(page, address, "#/evaluations")
    page.wait_for_selector("caption:has-text('Models: means over 2 rows')")
    rows = page.locator("table >> nth=0").locator("tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["first", "second"]
    assert f"{result['models'][0]['reward']['mean']:.4g} (" in rows[0]
    comparison = page.locator("table >> nth=1").locator("tbody tr").inner_text()
    difference = result["comparisons"][0]["test"]["difference"]["mean"]
    assert comparison.split()[:3] == ["second", "first", f"+{difference:.4g}"]
    page.keyboard.press("1")
    page.wait_for_selector("section[aria-label='reward/mean']")
    page.keyboard.press("5")
    page.click("text=row by row")
    page.wait_for_selector(".body .row")
    assert "2 rows in both" in page.inner_text(".bar")


def test_lines_differ_without_colour(page: Any, address: str) -> None:
    open_view(page, address, "#/curves")
    page.wait_for_selector(".sample line", state="attached")  # a horizontal line has no height
    dashes = [line.get_attribute("stroke-dasharray") for line in page.locator(".sample line").all()]
    assert len(set(dashes)) == len(dashes) == 2


def test_accessible_in_both_themes(browser: Any, address: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        with urllib.request.urlopen(AXE, timeout=30) as answer:
            package = answer.read()
    except OSError as error:
        pytest.skip(f"axe-core cannot be downloaded: {error}")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        script = archive.extractfile("package/axe.min.js").read().decode()  # type: ignore[union-attr]
    context = browser.new_context(viewport={"width": 1300, "height": 800}, bypass_csp=True)
    page = context.new_page()
    problems = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for view in VIEWS.values():
            open_view(page, address, view)
            page.wait_for_timeout(1500)
            page.evaluate(script)
            found = page.evaluate("axe.run()")["violations"]
            problems += [f"{scheme} {view}: {one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]
    context.close()
    assert problems == []
