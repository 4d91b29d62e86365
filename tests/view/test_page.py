"""The page in a real browser: what a person sees of a run, and of what happens to it."""

import contextlib
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from viewed_runs import ENDED, TOKEN, append, make_run, served, write_live

from deft.runs.operator import Command, Operator

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `dev` has it)")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)}")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser):
    """A function that opens a page; at the end no script may have failed, and nothing may be blocked or missing."""
    problems, pages = [], []

    def opened(port, **options):
        page = browser.new_page(**options)
        pages.append(page)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: problems.append(request.url) if "127.0.0.1" not in request.url else None)
        page.goto(f"http://127.0.0.1:{port}/{TOKEN}/")
        sync_api.expect(page.locator("#state")).not_to_have_text("loading")
        opened.problems = problems
        return page

    yield opened
    for page in pages:
        page.close()
    assert not [problem for problem in problems if not problem.startswith("blob:")]


def legend(page, title):
    return page.locator(".chart", has=page.locator("h3", has_text=title)).locator(".u-legend")


def sees(page, text):
    sync_api.expect(page.locator("body")).to_contain_text(text, timeout=10_000)


def test_a_run_in_progress(tmp_path, open_page):
    run = make_run(tmp_path / "tabletop run")
    files = write_live(run)
    (run / "samples").mkdir()
    Image.fromarray(np.full((8, 8, 3), 90, np.uint8)).save(run / "samples" / "episode_4.png")
    with served(run) as port:
        page = open_page(port)
        assert page.title() == "tabletop run · Deft"
        assert page.inner_text("#state") == "training"
        assert page.inner_text("#about") == "ppo · tabletop"
        facts = page.inner_text("#facts")
        for text in ("170", "of 400 steps", "left", "steps/s", "50 %"):
            assert text in facts, text
        # Each of the three environments has two cameras; their pixels are the red of the observation.
        sync_api.expect(page.locator("canvas.tile")).to_have_count(6)
        pixel = page.evaluate(
            "[...document.querySelector('canvas.tile').getContext('2d').getImageData(5, 5, 1, 1).data]"
        )
        assert pixel[0] > 180
        assert max(pixel[1:3]) < 30
        tasks = " ".join(page.inner_text("#tasks").split())
        assert tasks == "push 33 % of the last 3 reach 100 % of the last 3"
        widths = page.locator("#tasks .track div").evaluate_all("bars => bars.map(bar => bar.style.width)")
        assert [float(one.rstrip("%")) for one in widths] == pytest.approx([100 / 3, 100.0], abs=0.01)
        assert page.locator("#bar").evaluate("bar => bar.style.width") == "42.5%"  # 170 of 400
        assert page.locator("#charts canvas").count() == 4
        sync_api.expect(legend(page, "Policy loss")).to_contain_text("0.3333")  # the latest value
        assert page.inner_text("#log").splitlines() == ["INFO one", "INFO <b>two</b>"]
        assert page.locator("#samples img").evaluate("image => image.naturalWidth") == 8
        # What is logged next appears without a reload.
        append(run, {"type": "update", "step": 190, "time": 1_000_050.0, "policy_loss": 0.25})
        files._next = 0.0
        files.update(195, 400)
        sees(page, "195")
        sync_api.expect(legend(page, "Policy loss")).to_contain_text("0.25")


def test_charts_that_are_shown_on_request(tmp_path, open_page):
    with served(make_run(tmp_path / "run", **ENDED)) as port:
        page = open_page(port)
        assert page.inner_text("#state") == "finished"
        assert page.locator("#others canvas").count() == 0
        page.click("summary")
        sync_api.expect(page.locator("#others canvas")).to_have_count(1)


def test_an_empty_run_begins(tmp_path, open_page):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: {name: sac}\n")
    with served(run) as port:
        page = open_page(port)
        sees(page, "Nothing is logged yet")
        make_run(run)
        sync_api.expect(page.locator("#charts canvas")).to_have_count(4)
        assert not page.is_visible("#empty")


def test_a_run_is_removed_and_the_server_ends(tmp_path, open_page):
    run = make_run(tmp_path / "run")
    with served(run) as port:
        page = open_page(port)
        shutil.rmtree(run)
        sees(page, "The run directory was removed")
        assert page.locator("#charts canvas").count() == 4  # what was read stays
        make_run(run, **ENDED | {"status": "stopped", "reason": "SIGINT"})
        sees(page, "Stopped by SIGINT; --resume continues the run.")
    sees(page, "Stopped by SIGINT; --resume continues the run. The server of this page has ended with the training.")
    assert page.inner_text("#state") == "stopped"
    open_page.problems.clear()  # the browser logs requests that failed


def test_a_folder_of_runs(tmp_path, open_page):
    make_run(tmp_path / "first", **ENDED)
    make_run(tmp_path / "second", updates=4, **ENDED | {"status": "failed", "reason": "RunError: <i>no</i>"})
    with served(tmp_path) as port:
        page = open_page(port)
        sync_api.expect(page.locator("#name")).to_have_text("second")  # the latest
        make_run(tmp_path / "third")
        sync_api.expect(page.locator("#name")).to_have_text("third", timeout=10_000)  # the page follows
        assert page.input_value("#runs") == "third"
        page.select_option("#runs", "first")
        sync_api.expect(page.locator("#name")).to_have_text("first")
        page.select_option("#runs", "second")
        sees(page, "RunError: <i>no</i>")  # as text
        assert page.inner_text("#state") == "failed"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_both_schemes(tmp_path, open_page, scheme):
    run = make_run(tmp_path / "a-run-with-quite-a-long-name-20260101-000000-12345")
    write_live(run, num_envs=8)
    with served(run) as port:
        page = open_page(port, viewport={"width": 360, "height": 740}, color_scheme=scheme)
        page.wait_for_selector("canvas.tile")
        assert page.evaluate("document.documentElement.scrollWidth") == 360  # nothing is wider than the screen
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(245, 247, 249)", "dark": "rgb(18, 23, 29)"}[scheme]


def test_a_person_takes_over_with_keys(tmp_path, open_page):
    run = make_run(tmp_path / "run")
    write_live(run)
    person = Operator(run, ["x", "y", "gripper"], 2, 20.0)
    person.open()
    with served(run) as port:
        page = open_page(port)
        sees(page, "training at full speed")
        sees(page, "Space gripper")
        assert person.poll() is None
        page.locator("#watch").click()
        command = polled(person, lambda found: found is not None)
        assert command == Command(0, None)
        image = np.full((8, 8, 3), 90, np.uint8)
        person.show(
            image, env=0, acts="policy", action=[0.0, 0.0, -1.0], text="reach the red cube", episodes=2, success=True
        )
        sees(page, "reach the red cube 2 episodes ended · the last one succeeded")
        sync_api.expect(page.locator("#frame")).to_be_visible()
        page.keyboard.press("Enter")
        # The gripper stays closed, as the policy had it.
        assert polled(person, lambda found: found.action is not None).action == (0.0, 0.0, -1.0)
        page.keyboard.down("KeyW")
        page.keyboard.down("KeyD")
        assert polled(person, lambda found: found.action[0]).action == (1.0, -1.0, -1.0)
        page.keyboard.down("ShiftLeft")
        assert polled(person, lambda found: found.action[0] < 1).action == pytest.approx((0.3, -0.3, -1.0))
        page.keyboard.up("ShiftLeft")
        page.keyboard.up("KeyW")
        page.keyboard.up("KeyD")
        page.keyboard.press("Space")
        assert polled(person, lambda found: found.action[2] > 0).action == (0.0, 0.0, 1.0)
        person.show(image, env=0, acts="person", action=[0.0, 0.0, 1.0], text="", episodes=2, success=None)
        sees(page, "you act")
        page.keyboard.press("Escape")
        assert polled(person, lambda found: found.action is None) == Command(0, None)
        # A gamepad: its left stick forward and to the right; the button A moves the gripper.
        page.evaluate(
            "navigator.getGamepads = () => [{connected: true, axes: [0.5, -1, 0, 0], buttons: [{pressed: true}]}]"
        )
        page.keyboard.press("Enter")
        # The first poll of the buttons sees A pressed: the gripper, open by now, closes.
        assert polled(person, lambda found: found.action and found.action[0]).action == pytest.approx((1.0, -0.5, -1.0))
        page.locator("#watch").click()
        polled(person, lambda found: found is None)
        sees(page, "training at full speed")
        person.close()
        sync_api.expect(page.locator("#takeover")).to_be_hidden(timeout=10_000)


def polled(person, is_wanted, seconds=10.0):
    """The first command of a page that is wanted."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        command = person.poll()
        with contextlib.suppress(AttributeError, TypeError):  # nobody watches, or nobody acts
            if is_wanted(command):
                return command
        time.sleep(0.02)
    raise AssertionError(f"the last command is {command}")
