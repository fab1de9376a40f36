"""The viewer in a real browser: Chromium without a window. Skipped where there is no Chromium."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.viewed_run import conversation
from turnwise.record.datasets import DatasetChoice, write_dataset
from turnwise.record.labels import read_labels, write_label
from turnwise.view.runs import ViewedRun
from turnwise.view.server import ViewServer, export

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIEWS = {
    "overview": "#/overview",
    "runs": "#/runs",
    "curves": "#/curves",
    "curves of one run": "#/curves?smooth=0.6&shown={first}",
    "conversations": "#/conversations",
    "conversation": "#/conversation?id=1.0:0/3",
    "tokens": "#/conversation?id=1.0:0/3&show=tokens&color=advantage",
    "trainer and engine": "#/conversation?id=1.0:0/3&show=tokens&color=ratio",
    "image": "#/conversation?id=1.0:0/0",
    "hostile text": "#/conversation?id=3.0:1/3",
    "group": "#/group?id=1.0:0/3",
    "timeline": "#/timeline",
    "comparison of runs": "#/compare?kind=train",
    "pair": "#/pair?kind=train&row=0",
    "evaluations": "#/evaluations",
    "statistics": "#/statistics",
    "search": "#/search?query=answer",
    "row": "#/row?row=1",
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


PATIENCE = float(os.environ.get("PAGE_TIMEOUT", "120000"))
"""Milliseconds for which a page is waited for, also on a machine that is busy with other tests."""


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1300, "height": 800}, bypass_csp=False)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    # the page may ask once more when the server has ended
    ended, refused = "ERR_CONNECTION_REFUSED", "status of 409"
    page.on(
        "console",
        lambda message: (
            problems.append(message.text)
            if message.type == "error" and ended not in message.text and refused not in message.text
            else None
        ),
    )
    page.set_default_timeout(PATIENCE)
    yield page
    context.close()
    assert problems == []


@pytest.fixture
def address(run: Path, other: Path, evaluation: Path) -> Iterator[str]:
    runs = [ViewedRun(run), ViewedRun(other)]
    server = ViewServer(runs, paths=[run.parent])
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


def write_other_kind(path: Path) -> None:
    """A run of fine-tuning: it shares no metric with the others, and its answers have no log-probabilities."""
    path.mkdir()
    (path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5, "epoch": 0.5}\n{"step": 2, "loss": 1.5, "epoch": 1.0}\n'
    )
    record = {**conversation(0), "id": "0/0", "logprob_kind": "none"}
    (path / "trajectories.jsonl").write_text(json.dumps(record) + "\n")


def test_the_overview_says_what_became_of_a_run(page: Any, address: str, run: Path) -> None:
    """How it ended, warnings, the paired test, failures, options and three conversations: all from the record."""
    ended = {"how": "failed", "step": 3, "time": 1.0, "reason": "the disk is full"}
    (run / "run.json").write_text(json.dumps({"kind": "train", "checkpoint": 2, "ended": ended}))
    (run / "config.yaml").write_text("train: {steps: 10, lr: 0.5}\nhealth: {kl: 1.0}\n")
    (run / "warnings.jsonl").write_text(json.dumps({"step": 2, "name": "kl", "text": "too far"}) + "\n")
    held = [(step, row, 0.2 * row + (step > 0) * (0.5 + 0.01 * row)) for step in (0, 3) for row in range(6)]
    rows = [{**conversation(4 * row, reward=reward), "step": step, "id": f"{row}/0"} for step, row, reward in held]
    (run / "eval_trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    lines = [{"step": 0, "reward/mean": 0.5}, {"step": 3, "reward/mean": 1.025}]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    late = [
        {**conversation(20 + n, step=3, reward=None), "error": {"kind": "environment", "message": f"late by {n} s"}}
        for n in (1, 2)
    ]
    with (run / "trajectories.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in late)
    open_view(page, address, f"#/overview?run={run}")
    page.wait_for_selector("section[aria-label=Reward] canvas")
    text = page.inner_text("[aria-label=Overview]")
    assert "Failed · after 3 of 10 steps · the disk is full" in text
    assert "step 2 kl too far" in text
    assert "+0.525 (" in text
    assert "Better on the same rows (sign-flip test, p = 0.03125): 6 rows better, 0 worse, 0 equal." in text
    assert "1 × environment: no luck latest (step 2)" in text
    assert "2 × environment: late by 2 s (others differ in numbers or quoted texts) latest (step 3)" in text
    assert page.locator("table.options tr").all_inner_texts()[1:] == [
        "train.steps\t10\tnull",
        "train.lr\t0.5\t0.000001",
    ]
    label = page.get_attribute("section[aria-label=Reward] [role=img]", "aria-label")
    assert label == "Reward: reward 0.3, held out 1.025"
    examples = page.locator(".example").all_inner_texts()
    assert [re.search(r"(\w+): reward ([\d.]+)", example).groups() for example in examples] == [  # type: ignore[union-attr]
        ("best", "0.9"), ("median", "0.33"), ("worst", "0.3")
    ]  # fmt: skip
    page.click(".example >> nth=1")
    page.wait_for_selector("b:has-text('3.0:0/3')")


def test_runs_side_by_side(page: Any, address: str, run: Path, other: Path) -> None:
    for path, rate in ((run, 0.1), (other, 0.2)):
        (path / "run.json").write_text(
            '{"kind": "train", "checkpoint": null, "ended": {"how": "finished", "reason": null}}'
        )
        (path / "config.yaml").write_text(f"train: {{steps: 3, lr: {rate}}}\nseed: 1\n")
    open_view(page, address, "#/runs")
    page.wait_for_selector("table.runs tbody tr >> nth=1")
    page.click("button:has-text('reward/mean, last')")
    rows = page.locator("table.runs tbody tr")
    page.wait_for_selector("th[aria-sort=descending]")
    assert [row.split() for row in rows.all_inner_texts()] == [
        ["second", "finished", "3", "of", "3", "0", "0.35", "0.35", "0.2"],
        ["first", "finished", "3", "of", "3", "0", "0.3", "0.3", "0.1"],
    ]
    page.click("button:has-text('reward/mean, last')")
    page.wait_for_selector("table.runs tbody tr:first-child:has-text('first')")
    page.check("[aria-label='mark second']")
    page.click("text=Curves overlaid")
    page.wait_for_selector("[role=img][aria-label^='reward/mean: second 0.35']")


def test_runs_that_differ_in_the_seed_only_have_their_mean(page: Any, address: str, run: Path, other: Path) -> None:
    for path, rate, seed in ((run, 0.1, 1), (other, 0.1, 2)):
        (path / "run.json").write_text('{"kind": "train", "ended": {"how": "finished", "reason": null}}')
        (path / "config.yaml").write_text(f"train: {{steps: 3, lr: {rate}}}\nseed: {seed}\n")
    open_view(page, address, "#/runs?columns=reward%2Fmean")
    page.wait_for_selector("table.seeds tbody tr")
    assert (
        page.locator("table.seeds").inner_text().splitlines()[0].startswith("Over the seeds: mean ± standard deviation")
    )
    assert [row.split() for row in page.locator("table.seeds tbody tr").all_inner_texts()] == [
        ["2", "0.325", "±", "0.03536"],
    ]
    (other / "config.yaml").write_text("train: {steps: 3, lr: 0.2}\nseed: 2\n")
    page.reload()
    page.wait_for_selector("th:has-text('train.lr')")
    assert page.locator("table.seeds").count() == 0


def test_texts_of_the_table_of_runs_are_read_from_the_left_and_are_complete(
    page: Any, address: str, run: Path, other: Path
) -> None:
    """A long option is wrapped, not cut; numbers stand at the right."""
    environments = (
        "my_project.environments.of_shops:customer_with_a_secret_limit",
        "turnwise.environments.users:checked_answer",
    )
    for path, rate, environment in ((run, 0.1, environments[0]), (other, 0.2, environments[1])):
        (path / "config.yaml").write_text(f"train: {{steps: 3, lr: {rate}}}\nenvironment: {{use: {environment}}}\n")
    open_view(page, address, "#/runs")
    cell = page.locator("table.runs td.text:has-text('customer_with_a_secret_limit')")
    cell.wait_for()
    style = "(cell, name) => getComputedStyle(cell)[name]"
    assert cell.evaluate(style, "text-align") == "left"
    assert cell.inner_text() == environments[0]
    assert cell.evaluate(
        "cell => cell.scrollWidth <= cell.clientWidth && cell.firstChild.scrollHeight <= cell.firstChild.clientHeight"
    )
    assert page.locator("th.text:has-text('environment')").evaluate(style, "text-align") == "left"
    assert page.locator("table.runs td.num:has-text('0.35')").first.evaluate(style, "text-align") == "right"
    assert page.evaluate(
        "() => { const box = document.querySelector('[aria-label=Runs]'); return box.scrollWidth <= box.clientWidth; }"
    )


def test_runs_of_another_kind_appear_and_are_chosen(page: Any, address: str, run: Path) -> None:
    open_view(page, address, "#/curves")
    page.wait_for_selector("section[aria-label='reward/mean'] canvas")
    write_other_kind(run.parent / "tuned")
    page.wait_for_selector("label:has-text('tuned') input")  # found while the page is open
    page.wait_for_selector("section[aria-label='loss'] canvas")
    for name in ("first", "second"):
        page.uncheck(f"label:has-text('{name}') input")
    page.wait_for_selector("section[aria-label='loss'] [role=img][aria-label='loss: tuned 1.5']")
    assert page.locator("section[aria-label='reward/mean']").count() == 0
    page.uncheck("label:has-text('tuned') input")
    page.wait_for_selector("text=No run is chosen.")
    for shown in ("first", "tuned", "second"):
        page.evaluate("path => { location.hash = `#/curves?shown=${path}` }", str(run.parent / shown))
        page.wait_for_selector(f"[role=img][aria-label*=': {shown} ']")
    page.evaluate("path => { location.hash = `#/conversations?run=${path}` }", str(run.parent / "gone"))
    page.wait_for_selector("text=The address names a run that is not shown here")
    page.evaluate(
        "path => { location.hash = `#/conversation?run=${path}&id=0/0&show=tokens` }", str(run.parent / "tuned")
    )
    page.hover(".token >> nth=5")
    page.wait_for_selector(".detail:has-text('turn 0')")
    assert "log-probability" not in page.inner_text("main")  # neither a colour nor a number: there are none


def test_curves_show_what_was_measured(page: Any, address: str, run: Path) -> None:
    open_view(page, address, f"#/curves?shown={run}&smooth=0.9")
    page.wait_for_selector(
        "[role=img][aria-label^='reward/mean: first 0.3, 90 %']"
    )  # the last value, not the smoothed one
    legend = page.inner_text("section[aria-label='reward/mean'] .u-legend")
    assert "first, smoothed" in legend
    heights = page.evaluate("import('./static/curves.js').then(({ heightOf }) => heightOf(1e-9, 3e-9, 1e-3))")
    assert heights == [0, 1e-3]  # a divergence of 3e-9 is a line at the bottom
    printed = page.evaluate("import('./static/ui.js').then(({ number }) => [-0, -0.25, 1234].map(number))")
    assert printed == ["0", "-0.25", "1,234"]  # a 0 has no sign: the entropy of greedy sampling is -0
    page.click("section[aria-label='reward/mean'] .u-over", position={"x": 3, "y": 60})
    page.wait_for_selector("text=8 of 24")  # the conversations of step 1
    assert page.input_value("label:has-text('Step') input") == "1"


def test_a_part_of_the_curves_stays_chosen_while_the_run_goes_on(page: Any, address: str, run: Path) -> None:
    open_view(page, address, f"#/curves?shown={run}")
    chart = "section[aria-label='reward/mean']"
    page.wait_for_selector(f"{chart} canvas")
    page.wait_for_timeout(300)
    box = page.locator(f"{chart} .u-over").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40, steps=3)
    page.mouse.up()
    page.mouse.move(5, 5)
    page.wait_for_timeout(200)
    chosen = page.locator(f"{chart} canvas").screenshot()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 0.4, "stop/done": 1.0, "seconds/step": 2.0}) + "\n")
    page.wait_for_selector("[role=img][aria-label^='reward/mean: first 0.4']")
    page.wait_for_timeout(200)
    assert page.locator(f"{chart} canvas").screenshot() == chosen


def test_links_lead_to_the_conversation_that_they_name(page: Any, address: str, other: Path) -> None:
    failed = {**conversation(1, step=0), "reward": 0.75}
    (other / "eval_trajectories.jsonl").write_text(json.dumps(failed) + "\n")
    open_view(page, address, f"#/conversations?run={other}&kind=eval")
    page.wait_for_selector("text=1 of 1")
    with page.context.expect_page() as opened:
        page.click(".body .row >> nth=0", modifiers=["Control"])
    tab = opened.value
    tab.wait_for_selector("b:has-text('0.0:0/1')")
    tab.wait_for_selector("text=reward 0.75")
    tab.wait_for_function("title => document.title === title", arg="0.0:0/1 · second · turnwise")
    assert page.locator(".body .row").count() == 1  # the list is still there
    tab.click("text=Group")
    tab.wait_for_selector("b:has-text('group 0.0:0')")
    tab.click(".pane h2 a")
    tab.wait_for_selector("b:has-text('0.0:0/1')")
    assert f"run={other}" in tab.url
    assert "kind=eval" in tab.url


def test_a_list_keeps_its_place(page: Any, address: str, run: Path) -> None:
    page.set_viewport_size({"width": 1300, "height": 400})
    open_view(page, address, "#/conversations")
    page.wait_for_selector("text=24 of 24")
    top = "document.querySelector('main .scroll').scrollTop"
    page.evaluate(f"{top} = 260")
    page.wait_for_selector(".body .row:has-text('2.0:1/1')")
    page.click(".body .row:has-text('2.0:1/1')")
    page.wait_for_selector("b:has-text('2.0:1/1')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".body .row[aria-selected=true]:has-text('2.0:1/1')")
    assert page.evaluate(top) == 260
    before = page.locator(".body .row:has-text('2.0:0/2')").bounding_box()
    page.mouse.move(before["x"] + 300, before["y"] + 10)
    with (run / "trajectories.jsonl").open("a") as file:
        for place in range(5):
            file.write(json.dumps({**conversation(place, step=4), "id": f"4.0:0/{place}"}) + "\n")
    page.wait_for_selector("text=29 of 29")
    page.wait_for_timeout(200)
    assert page.locator(".body .row:has-text('2.0:0/2')").bounding_box()["y"] == before["y"]


def test_long_messages_are_folded_and_a_row_is_followed(page: Any, address: str, run: Path) -> None:
    record = conversation(1, step=4, text="begin " + "long " * 4000 + "end")
    with (run / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    open_view(page, address, "#/conversations?query=4.0:0/1")
    page.wait_for_selector("text=1 of 25")  # found by its id
    page.click(".body .row >> nth=0")
    page.click("text=show 14,009 more characters")
    page.wait_for_selector("text=show 14,009 more characters", state="detached")
    page.click("text=This row over time")
    page.wait_for_selector("text=13 of 25")
    assert page.inner_text(".body .row >> nth=0").startswith("1.0:0/0")


def test_a_filter_says_what_it_does_not_understand(page: Any, address: str, run: Path) -> None:
    open_view(page, address, "#/conversations")
    page.wait_for_selector("text=24 of 24")
    for count, (label, text) in enumerate((("Reward from", "0,5"), ("Step", "abc"), ("Step", "5-2")), start=25):
        page.fill(f"label:has-text('{label}') input", text)
        with (run / "trajectories.jsonl").open("a") as file:  # the page of a live run is drawn again while one types
            file.write(json.dumps(conversation(count, step=4)) + "\n")
        page.wait_for_selector(f"text={count} of {count}")
        assert page.input_value(f"label:has-text('{label}') input") == text
        page.keyboard.press("Tab")
        page.wait_for_selector(f"[role=alert]:has-text('“{text}”')")
        assert page.get_attribute(f"label:has-text('{label}') input", "aria-invalid") == "true"
        page.wait_for_selector(f"text={count} of {count}")  # and it hides nothing
        page.click("text=Reset")
    page.check("label:has-text('failed') input")
    page.wait_for_selector("text=1 of 27")
    with page.expect_download() as download:
        page.click("text=CSV")  # what is listed
    (row,) = csv.DictReader(download.value.path().read_text().splitlines())
    assert (download.value.suggested_filename, row["id"], row["error"]) == ("first-train.csv", "2.0:0/3", "environment")
    page.locator("label:has-text('failed') input").focus()
    page.keyboard.press("?")  # the key of the page, although a checkbox has the focus
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("3")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")
    assert page.url.split("#/")[1].startswith("conversations")


def test_the_colours_of_a_group_have_one_scale(page: Any, address: str, run: Path) -> None:
    with (run / "trajectories.jsonl").open("a") as file:
        for number, advantage in enumerate((0.13, 1.13, -0.5, -2.0)):
            line = conversation(number, step=4)
            for turn in line["turns"]:
                turn["advantage"] = advantage
            file.write(json.dumps(line) + "\n")
    open_view(page, address, "#/group?id=4.0:0/0&show=tokens&color=advantage")
    page.wait_for_selector(".legend:has-text('-2 … +2') >> nth=3")
    small, large = (page.get_attribute(f".pane[aria-label='4.0:0/{n}'] .token >> nth=5", "style") for n in (0, 1))
    assert None not in (small, large)
    assert small != large


def test_filter_sort_open_by_keyboard(page: Any, address: str) -> None:
    open_view(page, address, "#/conversations")
    page.wait_for_selector(".body .row")
    page.wait_for_selector("text=24 of 24")
    page.wait_for_selector(
        ".body .row:has-text('turns 0, answer 0.5'):has-text('What is 2+2?'):has-text('The answer is 4.')"
    )
    page.wait_for_selector(".body .row:has-text('environment: no luck')")
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
    open_view(page, address, "#/group?id=1.0:0/2")
    page.wait_for_selector(".pane")
    page.evaluate(KEYS_WITHOUT_A_FRAME, ["Escape", "Escape"])
    page.wait_for_selector("text=24 of 24", timeout=20_000)
    assert page.url.split("#/")[1].startswith("conversations")


def test_tokens_say_what_they_are(page: Any, address: str) -> None:
    open_view(page, address, "#/conversation?id=1.0:0/0&show=tokens&color=logprob")
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
    page.keyboard.press("s")  # to the next turn
    page.wait_for_selector(".detail:has-text('turn 1')")
    page.hover(".token >> nth=10")
    assert "advantage -0.2" in page.inner_text(".detail")  # one number for each token


def test_texts_of_the_model_are_texts(page: Any, address: str) -> None:
    open_view(page, address, "#/conversation?id=3.0:1/3")
    page.wait_for_selector("pre:has-text('</script><script>')")
    page.wait_for_function("title => document.title === title", arg="3.0:1/3 · first · turnwise")
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
    open_view(page, address, "#/compare?kind=train&from=1&to=1")
    page.wait_for_selector(".body .row")
    assert page.locator(".body .row").count() == 2
    assert "2 better, 0 worse" in page.inner_text(".bar")
    row = page.inner_text(".body .row >> nth=0").split()[1]
    page.click(".body .row >> nth=0")
    page.wait_for_selector(".pane >> nth=1")
    assert [text.split()[0] for text in page.locator(".pane h2").all_inner_texts()] == ["first", "second"]
    samples = page.locator("[aria-label='Sample of second'] button")
    assert samples.all_inner_texts() == [f"{n + 1}: {0.19 + n / 100:.4g}" for n in range(4)]  # all of the row
    samples.nth(3).click()
    page.wait_for_selector(f".pane[aria-label=second] [aria-label='Messages of 1.0:{row}/3']")
    page.keyboard.press("Escape")
    page.wait_for_selector(".body .row[aria-rowindex='2'][aria-selected=true]")


def test_a_search_over_all_runs_and_kinds(page: Any, address: str, other: Path) -> None:
    held = {**conversation(1, step=0, text="a heron"), "reward": 0.75}
    (other / "eval_trajectories.jsonl").write_text(json.dumps(held) + "\n")
    open_view(page, address, "#/search")
    page.wait_for_selector("text=49 conversations of 2 runs")
    page.fill("input[type=search]", "3.0:1/3")  # an id
    page.wait_for_selector("text=2 found in 2 of 2 runs")
    assert "</script><script>" in page.inner_text("main")  # a text of the model is text
    page.fill("input[type=search]", "hero")
    page.wait_for_selector("caption:has-text('second, evaluations')")
    page.click("a:has-text('0.0:0/1')")
    page.wait_for_selector("text=reward 0.75")


def test_two_answers_to_a_row_are_compared_word_by_word(page: Any, address: str, run: Path) -> None:
    with (run / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(conversation(0, step=4, text="The <b>best</b> answer is 4.")) + "\n")
    open_view(page, address, f"#/conversation?run={run}&id=4.0:0/0")
    page.click("text=Answers compared")
    page.wait_for_selector("text=13 conversations in 4 steps")
    page.wait_for_selector("pre.difference")
    assert [part.strip() for part in page.locator("pre ins").all_inner_texts()] == ["<b>best</b>"]
    assert page.locator("pre del").count() == 0
    page.click("text=the first answer")
    page.click("button[aria-label^='step 4']")
    page.wait_for_selector("text=The answers are equal.")


def test_labels_and_selections(page: Any, address: str, run: Path) -> None:
    """A person's labels are kept beside the run, filter the list, and choose what is saved as JSON lines and SFT rows."""
    open_view(page, address, f"#/conversation?run={run}&id=1.0:0/3")
    page.fill("label:has-text('Labels') input", "good, <b>x</b>")
    page.fill("label:has-text('Note') input", "why?")
    page.keyboard.press("Enter")
    page.wait_for_selector("button:text-is('Save')", state="detached")
    (label,) = read_labels(run)
    assert (label.id, label.step, label.labels, label.note) == ("1.0:0/3", 1, ("good", "<b>x</b>"), "why?")
    page.fill("label:has-text('Note') input", "mine")
    write_label(run, dataclasses.replace(label, labels=("good",), note="another's"))
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert]:has-text('were changed meanwhile')")
    page.click("text=Undo")
    page.evaluate("path => { location.hash = `#/conversations?run=${path}&label=good` }", str(run))
    page.wait_for_selector("text=1 of 24")
    page.wait_for_selector(".body .row:has-text('1.0:0/3'):has-text('good')")
    lines = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    with page.expect_download() as download:
        page.click("text=JSON lines")
    assert [json.loads(line) for line in download.value.path().read_text().splitlines()] == [lines[3]]
    with page.expect_download() as download:
        page.click("button:text-is('SFT')")
    write_dataset(run, run / "chosen", DatasetChoice(what="sft", label="good"))
    assert download.value.path().read_bytes() == (run / "chosen" / "train.jsonl").read_bytes()


def test_statistics_lead_to_the_conversations_that_they_count(page: Any, address: str, run: Path) -> None:
    """A cell of the histograms, a curve of a tool and a message of its errors open exactly the conversations in them."""
    open_view(page, address, f"#/statistics?run={run}")
    page.wait_for_selector("table.tools")
    # conversations without a line of metrics, as those of a step that ended the run: an open page follows
    with (run / "trajectories.jsonl").open("a") as file:
        for place, second in enumerate((1, 2, 31)):
            line = conversation(place, step=4)
            call = line["turns"][0]["tool_calls"][0]
            call.update(error="raised", content=f"<b>no answer</b> after {second} s", seconds=float(second))
            line["turns"][0]["reward"] = 0.5
            file.write(json.dumps(line) + "\n")
        line = conversation(3, step=4)
        line["turns"][0]["tool_calls"][0].update(name="", error="malformed", content="")
        line["turns"][0]["reward"] = 0.5
        file.write(json.dumps(line) + "\n")
    page.wait_for_selector("text=<b>no answer</b> after 31 s")
    rows = page.locator("table.tools tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["calculator", "27", "3", "0.1111", "1.35 s", "31 s", "27"],
        ["(without a name)", "1", "1", "1", "0.1 s", "0.1 s", "1"],
    ]
    label = page.get_attribute("section[aria-label='Reward by turn'] [role=img]", "aria-label")
    assert label == "Reward by turn: turn 0 0.5, turn 1 0.5"
    label = page.get_attribute("section[aria-label='Reward by part'] [role=img]", "aria-label")
    assert label == "Reward by part: answer 0.5, turns 0"
    label = page.get_attribute("section[aria-label='Failed tool calls'] [role=img]", "aria-label")
    assert label == "Failed tool calls: calculator 1, (without a name) 1"
    page.click("table.options td a:text-is('3')")
    page.wait_for_selector("text=3 of 28")  # one group of messages, although the seconds differ
    page.click(".body .row >> nth=0")
    href = page.get_attribute("a:text-is('This row over time')", "href")
    assert href == f"#/conversations?run={run}&kind=train&row=0&sort=step&down=0"  # nothing of the list before
    page.click("text=← List")
    page.click("text=calls of calculator with raised")
    page.wait_for_selector("text=28 of 28")
    for link, said in (("table.tools", "a tool without a name ✕"), ("table.options", "malformed without a message")):
        page.evaluate("path => { location.hash = `#/statistics?run=${path}` }", str(run))
        page.click(f"{link} tr:has-text('(without a name)') td a >> nth=0")
        page.wait_for_selector(f"button:has-text('{said}')")
        page.wait_for_selector("text=1 of 28")
    page.evaluate("path => { location.hash = `#/conversations?run=${path}&tool=calculator&error=*` }", str(run))
    page.wait_for_selector("text=3 of 28")  # as a click on the share of failed calls
    page.evaluate("path => { location.hash = `#/statistics?run=${path}` }", str(run))
    cell = page.locator("section[aria-label=Rewards] rect.cell >> nth=0")
    cell.hover(position={"x": 2, "y": 2})
    said = page.wait_for_selector("section[aria-label=Rewards] p:has-text('reward:')").inner_text()
    cell.click(position={"x": 2, "y": 2})
    count = re.search(r"(\d+) conversations?$", said)
    page.wait_for_selector(f"text={count[1]} of 28")  # type: ignore[index]


def test_every_view_is_used_by_keyboard(page: Any, address: str) -> None:
    open_view(page, address, "#/compare?kind=train&from=1&to=1")
    page.wait_for_selector(".body .row[aria-rowindex='2'][aria-selected=true]")
    page.keyboard.press("j")
    second = page.wait_for_selector(".body .row[aria-rowindex='3'][aria-selected=true]").inner_text().split()[1]
    page.keyboard.press("Enter")
    page.wait_for_selector(f".pane [aria-label='Messages of 1.0:{second}/0']")
    page.keyboard.press("Escape")
    page.wait_for_selector(".table.pairs")
    page.keyboard.press("5")
    page.wait_for_selector("svg .engine")
    page.keyboard.press("k")
    page.wait_for_url(re.compile("step=2"))
    page.keyboard.press("j")
    page.wait_for_url(re.compile("step=3"))
    for key, view in (
        ("1", "overview"),
        ("2", "runs"),
        ("3", "curves"),
        ("4", "conversations"),
        ("6", "compare"),
        ("7", "evaluations"),
        ("8", "statistics"),
        ("9", "search"),
    ):
        page.keyboard.press(key)
        page.wait_for_selector(f"nav a[aria-current=page][data-view={view}]")
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
    page.goto(f"{file.as_uri()}#/curves")
    page.wait_for_selector("section[aria-label='reward/mean'] canvas")
    page.evaluate("location.hash = '#/conversations?query=owned'")
    page.wait_for_selector("text=1 of 24")
    for query, found in (('"answer is"', 23), ('"is answer"', 0), ("answ", 23), ("answ is", 0), ("role", 0)):
        page.evaluate("query => { location.hash = `#/conversations?query=${encodeURIComponent(query)}` }", query)
        page.wait_for_selector(f"text={found} of 24")
    page.evaluate("location.hash = '#/conversation?id=3.0:1/3&show=tokens'")
    page.wait_for_selector(".token")
    page.evaluate("location.hash = '#/timeline'")
    page.wait_for_selector("svg .engine")
    page.wait_for_function("title => document.title === title", arg="timeline · first · turnwise")
    assert {url.partition(":")[0] for url in requests} <= {"file", "data"}


def test_an_exported_part_is_said_to_be_a_part(page: Any, run: Path, tmp_path: Path) -> None:
    """The latest 3 conversations come with the 4th of their group, and their step's timeline is that of all 8."""
    file = tmp_path / "page.html"
    export([ViewedRun(run)], file, most=3)
    page.goto(f"{file.as_uri()}#/conversations")
    page.wait_for_selector("text=4 of 4")
    page.wait_for_selector("text=this file has 4 of the 24 conversations of the run")
    page.evaluate("location.hash = '#/group?id=3.0:1/1'")
    page.wait_for_selector("text=4 conversations, mean reward 0.4875")
    page.evaluate("location.hash = '#/timeline?step=3'")
    page.wait_for_selector("text=8 conversations in")
    assert page.locator("svg a[href]").count() == 4


def test_statistics_say_what_they_leave_out(page: Any, tmp_path: Path) -> None:
    """An export of the last 100 of 130 steps, of a run that recorded a part, with many turns and tools that the model invents."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("record: {best_and_worst: 1}")
    lines = [conversation(0, step=step, reward=step / 200) for step in range(1, 131)]
    for step, line in enumerate(lines, 1):
        (call,) = line["turns"][0]["tool_calls"]
        call["name"] = f"tool {step}" if step <= 60 else "calculator"
        line["turns"] += [{**line["turns"][1], "reward": 0.25}] * 8
    (run / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = tmp_path / "page.html"
    export([ViewedRun(run)], file, most=100)
    page.goto(f"{file.as_uri()}#/statistics")
    label = page.wait_for_selector("section[aria-label=Rewards] [role=img]").get_attribute("aria-label")
    assert label == "Rewards: 0.155 to 0.65 over steps 31 to 130"
    page.wait_for_selector(
        "text=The two maps show the 100 conversations of this file; the curves and tables are of all 130"
    )
    page.wait_for_selector("text=a part of all conversations is recorded (record.every=1, record.best_and_worst=1)")
    assert page.inner_text("table.tools tbody tr >> nth=-1").split("\t")[:2] == ["11 other tools", "11"]
    page.wait_for_selector("section[aria-label='Tool calls'] p:has-text('Drawn are 8 of 61')")
    turns = page.locator("section[aria-label='Reward by turn']")
    assert "Drawn are 8 of 10" in turns.inner_text()
    assert turns.locator("[role=img]").get_attribute("aria-label").endswith("turn 6 0.25, turn 9 0.25")
    over = turns.locator(".u-over")
    box = over.bounding_box()
    over.click(position={"x": 2, "y": 5})  # step 1, of which no conversation is in the file
    assert "#/statistics" in page.url
    over.click(position={"x": box["width"] - 3, "y": 5})
    page.wait_for_selector("text=1 of 100")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_its_window(page: Any, address: str, run: Path, scheme: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.emulate_media(color_scheme=scheme)
    for name, view in VIEWS.items():
        open_view(page, address, view.format(first=run))
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
    open_view(page, address, "#/conversation?id=1.0:0/0&show=tokens&color=ratio")
    page.hover(".token >> nth=5")
    page.wait_for_selector("text=trainer/engine 1.105")  # exp(0.1)
    assert page.get_attribute(".token >> nth=5", "style") is not None
    assert page.get_attribute(".token >> nth=10", "style") is None  # not trained on: unknown


def test_images_are_shown(page: Any, address: str) -> None:
    open_view(page, address, "#/conversation?id=1.0:0/0")
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
    assert "only" not in page.locator("table >> nth=1").locator("caption").inner_text()
    page.keyboard.press("3")
    page.wait_for_selector("section[aria-label='reward/mean']")
    page.keyboard.press("7")
    page.click("text=row by row")
    page.wait_for_selector(".body .row")
    assert "2 rows in both" in page.inner_text(".bar")


def test_models_that_are_compared_with_the_first_only_are_said_to_be(page: Any, address: str, evaluation: Path) -> None:
    result = json.loads(evaluation.read_text())
    for list_, key in (("models", "name"), ("comparisons", "first")):
        result[list_].append({**result[list_][-1], key: "third"})
    evaluation.write_text(json.dumps(result))
    open_view(page, address, "#/evaluations")
    page.wait_for_selector("caption:has-text('minus the second; each model is compared with first only')")


def test_lines_differ_without_colour(page: Any, address: str) -> None:
    open_view(page, address, "#/curves")
    page.wait_for_selector(".sample line", state="attached")  # a horizontal line has no height
    dashes = [line.get_attribute("stroke-dasharray") for line in page.locator(".sample line").all()]
    assert len(set(dashes)) == len(dashes) == 2


def test_accessible_in_both_themes(browser: Any, address: str, run: Path) -> None:
    try:
        with urllib.request.urlopen(AXE, timeout=30) as answer:
            package = answer.read()
    except OSError as error:
        pytest.skip(f"axe-core cannot be downloaded: {error}")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        script = archive.extractfile("package/axe.min.js").read().decode()  # type: ignore[union-attr]
    context = browser.new_context(viewport={"width": 1300, "height": 800}, bypass_csp=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    problems = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for view in VIEWS.values():
            open_view(page, address, view.format(first=run))
            page.wait_for_timeout(1500)
            page.evaluate(script)
            found = page.evaluate("axe.run()")["violations"]
            problems += [f"{scheme} {view}: {one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]
    context.close()
    assert problems == []


def test_the_conversations_of_an_episode_lead_to_each_other(page: Any, address: str, run: Path) -> None:
    of_agent = {**conversation(0, step=3), "id": "3.0:0/0/critic", "agent": "critic", "episode": "3.0:0/0"}
    with (run / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(of_agent) + "\n")
    open_view(page, address, f"#/conversations?run={run}&agent=critic")
    page.wait_for_selector("text=agent critic")
    assert page.locator("[role=grid] .body .row").count() == 1
    page.click("a:has-text('3.0:0/0/critic')")
    page.wait_for_selector("a.button[aria-current=page]:has-text('critic')")
    page.wait_for_selector("text=This row over time")
    assert page.locator("text=Answers compared").count() == 0  # that page is without the agents
    page.click("a.button:text-is('row')")
    page.wait_for_selector("b:text-is('3.0:0/0')")
