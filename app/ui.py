"""The web page: a chat with what happens behind it shown; everything it needs comes from this machine."""

import hmac
import queue
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gradio as gr
from fastapi import FastAPI

from app import hub
from app.cancel import Cancelled
from app.host import Host
from app.launch import Running
from app.picture import passes_svg, tree_svg
from app.presets import chosen_settings, preset_names
from app.server import model_name
from app.session import Chunk
from app.settings import Resolved
from app.sizes import format_size
from app.stats import Stats
from app.template import Message
from app.worker import Outcome, Request, Ticket
from offload.hardware import peak_rss_bytes
from offload.plan import Plan

_INTERVAL_S = 0.15  # between pictures: a browser cannot show more, and each costs a message
_OWN = "what the command line asked for"
_CSS = """
.tree { overflow: auto; max-height: 26rem; border: 1px solid var(--border-color-primary); border-radius: 6px; }
.tree svg { display: block; }
.tree path { fill: none; stroke: var(--neutral-400); stroke-width: 1; opacity: .7; }
.tree path.accepted { stroke: #16a34a; stroke-width: 3; opacity: 1; }
.tree circle { fill: var(--neutral-400); }
.tree circle.accepted { fill: #16a34a; }
.tree text { font: 11px var(--font-mono); fill: var(--body-text-color);
  paint-order: stroke; stroke: var(--block-background-fill); stroke-width: 4px; }
.tree text.accepted { font-weight: bold; }
.passes rect { fill: #16a34a; }
#status { min-height: 3.2em; }
#status progress { width: 100%; height: 6px; }
@media (max-width: 640px) { .gradio-container { padding: 4px !important; } #chat { height: 55vh !important; } }
"""


@dataclass
class Tab:
    """What one open page has asked for: the answer it waits for, if any."""

    ticket: Ticket | None = None
    passes: list[int] = field(default_factory=list)


class Page:
    """The page's events over one host. Tabs are told apart by Gradio's session hash."""

    def __init__(self, models: Host, chosen: Resolved) -> None:
        self._models, self._chosen = models, chosen
        self._tabs: dict[str, Tab] = {}

    def verdict(self, preset: str) -> str:
        """Whether a preset fits this machine."""
        from app.plan_command import verdict_line

        try:
            chosen = self._settings(preset)
            line = verdict_line(chosen, offline=self._models.offline, in_place_of=self._loaded)
            return f"**{chosen.settings.target}**: {line}"
        except (OSError, ValueError) as error:
            return f"⚠ {error}"

    def verdicts(self) -> Any:
        """The picker, each preset in it with a verdict for this machine."""
        from app.listing import verdict_of

        offline = self._models.offline or not hub.is_reachable()
        loaded = self._loaded
        entries = [
            (f"{name}: {verdict_of(name, offline=offline, in_place_of=loaded)}", name) for name in preset_names()
        ]
        return gr.Dropdown([(_OWN, _OWN), *entries])

    def load(self, preset: str) -> str:
        """Begins to load a preset."""
        try:
            self._models.load(self._settings(preset))
        except ValueError as error:
            return f"⚠ {error}"
        return "loading ..."

    def model_line(self) -> str:
        """What is loaded, or how far its load is; asked for again and again."""
        state, running = self._models.state, self._models.running
        if state.kind == "failed":
            return f"⚠ cannot load: {state.detail}"
        if state.kind != "ready" or running is None:
            return f"loading: {state} <progress max='1' value='{state.share:.3f}'></progress>"
        worker = self._models.worker
        waiting = f", {worker.num_waiting} waiting" if worker and worker.num_waiting else ""
        if running.plan is None:
            return f"{model_name(running)} at {running.chosen.settings.engine}{waiting}"
        memory = f"memory {format_size(peak_rss_bytes())} of {format_size(running.plan.limit_bytes)}"
        layers = f"{len(running.plan.resident)} layers resident, {len(running.plan.streamed)} streamed"
        return f"{model_name(running)}, draft {running.draft} | {layers} | {memory}{waiting}"

    def send(self, text: str, turns: list[Message], request: gr.Request, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Adds a question and answers it."""
        if not text.strip():
            yield (gr.skip(),) * 6
            return
        yield from self._answered([*turns, {"role": "user", "content": text}], turns, text, request, settings)

    def retry(self, turns: list[Message], request: gr.Request, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Answers the last question again."""
        kept = turns[: _last_question(turns) + 1]
        if not kept:
            yield (gr.skip(),) * 6
            return
        yield from self._answered(kept, turns, "", request, settings)

    def edit(
        self, change: gr.EditData, turns: list[Message], request: gr.Request, *settings: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Changes a question and answers it anew; what came after it goes."""
        index = change.index[0] if isinstance(change.index, (list, tuple)) else change.index
        kept = [*turns[:index], {"role": "user", "content": str(change.value)}]
        yield from self._answered(kept, turns, "", request, settings)

    def undo(self, turns: list[Message]) -> tuple[list[Message], list[Message], str]:
        """Takes the last question back into the text box."""
        at = _last_question(turns)
        if at < 0:
            return turns, turns, ""
        return turns[:at], turns[:at], turns[at]["content"]

    def stop(self, request: gr.Request) -> None:
        """Gives up the answer of this tab, in the queue and in prefill too."""
        tab = self._tabs.get(request.session_hash or "")
        if tab is not None and tab.ticket is not None:
            self._models.cancel(tab.ticket)

    def leave(self, request: gr.Request) -> None:
        """A closed page waits for nothing."""
        self.stop(request)
        self._tabs.pop(request.session_hash or "", None)

    @property
    def _loaded(self) -> Plan | None:
        """What a load would give back before it begins."""
        running = self._models.running
        return running.plan if running else None

    def _settings(self, preset: str) -> Resolved:
        return self._chosen if preset == _OWN else chosen_settings(preset, {})

    def _answered(
        self, turns: list[Message], before: list[Message], text: str, request: gr.Request, settings: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """The answer to `turns` as it comes; `before` and `text` are restored where there is none."""
        tab = self._tabs.setdefault(request.session_hash or "", Tab())
        tab.passes = []
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        try:
            order, running = self._order(turns, settings)
            tab.ticket = ticket = self._models.submit(order, outcomes.put)
        except (RuntimeError, ValueError) as error:
            yield text, before, before, f"⚠ {error}", gr.skip(), gr.skip()
            return
        answer, shown = "", 0.0
        yield "", turns, turns, "prefill ...", "", ""
        try:
            for chunk in self._chunks(outcomes, ticket, running):
                if isinstance(chunk, str):
                    yield *((gr.skip(),) * 3), chunk, gr.skip(), gr.skip()
                    continue
                answer += chunk.text
                if chunk.step is not None:
                    tab.passes.append(len(chunk.step.tokens))
                if chunk.stats.finish_reason or time.monotonic() - shown >= _INTERVAL_S:
                    yield self._shown(turns, answer, chunk, running, tab)
                    shown = time.monotonic()
            line = gr.skip()
        except Cancelled:
            line = "stopped"
        except Exception as error:  # the page's mouth: whatever it is, the user is told
            line = f"⚠ {' '.join(str(error).split()) or type(error).__name__}"
        finally:
            tab.ticket = None
            self._models.cancel(ticket)
        done = [*turns, {"role": "assistant", "content": answer}] if answer else turns
        yield gr.skip(), done, done, line, gr.skip(), gr.skip()

    def _order(self, turns: list[Message], settings: Sequence[Any]) -> tuple[Request, Running]:
        system, temp, top_p, top_k, min_p, repeat_penalty, max_tokens, seed = settings
        running = self._models.running
        if running is None:
            raise RuntimeError(f"no model is ready: {self._models.state}")
        messages = [*([{"role": "system", "content": system}] if system else []), *turns]
        prompt = running.session.encode_chat(messages)
        params = replace(
            running.sampling,
            temperature=temp,
            top_p=top_p,
            top_k=int(top_k),
            min_p=min_p,
            repetition_penalty=repeat_penalty,
            seed=random.getrandbits(63) if seed is None else int(seed),
        )
        stop, opening = running.chosen.settings.stop, running.session.opening(prompt)
        return Request(prompt, params, int(max_tokens) or None, stop, opening=opening), running

    def _chunks(
        self, outcomes: "queue.SimpleQueue[Outcome]", ticket: Ticket, running: Running
    ) -> Iterator[Chunk | str]:
        """Chunks as they come; while there are none, a line that says why."""
        asked, began, is_first = time.monotonic(), None, True
        while True:
            try:
                outcome = outcomes.get(timeout=0.5)
            except queue.Empty:
                now, place = time.monotonic(), self._models.place(ticket)
                if place:
                    yield f"waiting: {place} before this one ... {now - asked:.0f} s"
                elif is_first:
                    began = began or (now, running.count_streamed())
                    yield _prefill_line(now - began[0], running.count_streamed() - began[1], running.pass_bytes)
                else:
                    yield f"computing ... {now - asked:.0f} s"
                continue
            if isinstance(outcome, Exception):
                raise outcome
            is_first = False
            yield outcome
            if outcome.stats.finish_reason:
                return

    def _shown(self, turns: list[Message], answer: str, chunk: Chunk, running: Running, tab: Tab) -> tuple[Any, ...]:
        status, step = _status(chunk.stats, running), chunk.step
        tree = tree_svg(step.tree, step.tokens, running.session.text_of) if step and step.drafted else gr.skip()
        shown = [*turns, {"role": "assistant", "content": answer}]
        return gr.skip(), shown, gr.skip(), status, tree, passes_svg(tab.passes) if tab.passes else gr.skip()


def mounted(api: FastAPI, models: Host, chosen: Resolved, *, api_key: str | None) -> FastAPI:
    """`api` with the page at /. api_key: what people must give as password; None asks for nothing."""
    page = Page(models, chosen)
    blocks = _blocks(page, chosen)
    blocks.queue(default_concurrency_limit=None)
    auth = (lambda name, password: hmac.compare_digest(password.encode(), api_key.encode())) if api_key else None
    return gr.mount_gradio_app(
        api,
        blocks,
        path="/",
        auth=auth,
        auth_message="The password is the server's API key; any name will do." if auth else None,
        footer_links=[],
        enable_monitoring=False,
        ssr_mode=False,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=_CSS,
    )


def _blocks(page: Page, chosen: Resolved) -> gr.Blocks:
    settings = chosen.settings
    is_here = settings.engine is None  # else there is nothing to load, and nothing is known of passes
    with gr.Blocks(title="specexec", analytics_enabled=False, fill_height=True) as blocks:
        turns = gr.BrowserState([])
        with gr.Accordion("Model", open=False, visible=is_here) as models:
            with gr.Row():
                preset = gr.Dropdown([_OWN, *preset_names()], value=_OWN, label="Preset", elem_id="preset")
                load = gr.Button("Load", elem_id="load", scale=0)
            verdict = gr.Markdown("", elem_id="verdict")
        model = gr.Markdown(page.model_line, every=gr.Timer(1), elem_id="model", container=False)
        chat = gr.Chatbot(
            label="Chat", show_label=False, elem_id="chat", height="60vh", editable="user", buttons=["copy"],
            feedback_options=None, reasoning_tags=[("<think>", "</think>")],
        )  # fmt: skip
        status = gr.Markdown("", elem_id="status")
        text = gr.Textbox(
            show_label=False, placeholder="Ask something; Enter sends", submit_btn="Send", elem_id="ask", autofocus=True
        )
        with gr.Row():
            stop = gr.Button("Stop", variant="stop", elem_id="stop", size="sm", min_width=80)
            new = gr.Button("New chat", elem_id="new", size="sm", min_width=80)
        with gr.Accordion("Settings", open=False):
            own = [
                gr.Textbox(settings.system or "", label="System message", elem_id="system"),
                gr.Slider(0, 2, settings.temp, label="Temperature (0: greedy)"),
                gr.Slider(0.01, 1, settings.top_p, label="Top-p"),
                gr.Slider(0, 200, settings.top_k, step=1, label="Top-k (0: off)"),
                gr.Slider(0, 0.99, settings.min_p, label="Min-p"),
                gr.Slider(0.5, 2, settings.repeat_penalty, label="Repeat penalty"),
                gr.Number(settings.max_tokens or 0, precision=0, minimum=0, label="Most tokens (0: what fits)"),
                gr.Number(None, precision=0, minimum=0, label="Seed (empty: another each time)"),
            ]
        with gr.Accordion("Behind the answer: the last token tree", open=False, elem_id="behind", visible=is_here):
            passes = gr.HTML(elem_id="passes")
            tree = gr.HTML(elem_id="tree")
        outputs = [text, chat, turns, status, tree, passes]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        text.submit(page.send, [text, turns, *own], outputs, **quiet)
        chat.retry(page.retry, [turns, *own], outputs, **quiet)
        chat.edit(page.edit, [turns, *own], outputs, **quiet)
        chat.undo(page.undo, turns, [turns, chat, text], **quiet)
        chat.clear(list, None, turns, **quiet)
        stop.click(page.stop, None, None, queue=False, **quiet)
        new.click(page.stop, None, None, queue=False, **quiet).then(
            lambda: ([], [], "", "", ""), None, [turns, chat, status, tree, passes], **quiet
        )
        models.expand(page.verdicts, None, preset, **quiet)
        preset.change(page.verdict, preset, verdict, **quiet)
        load.click(page.load, preset, model, **quiet)
        blocks.load(lambda said: said, turns, chat, **quiet)
        blocks.unload(page.leave)
    return blocks


def _status(stats: Stats, running: Running) -> str:
    phase = {None: "answering", "stop": "done", "length": "ended at the limit"}[stats.finish_reason]
    used, ctx = stats.prompt_tokens + stats.tokens, running.session.ctx
    parts = [phase, f"{stats.tokens_per_s:.1f} tokens/s"]
    if running.plan is not None:
        parts += [
            f"{stats.tokens_per_pass:.2f} tokens per pass",
            f"link {stats.link_bps / 1e9:.2f} GB/s",
            f"memory {format_size(peak_rss_bytes())} of {format_size(running.plan.limit_bytes)}",
            *(["draft paused"] if stats.draft_paused else []),
        ]
    if ctx is None:  # another server that does not tell
        return " | ".join([*parts, f"context {used}"])
    parts.append(f"context {used} of {ctx}")
    return f"{' | '.join(parts)} <progress max='{ctx}' value='{used}' aria-label='context used'></progress>"


def _prefill_line(elapsed_s: float, done: int, total: int) -> str:
    """How far the first pass is: by the bytes that it streams, where it streams any."""
    if not 0 < done <= total:
        return f"prefill ... {elapsed_s:.0f} s"
    rate = f", {format_size(done / elapsed_s)}/s" if elapsed_s else ""
    left = elapsed_s * (total - done) / done
    return f"prefill: {100 * done / total:.0f} %{rate}, {left:.0f} s left"


def _last_question(turns: list[Message]) -> int:
    """Where the last user turn is, or -1."""
    return max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
