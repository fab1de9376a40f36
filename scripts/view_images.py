"""Make the pictures of the viewer in docs/images from a real run, in Chromium: `make pictures`.

make demo
python scripts/view_images.py runs/demo
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from turnwise import record
from turnwise.types import Trajectory
from turnwise.view.runs import ViewedRun
from turnwise.view.server import ViewServer

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WIDTH = 1200


def main() -> int:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--out", type=Path, default=IMAGES, help="the directory of the pictures")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no chromium: apt-get install chromium")
    shown = next((one for one in record.read(options.run) if corrected(one)), None)
    if shown is None:
        raise SystemExit(f"{options.run} has no conversation whose second answer is right: make demo")
    viewed = ViewedRun(options.run)
    viewed.update()
    server = ViewServer([viewed])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
            page.goto(server.address)
            page.wait_for_selector("nav")
            picture(page, "#/overview", "section.chart canvas >> nth=3", options.out / "view.png", height=572)
            tokens = f"#/conversation?id={shown.id}&show=tokens&color=logprob"
            picture(page, tokens, ".token.sampled", options.out / "view_tokens.png", height=890)
            picture(page, "#/statistics", "section.chart canvas", options.out / "view_statistics.png", height=700)
            browser.close()
    finally:
        server.stop()
        thread.join()
        viewed.close()
    return 0


def corrected(trajectory: Trajectory) -> bool:
    """Whether the first answer was wrong and the second one right."""
    return len(trajectory.turns) == 4 and len(trajectory.segments) == 1 and 0 < (trajectory.reward or 0) < 1


def picture(page: Page, view: str, selector: str, file: Path, *, height: int) -> None:
    """A picture of a view when `selector` is there, with the same size and few colours: the file stays small."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.evaluate("view => { location.hash = view }", view)
    page.wait_for_selector(selector)
    page.wait_for_timeout(1000)  # fonts, and charts that are drawn after their frames
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128)
    image.save(file, optimize=True)
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    raise SystemExit(main())
