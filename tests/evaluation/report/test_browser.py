"""The page in a real browser: it fits a phone, follows dark mode, and shows the values under the pointer."""

import json
import shutil

import pytest

from deft.evaluation.report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `dev` has it)")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)}")


def test_the_page_fits_a_phone_follows_dark_mode_and_shows_values(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: {name: ppo}\nenv: a_very_long_name_of_an_environment-v0\n")
    lines = [{"type": "update", "step": step, "time": 0.0, "policy_loss": 10.0 * step} for step in (0, 100, 200)]
    (tmp_path / "episode_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = write_report(tmp_path)
    problems, requests = [], []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        colors = []
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on(
                "request", lambda request: problems.append(request.url) if "report.html" not in request.url else None
            )
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        chart = page.locator("svg.chart").first
        chart.scroll_into_view_if_needed()
        chart.hover()  # its middle is nearest to the second of the three points
        assert page.locator(".tip").inner_text().split() == ["100", "1000"]
        page.mouse.move(1, 1)
        assert page.locator(".tip").count() == 0
        browser.close()
    assert colors == ["rgb(245, 247, 249)", "rgb(18, 23, 29)"]  # --paper of palette.css
    assert not problems
    assert set(requests) <= {path.as_uri()}  # nothing else is loaded
