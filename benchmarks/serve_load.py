"""A server under load: 1,000 requests of mixed kinds by 16 clients, some of which leave; and what HTTP costs.

    specexec serve --preset demo --draft ngram --no-ui --port 8080        (in another terminal)
    python benchmarks/serve_load.py http://127.0.0.1:8080 [--requests 1000] [--clients 16]

Every answer that is read to its end must be the one that the same prompt gets alone. The last line is JSON.
"""

import argparse
import json
import random
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

_MARKERS = [f"Marker {number}: name {number + 2} things that are" for number in range(10)]
_TOKENS = 16
_REPEATS = 8


def main() -> None:
    """Runs the load and prints figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    asked = parser.parse_args()
    url = f"{asked.url}/v1/completions"
    with httpx.Client(timeout=300) as http:
        expected = {each: http.post(url, json=body(each)).json()["choices"][0]["text"] for each in _MARKERS}
        overhead = http_overhead(http, url)
    started = time.perf_counter()
    with ThreadPoolExecutor(asked.clients) as pool:
        shares = [
            asked.requests // asked.clients + (at < asked.requests % asked.clients) for at in range(asked.clients)
        ]
        results = list(pool.map(lambda at: one_client(url, at, shares[at], expected), range(asked.clients)))
    elapsed_s = time.perf_counter() - started
    first = [each for result in results for each in result["first_s"]]
    gaps = [each for result in results for each in result["gap_s"]]
    metrics = httpx.get(f"{asked.url}/metrics").text
    left = {name: float(re.search(rf"^specexec_{name} (\S+)$", metrics, re.M)[1]) for name in LEFT_OVER}
    report = {
        "requests": asked.requests,
        "clients": asked.clients,
        "elapsed_s": round(elapsed_s, 2),
        "whole": sum(result["whole"] for result in results),
        "left": sum(result["left"] for result in results),
        "wrong": sum(result["wrong"] for result in results),
        "first_token_s": percentiles(first),
        "gap_s": percentiles(gaps),
        "http_overhead": overhead,
        **left,
    }
    print(json.dumps(report))


LEFT_OVER = ("requests_running", "requests_waiting")


def body(prompt: str, *, stream: bool = False) -> dict[str, object]:
    """A request whose answer is always the same."""
    return {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "stream": stream}


def one_client(url: str, number: int, count: int, expected: dict[str, str]) -> dict[str, object]:
    """Sends `count` requests, whole and streamed, and leaves some in the queue, in prefill or in mid-stream."""
    rng = random.Random(number)
    result = {"whole": 0, "left": 0, "wrong": 0, "first_s": [], "gap_s": []}
    with httpx.Client(timeout=600) as http:
        for _ in range(count):
            marker, kind = rng.choice(list(expected)), rng.choice(("whole", "streamed", "streamed", "left"))
            if kind == "whole":
                text = http.post(url, json=body(marker)).json()["choices"][0]["text"]
            else:
                text = read_stream(http, url, marker, result, leave=rng.random() if kind == "left" else None)
            if text is None:
                result["left"] += 1
            else:
                result["whole"] += 1
                result["wrong"] += text != expected[marker]
    return result


def read_stream(
    http: httpx.Client, url: str, marker: str, result: dict[str, list], *, leave: float | None
) -> str | None:
    """The streamed text, or None for a client that left: at once, or with the probability `leave` per event."""
    text, last = "", time.perf_counter()
    rng = random.Random(leave)
    with http.stream("POST", url, json=body(marker, stream=True)) as got:
        for line in got.iter_lines():
            if leave is not None and rng.random() < leave:
                return None
            if line.startswith("data: {"):
                now = time.perf_counter()
                result["gap_s" if text else "first_s"].append(now - last)
                last = now
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def http_overhead(http: httpx.Client, url: str) -> float:
    """Time that a client waits beyond what the session took by its own account, as a share of it."""
    shares = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        timings = http.post(url, json=body(_MARKERS[0])).json()["timings"]
        inner_s = (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
        shares.append((time.perf_counter() - started) / inner_s - 1)
    return round(statistics.median(shares), 4)


def percentiles(values: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return {"p50": round(ordered[len(ordered) // 2], 4), "p95": round(ordered[int(len(ordered) * 0.95)], 4)}


if __name__ == "__main__":
    main()
