"""The page as a browser shows it, at a desk and on a phone: what comes first, what is folded away, what can be read."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.chromium import Chromium
from report_runs import CONFIG, make_run, sample

from enginehouse_report.page import write_report
from enginehouse_report.server import RunServer
from enginehouse_rl.runs import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,  # where no browser is they skip, which CI may not
    pytest.mark.sources("plugins/report/src/enginehouse_report/"),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not on this machine"),
]

STEPS = 30
SCREEN = 844
"""The height of a phone's screen in CSS pixels."""


def write_run(path: Path, config: str = CONFIG) -> RunDirectory:
    """Write a run that learns: some metrics change, some are constant, and some are rounding noise."""
    run = make_run(path, steps=0, config=config)
    for step in range(1, STEPS + 1):
        part = step / STEPS
        reward = {"reward/mean": part, "reward/std": 0.2, "reward/min": 0.0, "reward/max": 1.0}
        constant = {"rollout/replicas": 1.0, "rollout/restarts": 0.0, "kl": step * 1e-14}
        times = {"time/step": 0.2, "time/generate": 0.1 + 0.01 * part, "time/update": 0.08, "time/reward": 0.0001}
        run.log(step, {**reward, **constant, **times, "entropy": 1.5 - part})
        now = float(step)
        run.timeline.span("update", now, now + 0.1)
        run.timeline.lane("rollout", "resume_weights", now, now + 0.15)
        run.timeline.span(f"step {step}", now, now + 0.2)
    for step, right in ((0, 1), (STEPS, 4)):
        run.log_validation(step, {"validation/reward": right / 5})
        rows = [
            sample(number, reward=float(number < right), reference=f"a{number}", group=number) for number in range(5)
        ]
        run.write_samples(step, rows, "validation")
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a good run, of one with an alarm, of one that failed, and of two side by side."""
    folder = tmp_path_factory.mktemp("pages")
    good = write_run(folder / "good")
    good.finish("finished")
    alarmed = write_run(folder / "alarmed", CONFIG.replace("0.001", "0.01"))
    alarm = {"step": 9, "alarm": "entropy_collapse", "said": "the entropy fell", "advice": "raise it"}
    (alarmed.path / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    alarmed.finish("finished")
    failed = make_run(folder / "failed", steps=1)
    failed.finish("failed", "it broke", "Traceback")
    runs = {"good": [good], "alarmed": [alarmed], "failed": [failed], "two": [good, alarmed]}
    for name, members in runs.items():
        write_report([run.path for run in members], folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in runs}


class View:
    """A page in the browser's window."""

    def __init__(self, browser: Chromium, page: Path, width: int = 1280):
        self.browser = browser
        browser.problems.clear()
        browser.asked.clear()
        browser.shape(width, SCREEN, phone=width < 600)
        browser.open(page.as_uri())
        # Draw all charts at once instead of as they come into view.
        self.ask("state.charts.forEach((chart) => chart.draw())")
        self.ask("showTimelines()")

    def ask(self, expression: str):
        return self.browser.evaluate(expression)

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true; the page evaluates it once a frame."""
        look = f"const look = () => ({condition}) ? done() : requestAnimationFrame(look); look();"
        self.ask(f"new Promise((done) => {{ {look} }})")

    def text(self, selector: str) -> str:
        return self.ask(f"document.querySelector({selector!r}).innerText")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all visible elements of a selector."""
        return self.ask(
            f"[...document.querySelectorAll({selector!r})].filter((e) => e.checkVisibility()).map((e) => e.innerText)"
        )

    def top(self, selector: str) -> float:
        return self.ask(f"document.querySelector({selector!r}).getBoundingClientRect().top + scrollY")


@pytest.fixture
def wide(browser: Chromium, pages: dict[str, Path]) -> View:
    return View(browser, pages["good"])


@pytest.fixture
def phone(browser: Chromium, pages: dict[str, Path]) -> View:
    return View(browser, pages["good"], width=390)


def test_the_result_comes_first(wide: View):
    headline = wide.text(".headline")
    for words in ("0.183 → 0.850", "0.200 → 0.800", "/step", "No alarms"):
        assert words in headline
    assert wide.top(".headline") < wide.top("#showcase") < wide.top("#charts")
    assert not wide.ask("document.querySelector('.details').open")


def test_a_bad_and_a_good_sample_and_a_prompt_before_and_after_stand_above_the_charts(wide: View):
    bad, good, both = wide.texts(".sample-card")
    assert "0.000 ab" in bad
    assert "4+1=" in bad
    assert "Reference answer: a4" in bad
    assert "1.000 ab" in good
    assert both.index("step 0 0.000") < both.index("step 30 1.000")


def test_an_alarm_is_amber_and_above_the_facts(browser: Chromium, pages: dict[str, Path]):
    view = View(browser, pages["alarmed"])
    assert view.text(".status") == "finished, 1 alarm"
    assert view.ask("document.querySelector('.status').classList.contains('warn')")
    assert view.ask("[...document.querySelectorAll('.headline .warn')].at(-1).innerText").endswith("1 alarm")
    assert view.top(".alarms") < view.top(".details")
    assert "raise it" in view.text(".alarms")


def test_the_error_of_a_failed_run_is_seen_at_once(browser: Chromium, pages: dict[str, Path]):
    view = View(browser, pages["failed"], width=390)
    assert view.text("pre.bad") == "it broke"
    assert view.top("pre.bad") < SCREEN / 2
    assert browser.problems == []


def test_a_run_that_failed_before_its_first_step_is_shown_without_empty_controls(browser: Chromium, tmp_path: Path):
    run = make_run(tmp_path / "run", steps=0)
    run.finish("failed", "no luck")
    write_report([run.path], tmp_path / "page.html")
    view = View(browser, tmp_path / "page.html")
    assert view.texts("#samples-tools, .table, #showcase") == []
    assert view.text("#charts-hint") == "No metrics yet."
    assert browser.problems == []


def test_what_never_changes_or_only_by_rounding_is_a_line_of_text(wide: View):
    titles = " ".join(wide.texts("#chart-grid h3"))
    constants = wide.text("#constants")
    for title, value in (("KL divergence", "0 nats/token (below 1e-8)"), ("Live replicas", "1")):
        assert title not in titles
        assert f"{title}: {value}" in constants
    assert wide.texts("#chart-grid h3")[0] == "Reward"


def test_axes_have_labels_units_and_one_range(wide: View):
    titles = wide.texts("#chart-grid h3")
    assert {"Entropy (nats/token)", "Time per step (ms)"} <= set(titles)
    assert wide.texts("#chart-grid .x-label") == ["step"] * len(titles)
    ranges = wide.ask("state.charts.filter((c) => c.plot).map((c) => [c.plot.scales.x.min, c.plot.scales.x.max])")
    assert ranges == [[0, STEPS]] * len(titles)


def test_the_keys_explain_the_band_and_say_of_which_step_they_are(wide: View):
    keys = wide.text("#chart-reward .keys")
    assert "±1 standard deviation" in keys
    assert keys.startswith("last")
    wide.ask("state.charts.find((c) => c.spec.id === 'reward').plot.setCursor({ left: 5, top: 5 })")
    assert wide.text("#chart-reward .keys").startswith("step ")


def test_phases_of_hardly_any_time_are_left_out(wide: View):
    keys = wide.text("#chart-phases .keys")
    assert "time/generate" in keys
    assert "time/reward" not in keys
    assert "below 1%" in wide.text("#chart-phases .about")


def test_the_timeline_has_a_key_that_tells_work_from_waiting(wide: View):
    keys = wide.text("#timeline-body .keys")
    assert "update" in keys
    assert "resume_weights (mostly waits)" in keys


def test_samples_begin_with_the_failures_of_the_last_validation(wide: View):
    first = wide.texts(".table .body .row")[0].split("\n")
    assert first[:4] == ["0.000", "4+1=", "ab⏎", "a4"]
    assert wide.text("#samples-tools [role=status]") == "5 rows of 10"


def test_a_phone_shows_the_prompt_and_below_it_the_response(phone: View):
    lines = phone.texts(".table .body .row:first-child .line")
    assert lines == ["4+1=", "0.000 ab⏎ (reference: a4)"]
    assert phone.ask("document.querySelector('.table').scrollWidth <= document.querySelector('.table').clientWidth")


def test_a_phone_has_a_bar_of_one_line_large_targets_and_at_most_twelve_screens(phone: View):
    assert phone.ask("getComputedStyle(document.querySelector('.bar')).position") == "sticky"
    assert phone.ask("document.querySelector('.bar').offsetHeight") <= 48
    small = phone.ask(
        "[...document.querySelectorAll('button, select, input[type=search], summary, nav a')]"
        ".filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 36).map((e) => e.outerHTML)"
    )
    assert small == []
    assert phone.ask("document.documentElement.scrollWidth") == 390
    assert phone.ask("document.documentElement.scrollHeight") <= 12 * SCREEN


def test_a_sample_is_two_blocks_shaded_by_who_wrote_it(wide: View):
    wide.ask("document.querySelector('.table .body .row').click()")
    wide.wait_for("document.querySelector('#sample .earlier')")
    assert wide.texts("#sample h3")[:2] == ["Prompt", "Response"]
    assert [text.strip() for text in wide.texts("#sample .tokens")] == ["4+1=", "ab⏎"]
    assert wide.ask("document.querySelector('#sample select').value") == "mask"
    assert wide.texts("#sample .scale span") == ["policy", "prompt or environment"]
    assert "step 0: 0.000" in wide.text("#sample .earlier")


def test_arrow_keys_go_from_sample_to_sample(wide: View):
    wide.ask("openSample(0, samplesTable.order[0])")
    wide.ask("document.querySelector('#sample').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))")
    wide.wait_for("document.querySelector('#sample .top').innerText.includes('line 1 of')")


def test_all_metrics_are_closed_until_they_are_searched(wide: View):
    assert wide.texts("#metrics-list li") == []
    wide.ask("{ const box = $('metrics-search'); box.value = 'entr'; box.dispatchEvent(new Event('input')); }")
    assert [text.split("\n")[0] for text in wide.texts("#metrics-list li")] == ["entropy nats/token"]
    wide.ask("document.querySelector('#metrics-list button').click()")
    assert wide.ask("document.querySelector('#metrics-list .chart').checkVisibility()")


def test_the_config_begins_with_the_changed_keys(wide: View):
    assert wide.text("#config h3") == "Changed from defaults"
    assert "train.steps" in wide.text("#config table")


def test_of_two_runs_the_differences_come_first(browser: Chromium, pages: dict[str, Path]):
    view = View(browser, pages["two"])
    assert view.text("#overview h2") == "Differences between the runs"
    assert "actor.engine.options.lr" in view.text("#overview table")
    assert view.top("#overview table") < view.top(".details")
    assert view.texts("#run-keys li") == ["good", "alarmed"]
    assert "good" not in view.text("#chart-reward .keys")
    assert "±1" not in view.text("#chart-reward .keys")
    view.ask("$('bands').click()")
    assert "±1" in view.text("#chart-reward .keys")


def test_a_watched_run_is_the_same_page(browser: Chromium, tmp_path: Path):
    run = write_run(tmp_path / "run")
    run.finish("finished")
    browser.problems.clear()
    with RunServer(run.path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        browser.open(server.url)
        headline, row = (
            browser.evaluate(f"document.querySelector({selector!r}).innerText")
            for selector in (".headline", ".table .body .row")
        )
        status = browser.evaluate("document.querySelector('.status').innerText")
        browser.call("Page.navigate", url="about:blank")  # so that the page asks no more
        server.shutdown()
        thread.join()
    assert status == "finished"
    assert "0.183 → 0.850" in headline
    assert row.startswith("0.000")
    assert browser.problems == []


@pytest.mark.parametrize("name", ["good", "alarmed", "failed", "two"])
def test_a_page_has_no_errors_and_asks_no_host(browser: Chromium, pages: dict[str, Path], name: str):
    View(browser, pages[name])
    assert browser.problems == []
    assert [url for url in browser.asked if not url.startswith(("file:", "data:"))] == []
