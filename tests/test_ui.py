"""The web page in headless Chromium: load, send, stop in prefill, retry, edit, two tabs, reload, phone width."""

import re
import shutil
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from serving import holding, served, until

import app.launch
from app.host import State
from offload.hardware import probe

pytestmark = pytest.mark.filterwarnings("ignore")  # Gradio's own deprecations, some in threads of the server

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
DONE = "#status:has-text('ended at the limit')"


@pytest.fixture(scope="module")
def server(chat_model, tmp_path_factory):
    from app.ui import mounted

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        with served(
            chat_model, draft="self", max_tokens="24", min_tokens="24",
            make_app=lambda api, host, chosen: mounted(api, host, chosen, api_key=None),
        ) as running:  # fmt: skip
            yield running


@pytest.fixture(scope="module")
def browser(server):  # closed before the server is
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser, server):
    """Opens pages that must neither complain nor ask for anything that is not on this machine."""
    faults, pages = [], []

    def asked(request):
        if not request.url.startswith((server.url, "data:", "blob:")):
            faults.append(f"asked for {request.url}")

    def open_one(**options):
        page = browser.new_page(**options)
        pages.append(page)
        page.set_default_timeout(120_000)
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", asked)
        page.goto(server.url)
        page.wait_for_selector("#ask textarea", timeout=120_000)
        page.wait_for_selector("#model:has-text('draft self')", timeout=120_000)
        return page

    yield open_one
    for page in pages:
        page.close()
    # A reload breaks off requests that are under way, which Gradio's page reports as errors of its own.
    assert not [each for each in faults if not re.search("AbortError|Connection errored out", each)]


def send(page, text, *, until_done=True):
    page.fill("#ask textarea", text)
    page.keyboard.press("Enter")
    if until_done:
        answered(page)


def answered(page):
    page.wait_for_selector(DONE, timeout=120_000)
    page.wait_for_selector("#chat [aria-label='Retry'], #chat [title='Retry']", timeout=120_000)


def num_passes(server):
    """How many passes the target has made."""
    return float(re.search(rb"^specexec_target_passes_total (\S+)", server.host.metrics.text(), re.M)[1])


def test_a_conversation_survives_retry_edit_undo_and_reload(open_page, server):
    page = open_page()
    send(page, "the cat")
    assert "tokens per pass" in page.inner_text("#status")
    first = page.inner_text("#chat .bot")
    before = num_passes(server)
    with holding(server.host):  # until the page no longer shows how the first answer ended
        page.click("#chat [aria-label='Retry'], #chat [title='Retry']")
        page.wait_for_selector("#status:has-text('prefill')", timeout=120_000)
    answered(page)
    assert num_passes(server) > before
    assert page.inner_text("#chat .bot")
    assert first
    page.get_by_text("Behind the answer").click()
    page.wait_for_selector("#tree svg circle.accepted")
    assert page.query_selector_all("#passes rect")
    page.reload()
    page.wait_for_selector("#chat .bot", timeout=120_000)
    assert "the cat" in page.inner_text("#chat .user")
    page.click("#chat [aria-label='Undo'], #chat [title='Undo']")
    page.wait_for_function("document.querySelector('#ask textarea').value === 'the cat'")
    page.click("#new")
    page.wait_for_selector("#chat .bot", state="detached")


def test_an_edited_question_is_answered_anew(open_page):
    page = open_page()
    send(page, "one")
    page.click("#chat [aria-label='Edit'], #chat [title='Edit']")
    page.fill("#chat textarea", "another")
    page.click("#chat [aria-label='Submit'], #chat [title='Submit']")
    page.wait_for_selector("#chat .user:has-text('another')", timeout=60_000)
    answered(page)
    assert "another" in page.inner_text("#chat .user")


def test_stop_works_in_prefill_and_frees_the_worker(open_page, server):
    page = open_page()
    with holding(server.host):
        send(page, "the cat", until_done=False)
        until(lambda: server.host.worker.num_running == 1)
        page.click("#stop")
        page.wait_for_selector("#status:has-text('stopped')", timeout=60_000)
        until(lambda: server.host.worker.num_running == 0)
    assert not page.query_selector("#chat .bot")


def test_two_tabs_wait_for_each_other_and_a_closed_one_is_forgotten(open_page, server):
    pages = [open_page(), open_page()]
    with holding(server.host):
        send(pages[0], "first", until_done=False)
        until(lambda: server.host.worker.num_running == 1)
        send(pages[1], "second", until_done=False)
        pages[1].wait_for_selector("#status:has-text('waiting: 1 before')", timeout=60_000)
        pages[0].close()
        until(lambda: server.host.worker.num_waiting == 0)
        pages[1].click("#stop")
        pages[1].wait_for_selector("#status:has-text('stopped')", timeout=60_000)
        until(lambda: server.host.worker.num_running == 0)


def test_a_phone_has_room_and_keys_suffice(open_page):
    page = open_page(viewport={"width": 375, "height": 740}, color_scheme="dark")
    page.focus("#ask textarea")
    page.keyboard.type("the cat")
    page.keyboard.press("Enter")
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_with_another_server_what_is_known_only_here_is_absent(server):
    from app.ui import Page, mounted

    def app_of(api, host, chosen):
        return mounted(api, host, chosen, api_key=None)

    engine = f"{server.url}/v1"
    with served(None, engine=engine, make_app=app_of, max_tokens="24", min_tokens="24") as front:
        shown = {
            each["props"].get("elem_id") or each["props"].get("label"): each["props"].get("visible")
            for each in httpx.get(f"{front.url}/config").json()["components"]
        }
        assert (shown["behind"], shown["Model"], shown["chat"]) == (False, False, True)
        page = Page(front.host, front.host.running.chosen)
        assert engine in page.model_line() and "memory" not in page.model_line()
        visitor = SimpleNamespace(session_hash="x")
        *_, running, last = page.send("the cat", [], visitor, "", 0, 1, 0, 0, 1, 24, None)
        assert [turn["role"] for turn in last[1]] == ["user", "assistant"] and last[1][1]["content"]
        assert "tokens/s" in running[3] and "context" in running[3]
        assert not [word for word in ("per pass", "link", "memory") if word in running[3]]


def choose(page, name):
    """Opens the picker and loads a preset."""
    if not page.is_visible("#preset input"):
        page.get_by_text("Model", exact=True).first.click()
    page.wait_for_selector("#preset input")
    page.click("#preset input")
    page.get_by_role("option", name=re.compile("^demo: ")).wait_for()  # verdicts come late and renew the options
    page.get_by_role("option", name=re.compile(rf"^{name}")).click()
    page.click("#load")


def test_the_picker_has_a_verdict_for_every_preset(open_page):
    from app.presets import preset_names

    page = open_page()
    page.get_by_text("Model", exact=True).first.click()
    page.wait_for_selector("#preset input")
    page.click("#preset input")
    for name in preset_names():
        words = "fits|streams|needs|does not fit|unknown"
        page.get_by_role("option", name=re.compile(rf"^{name}: .*({words})")).wait_for(timeout=120_000)


def test_a_second_load_frees_the_first_before_it_begins(open_page, server, monkeypatch):
    old = weakref.ref(server.host.running.session.target.model)
    alive, opener = [], app.launch.open_target

    def watched(*args, **options):
        alive.append(old() is not None)
        return opener(*args, **options)

    monkeypatch.setattr("app.launch.open_target", watched)
    page = open_page()
    choose(page, "what the command line")
    until(lambda: alive and server.host.state.kind == "ready")
    assert alive == [False]
    page.wait_for_selector("#model:has-text('draft self')", timeout=60_000)
    send(page, "the cat")
    assert page.inner_text("#chat .bot")


def test_a_load_that_fails_is_shown_and_the_page_goes_on(open_page, server, monkeypatch):
    def fail(*_, **__):
        raise FileNotFoundError("no such model anywhere")

    page = open_page()
    with monkeypatch.context() as patch:
        patch.setattr("app.host.open_session", fail)
        choose(page, "demo")
        page.wait_for_selector("#model:has-text('cannot load: no such model anywhere')", timeout=120_000)
        assert httpx.get(f"{server.url}/health").json()["status"] == "failed"
        send(page, "the cat", until_done=False)
        page.wait_for_selector("#status:has-text('no model is ready')", timeout=60_000)
    choose(page, "what the command line")
    page.wait_for_selector("#model:has-text('draft self')", timeout=120_000)
    send(page, "the cat")
    assert page.inner_text("#chat .bot")


def test_a_load_and_a_prefill_tell_how_far_they_are():
    loading = State("loading", "load", 500_000_000, 2_000_000_000, "B", 5.0)
    from app.ui import _prefill_line

    assert str(loading) == "load: 25 %, 100 MB/s, 15 s left"
    assert str(State("loading", "convert x", 30, 90, "%", 1.0)) == "convert x: 33 %, 2 s left"
    assert _prefill_line(5.0, 500_000_000, 2_000_000_000) == "prefill: 25 %, 100 MB/s, 15 s left"
    assert _prefill_line(5.0, 0, 0) == "prefill ... 5 s"


def test_the_page_tells_how_far_a_streamed_prefill_is(chat_model, tmp_path, monkeypatch):
    from app.ui import Page

    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    with served(chat_model, draft="none", resident="0", max_tokens="2") as running:
        for layer in running.host.running.session.target.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.4))
        visitor = SimpleNamespace(session_hash="x")
        page = Page(running.host, running.host.running.chosen)
        lines = [shown[3] for shown in page.send("the cat", [], visitor, "", 0, 1, 0, 0, 1, 2, 1)]
    shares = [int(found[1]) for line in lines if (found := re.match(r"prefill: (\d+) %", str(line)))]
    assert shares and shares == sorted(shares) and shares[-1] <= 100


def test_a_verdict_counts_what_a_load_would_give_back(chat_model, tmp_path, monkeypatch):
    from app.ui import Page

    monkeypatch.setenv("SPECEXEC_CACHE", str(tmp_path))
    with served(chat_model, draft="none", max_tokens="2") as running:
        page = Page(running.host, running.host.running.chosen)
        base = dict(running.host.running.plan.items)["this process"]
        full = replace(probe(), free_bytes=0, base_bytes=base + (64 << 30))  # all there is, and it is a model's
        monkeypatch.setattr("app.machines.probe", lambda device: full)
        assert ": fits" in page.verdict("what the command line asked for")
        running.host.running = None
        assert ": does not fit" in page.verdict("what the command line asked for")
