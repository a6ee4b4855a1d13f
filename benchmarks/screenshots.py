"""Pictures of the web page, into docs/: a desktop in light and a phone in dark colours, with the demo's last tree.

    specexec serve --preset demo --draft self --device-limit 1.4GB --budget 64 --port 8080        (in another terminal)
    python benchmarks/screenshots.py http://127.0.0.1:8080

Needs the bench extra and Debian's chromium.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

_DOCS = Path(__file__).parent.parent / "docs"
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
_QUESTION = "What is the capital of France, and what is it known for?"
_VIEWS = {
    "ui.png": {"viewport": {"width": 1000, "height": 900}, "color_scheme": "light"},
    "ui-phone.png": {"viewport": {"width": 375, "height": 740}, "color_scheme": "dark"},
}


def main(url: str) -> None:
    """Asks one question per view and keeps what the page then shows."""
    _DOCS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_FLAGS)
        for name, options in _VIEWS.items():
            page = browser.new_page(**options)
            page.goto(url)
            page.wait_for_selector("#model:has-text('draft')", timeout=120_000)
            page.get_by_text("Behind the answer").click()
            page.fill("#ask textarea", _QUESTION)
            page.keyboard.press("Enter")
            page.wait_for_selector("#status:has-text('done'), #status:has-text('ended')", timeout=300_000)
            page.wait_for_timeout(1000)
            page.screenshot(path=_DOCS / name, full_page=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
