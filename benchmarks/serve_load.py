"""A server under load, asked by OpenAI's own client: its contract, 1,000 requests of mixed kinds, what HTTP costs.

    python benchmarks/serve_load.py [--requests 1000] [--clients 16] [--url http://127.0.0.1:8080]

Without a URL it starts SERVER: the demo model, all of it resident, in float32, where rounding cannot make an answer
depend on which rows the cache held before. Every answer that is read to its end, streamed or whole, must be the one
that the same request gets alone; some clients leave in the queue, in prefill or in mid-stream. What the server itself
holds (memory, threads, open files) is known only of one that this script has started. The last line is one JSON
object; the exit code is 1 if anything in it is wrong. Needs the bench extra.
"""

import argparse
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

SERVER = [
    "serve", "--preset", "demo", "--draft", "ngram", "--dtype", "float32", "--resident", "30", "--device-limit", "4GB",
    "--no-ui", "--port", "0",
]  # fmt: skip
_SUBJECTS = (
    "castles", "volcanoes", "bicycles", "whales", "winter", "bridges", "honey", "glaciers", "violins", "deserts",
    "lighthouses", "clocks",
)  # fmt: skip
_FILLER = "The report tells of many places, of what grows there and of the people who live in them. "
_LONG_SENTENCES = 10  # about 200 tokens
_HISTORY_TOKENS = 1500
_OVERHEAD_TOKENS, _OVERHEAD_REPEATS = 48, 7
_MOST_OVERHEAD = 0.03
_MOST_GROWTH = {"rss_mb": 100, "threads": 8, "open_files": 8}  # pools and allocators keep a little for later
_PREFILL_LEAVERS = 5
_PATIENCE_S = 600.0  # the machine may be busy with something else


@dataclass(frozen=True)
class Kind:
    """A request that has one right answer. The marker is what no other request of its options asks about."""

    marker: str
    is_chat: bool
    options: dict[str, Any]

    def send(self, client: openai.OpenAI, **changes: Any) -> Any:
        """What the client returns, whole or a stream."""
        prompt = {"messages": [{"role": "user", "content": self.marker}]} if self.is_chat else {"prompt": self.marker}
        create = client.chat.completions.create if self.is_chat else client.completions.create
        return create(**{"model": model_at(str(client.base_url)), **prompt, **self.options, **changes})


@dataclass(frozen=True)
class Heard:
    """An answer, however it came."""

    text: str
    finish_reason: str
    num_tokens: int
    tokens: tuple[str, ...] = ()  # of the logprobs


@dataclass
class Tally:
    """What one client has met."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)


def main() -> int:
    """Runs everything and prints figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a server that runs already; default: start one")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the server ends too
    with started() if asked.url is None else given(asked.url) as (url, pid):
        with opened(url) as client:
            report = {"contract": contract(client), "second_turn": second_turn(client)}
            say("contract and second turn", report)
            report["http_overhead"] = http_overhead(client)
            say("overhead", report["http_overhead"])
            report["prefill_left"] = leave_in_prefill(client, url)
            kinds = all_kinds(random.Random(0))
            expected = {number: hear(kind.send(client)) for number, kind in enumerate(kinds)}
        report["distinct"] = f"{len(set(expected.values()))} of {len(kinds)}"
        load(url, kinds, expected, requests=2 * asked.clients, clients=asked.clients)  # fills the pools of threads
        before = held(pid)
        say("before the load", before)
        report |= load(url, kinds, expected, requests=asked.requests, clients=asked.clients)
        report["places_left"] = places(url)
        with opened(url) as client:
            report["still_answers"] = hear(kinds[0].send(client)) == expected[0]
        report |= {"before": before, "after": held(pid)}
    found = faults(report)
    for each in found:
        say("WRONG", each)
    print(json.dumps(report))
    return int(bool(found))


def faults(report: dict[str, Any]) -> list[str]:
    """The parts of a report that are not as they must be."""
    found = [f"contract: {name}: {said}" for name, said in report["contract"].items() if said != "ok"]
    found += report["wrong_answers"]
    if report["places_left"]:
        found.append(f"{report['places_left']} places of the queue are still taken")
    if not report["still_answers"]:
        found.append("the server does not answer as before")
    if report["second_turn"]["computed"] >= report["second_turn"]["new"] + 16:
        found.append("the second turn computes more than what is new")
    found += [
        f"HTTP costs {share:.1%} of a {name} answer"
        for name, share in report["http_overhead"].items()
        if share > _MOST_OVERHEAD
    ]
    if report["before"] is not None:
        for name, most in _MOST_GROWTH.items():
            if (grown := report["after"][name] - report["before"][name]) > most:
                found.append(f"{name} has grown by {grown}")
    return found


@contextmanager
def started() -> Iterator[tuple[str, int]]:
    """Address and process id of a server of our own, which ends with the block."""
    command = [sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())", *SERVER]
    say("server", f"specexec {' '.join(SERVER)}")
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log")
        with log.open("w") as file, subprocess.Popen(command, stderr=file) as child:
            try:
                until(lambda: child.poll() is not None or is_up(log))
                if child.poll() is not None:
                    raise SystemExit(f"the server has ended: {log.read_text().strip()}")
                yield address(log), child.pid
            finally:
                child.terminate()


def address(log: Path) -> str | None:
    """Where a server says that it is, or None as long as it does not."""
    found = re.search(r"serving on (\S+)", log.read_text())
    return found[1] if found else None


def is_up(log: Path) -> bool:
    """Whether it answers there, with its model loaded."""
    try:
        return (url := address(log)) is not None and httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def given(url: str) -> Iterator[tuple[str, None]]:
    """A server that runs already, of which no more is known than its address."""
    yield url, None


@contextmanager
def opened(url: str, patience_s: float = _PATIENCE_S) -> Iterator[openai.OpenAI]:
    """A client that tries once."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=patience_s) as client:
        yield client


@cache
def model_at(base_url: str) -> str:
    """The one model there is."""
    return httpx.get(f"{base_url}models", timeout=_PATIENCE_S).json()["data"][0]["id"]


# The contract


def contract(client: openai.OpenAI) -> dict[str, str]:
    """Each promise with `ok`, or what was found in its place."""
    checks = (whole_and_streamed, stop_strings, most_tokens, seeds, logprobs, errors)
    outcomes = {}
    for check in checks:
        try:
            check(client)
            outcomes[check.__name__] = "ok"
        except (Broken, openai.OpenAIError) as error:
            outcomes[check.__name__] = f"{type(error).__name__}: {error}"
    return outcomes


class Broken(Exception):  # noqa: N818 (read as a sentence: raise Broken)
    """A promise that was not kept."""


def require(condition: bool, what: str) -> None:
    """Broken with `what` unless the condition holds."""
    if not condition:
        raise Broken(what)


def whole_and_streamed(client: openai.OpenAI) -> None:
    """The pieces of a stream are the whole text, greedy and drawn with a seed; usage agrees."""
    for is_chat in (True, False):
        for sampling in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 5}):
            kind = Kind("Name three rivers.", is_chat, {"max_tokens": 16, **sampling})
            whole = kind.send(client)
            usage = whole.usage
            require(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"usage {usage}")
            stream = list(kind.send(client, stream=True, stream_options={"include_usage": True}))
            require(hear(stream) == hear(whole), f"streamed {hear(stream)}, whole {hear(whole)}")
            require(stream[-1].usage.prompt_tokens == usage.prompt_tokens, "the usage chunk counts another prompt")
            require("passes" in stream[-2].timings, "no timings in the last chunk")
            require(not is_chat or stream[0].choices[0].delta.role == "assistant", "the first chunk names no role")


def stop_strings(client: openai.OpenAI) -> None:
    """The text ends before the first stop string, in both forms."""
    kind = Kind("Name three rivers.", True, {"max_tokens": 16, "temperature": 0})
    text = hear(kind.send(client)).text
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    for stop in (middle, ["never to come", middle]):
        for answer in (kind.send(client, stop=stop), kind.send(client, stop=stop, stream=True)):
            heard = hear(answer)
            found = (heard.text, heard.finish_reason)
            require(found == (text[: text.index(middle)], "stop"), f"with stop {stop!r}: {found}, without: {text!r}")


def most_tokens(client: openai.OpenAI) -> None:
    """max_tokens and max_completion_tokens to the letter."""
    for name in ("max_tokens", "max_completion_tokens"):
        for count in (1, 2, 3, 7):
            heard = hear(Kind("Tell a story.", True, {name: count, "temperature": 0}).send(client))
            found = (heard.num_tokens, heard.finish_reason)
            require(found == (count, "length"), f"{name} {count}: {found}")


def seeds(client: openai.OpenAI) -> None:
    """The same seed gives the same text, another one another."""
    texts = [
        hear(Kind("Tell a story.", True, {"max_tokens": 12, "temperature": 1.0, "seed": seed}).send(client)).text
        for seed in (1, 1, 2)
    ]
    require(texts[0] == texts[1] != texts[2], f"seeds 1, 1 and 2: {texts}")


def logprobs(client: openai.OpenAI) -> None:
    """An entry per token whose texts make up the answer; under greedy decoding each is the best of its top."""
    kind = Kind("Name three rivers.", True, {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3})
    answer = kind.send(client)
    entries = answer.choices[0].logprobs.content
    require(len(entries) == answer.usage.completion_tokens, f"{len(entries)} entries for {answer.usage}")
    text = answer.choices[0].message.content
    require("".join(each.token for each in entries) == text, f"{[each.token for each in entries]} for {text!r}")
    for each in entries:
        require(len(each.top_logprobs) == 3 and each.logprob <= 0, f"entry {each}")
        require(each.token == each.top_logprobs[0].token, f"drawn {each.token!r}, best {each.top_logprobs[0]}")
    plain = Kind("Name three rivers.", False, {"max_tokens": 6, "temperature": 0, "logprobs": 2}).send(client)
    counted = [len(getattr(plain.choices[0].logprobs, name)) for name in ("tokens", "token_logprobs", "top_logprobs")]
    require(counted == [6, 6, 6], f"a completion of 6 tokens has entries {counted}")


def errors(client: openai.OpenAI) -> None:
    """What cannot be done is refused in OpenAI's shapes, naming the field."""
    kind = Kind("x", True, {"max_tokens": 2})
    cases = (
        (openai.BadRequestError, "messages", {"messages": [{"role": "user", "content": "the " * 4000}]}),
        (openai.NotFoundError, "model", {"model": "gpt-9"}),
        (openai.BadRequestError, "temperature", {"temperature": -1}),
        (openai.BadRequestError, "top_p", {"top_p": 1.5}),
        (openai.BadRequestError, "max_tokens", {"max_tokens": 0}),
        (openai.BadRequestError, "n", {"n": 2}),
        (openai.BadRequestError, "stop", {"stop": [""]}),
        (openai.BadRequestError, "temprature", {"extra_body": {"temprature": 1}}),
    )
    for expected, param, changes in cases:
        try:
            kind.send(client, **changes)
        except openai.APIStatusError as error:
            found = (type(error), error.param, error.type)
            require(found == (expected, param, "invalid_request_error"), f"{changes} raises {found}")
            require(bool(error.message), f"{changes}: no message")
        else:
            raise Broken(f"{changes} is answered")


def hear(answer: Any, on_piece: Callable[[], None] = lambda: None) -> Heard:
    """What an answer says, whole or as a stream or its chunks; `on_piece` is called at every piece with a token."""
    if hasattr(answer, "usage") and answer.usage is not None:
        choice = answer.choices[0]
        text = choice.message.content if hasattr(choice, "message") else choice.text
        return Heard(text, choice.finish_reason, answer.usage.completion_tokens, tokens_of(choice))
    text, finish_reason, num_tokens, tokens = "", "", 0, ()
    for chunk in answer:
        if getattr(chunk, "timings", None):
            num_tokens = chunk.timings["predicted_n"]
        for choice in chunk.choices:
            piece = (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
            text, tokens = text + piece, tokens + tokens_of(choice)
            finish_reason = choice.finish_reason or finish_reason
            if piece or tokens_of(choice):
                on_piece()
    return Heard(text, finish_reason, num_tokens, tokens)


def tokens_of(choice: Any) -> tuple[str, ...]:
    """The tokens that a choice has logprobs for."""
    if (entries := choice.logprobs) is None:
        return ()
    content = getattr(entries, "content", None)
    return tuple(each.token for each in content) if content is not None else tuple(entries.tokens or ())


# Quiet measurements


def second_turn(client: openai.OpenAI) -> dict[str, int]:
    """Tokens that the second turn of a chat with _HISTORY_TOKENS of history computes, and those of its new message."""

    def count(text: str) -> int:
        answer = Kind(text, False, {"max_tokens": 1, "temperature": 0}).send(client)
        return answer.usage.prompt_tokens

    new = {"role": "user", "content": "Which of these places would you like to see first, and why?"}
    num_new, num_filler = count(new["content"]), count(_FILLER)
    turns = [{"role": "user", "content": _FILLER * (_HISTORY_TOKENS // (num_filler - 1))}]
    timings, options = [], {"max_tokens": 16, "temperature": 0, "stream": True}
    for _ in range(2):
        text = ""
        for chunk in client.chat.completions.create(model=model_at(str(client.base_url)), messages=turns, **options):
            text += chunk.choices[0].delta.content or ""
        timings.append(chunk.timings)
        turns = [*turns, {"role": "assistant", "content": text}, new]
    second = timings[1]
    return {
        "history": timings[0]["prompt_n"] + timings[0]["predicted_n"],
        "new": num_new,
        "computed": second["prompt_n"] - second["cached_n"],
    }


def http_overhead(client: openai.OpenAI) -> dict[str, float]:
    """What a client waits beyond the session's own account of its answer, as a share of that: medians, one client."""
    kind = Kind("Tell a long story about a lighthouse.", True, {"max_tokens": _OVERHEAD_TOKENS, "temperature": 0})
    kind.send(client)
    shares: dict[str, list[float]] = {"whole": [], "streamed": []}
    for _ in range(_OVERHEAD_REPEATS):
        for form, found in shares.items():
            began = time.perf_counter()
            answer = kind.send(client, stream=form == "streamed")
            timings = [each for each in answer if each.choices][-1].timings if form == "streamed" else answer.timings
            elapsed_s = time.perf_counter() - began
            found.append(1000 * elapsed_s / (timings["prompt_ms"] + timings["predicted_ms"]) - 1)
    return {form: round(statistics.median(found), 4) for form, found in shares.items()}


def leave_in_prefill(client: openai.OpenAI, url: str) -> dict[str, float]:
    """Clients that leave while the server, which serves nobody else, computes their long prompt: seconds until it is
    free again, and how much sooner that was than the prefill's end would have been."""
    freed = []
    for number in range(-1, _PREFILL_LEAVERS):
        kind = Kind(f"Story {number}. " + 5 * _LONG_SENTENCES * _FILLER, False, {"max_tokens": 1, "temperature": 0})
        began = time.perf_counter()
        if number < 0:  # once to its end
            kind.send(client)
            prefill_s = time.perf_counter() - began
            continue
        with suppress(openai.APITimeoutError):
            kind.send(client, timeout=httpx.Timeout(_PATIENCE_S, read=0.3 * prefill_s))
            raise SystemExit("an answer has come sooner than its prefill can be done")
        left = time.perf_counter()
        until(lambda: not places(url))
        freed.append(time.perf_counter() - left)
    return {"prefill_s": round(prefill_s, 3), "freed_s": round(max(freed), 3), "clients": _PREFILL_LEAVERS}


# The load


def all_kinds(rng: random.Random) -> list[Kind]:
    """Every marker as chat and completion, greedy and seeded; some with stop strings, logprobs or a long prompt."""
    found = []
    for number, subject in enumerate(_SUBJECTS):
        for is_chat in (True, False):
            for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": rng.randrange(1000)}):
                options: dict[str, Any] = {"max_tokens": rng.randint(8, 12), **sampling}
                if rng.random() < 0.3:
                    options["stop"] = rng.choice([".", [" a", "zz"], [" of", ","]])
                if rng.random() < 0.3:
                    options |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
                before = _FILLER * _LONG_SENTENCES if rng.random() < 0.1 else ""
                found.append(Kind(f"{before}{number}. The most important thing about {subject} is", is_chat, options))
    return found


def load(url: str, kinds: list[Kind], expected: dict[int, Heard], *, requests: int, clients: int) -> dict[str, Any]:
    """What `requests` of these kinds by so many clients at once come to."""
    began = time.perf_counter()
    shares = [requests // clients + (number < requests % clients) for number in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        tallies = list(pool.map(lambda at: one_client(url, kinds, expected, seed=at, count=shares[at]), range(clients)))
    until(lambda: not places(url))
    counts: Counter[str] = sum((each.counts for each in tallies), Counter())
    return {
        "requests": requests,
        "clients": clients,
        "elapsed_s": round(time.perf_counter() - began, 1),
        **{name: counts[name] for name in ("whole", "streamed", "left_before_first_token", "left_in_mid_stream")},
        "wrong_answers": [line for each in tallies for line in each.wrong],
        "first_token_s": percentiles([value for each in tallies for value in each.first_s]),
        "gap_s": percentiles([value for each in tallies for value in each.gap_s]),
    }


def one_client(url: str, kinds: list[Kind], expected: dict[int, Heard], *, seed: int, count: int) -> Tally:
    """Sends `count` requests, one after another."""
    rng, tally = random.Random(seed), Tally()
    wait_s = 1.0  # of this client's last answer: those that leave do so within such a time
    with opened(url) as client:
        for _ in range(count):
            number = rng.randrange(len(kinds))
            fate = rng.choices(("whole", "streamed", "at once", "in a while", "in mid-stream"), (34, 41, 5, 10, 10))[0]
            is_streamed = rng.random() < 0.5 if fate == "in a while" else fate != "whole"
            read_s = rng.uniform(0.001, wait_s) if fate == "in a while" else _PATIENCE_S
            most = {"at once": 0, "in mid-stream": rng.randint(1, 6)}.get(fate)
            began, heard = time.perf_counter(), None
            try:
                answer = kinds[number].send(client, stream=is_streamed, timeout=httpx.Timeout(_PATIENCE_S, read=read_s))
                heard = listen(answer, began, most, tally) if is_streamed else hear(answer)
            except (openai.APITimeoutError, httpx.ReadTimeout):  # a stream lets the latter through
                tally.counts["left_before_first_token"] += 1
            except openai.APIError as error:
                tally.wrong.append(f"{kinds[number]}: {error}")
            if heard is not None:
                wait_s = time.perf_counter() - began
                tally.counts["streamed" if is_streamed else "whole"] += 1
                if heard != expected[number]:
                    tally.wrong.append(f"{kinds[number]}: {heard}, alone: {expected[number]}")
    return tally


def listen(stream: Any, began: float, most: int | None, tally: Tally) -> Heard | None:
    """A streamed answer that was asked for at `began`, or None where the client leaves after `most` pieces.

    Only streams that are read to their end are timed: those that leave early would make the rest look fast.
    """
    times = [began]

    def on_piece() -> None:
        times.append(time.perf_counter())
        if len(times) - 1 == most:
            raise Left

    with stream:
        try:
            if most == 0:
                raise Left
            heard = hear(stream, on_piece)
        except Left:
            tally.counts["left_in_mid_stream" if most else "left_before_first_token"] += 1
            return None
    first, *gaps = (after - before for before, after in pairwise(times))
    tally.first_s.append(first)
    tally.gap_s += gaps
    return heard


class Left(Exception):  # noqa: N818
    """This client has heard enough."""


def places(url: str) -> int:
    """How many requests run or wait."""
    text = httpx.get(f"{url}/metrics", timeout=_PATIENCE_S).text
    found = re.findall(r"^specexec_requests_(?:running|waiting) (\S+)$", text, re.M)
    return int(sum(map(float, found)))


def held(pid: int | None) -> dict[str, int] | None:
    """What a process holds, once connections that nobody uses are closed."""
    if pid is None:
        return None
    process = psutil.Process(pid)
    time.sleep(6)
    files = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
    return {"rss_mb": process.memory_info().rss >> 20, "threads": process.num_threads(), "open_files": files}


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return {f"p{each}": round(ordered[len(ordered) * each // 100], 4) for each in (50, 95)} if ordered else None


def until(condition: Callable[[], Any]) -> Any:
    """Waits for `condition` and returns what it says; SystemExit when patience is at an end."""
    end = time.monotonic() + _PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit("waited in vain for the server")
        time.sleep(0.02)
    return found


def say(what: str, found: Any) -> None:
    """A line of progress."""
    print(f"{what}: {found}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
