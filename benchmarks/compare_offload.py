"""specexec against transformers + accelerate disk offload: the same checkpoint, prompts and memory cgroup, in one run.

    python benchmarks/compare_offload.py

Fetches the demo model, widens it 16 times (2.66 GB, the same function), and answers three kinds of chat prompts
greedily inside a memory cgroup of 1.5 GB: with specexec (the demo model's NF4 copy as draft), with specexec without a
draft, and with accelerate's disk offload. Without a draft the seconds per token do not depend on how many are asked
for, so fewer are. The floor of a pass is the larger of what its bytes take at the raw O_DIRECT rate, measured in the
same run, and what the same pass takes with every layer resident. The last line printed is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from limits import in_cgroup, make_cgroup, raw_rate, widened_demo

PROMPTS = (
    "Explain how a refrigerator works.",
    "Write a short story about a lighthouse keeper and a storm.",
    "Write a Python function that returns the longest word of a sentence.",
)


def run_specexec(target: Path, draft: str, budget: str, device_limit: str, max_tokens: int) -> dict:
    """Answers PROMPTS with specexec; sums over both."""
    from app.launch import open_session
    from app.presets import chosen_settings
    from offload.hardware import peak_rss_bytes

    flags = {"target": str(target), "draft": draft, "ctx": "1024", "budget": budget}
    if draft != "none":
        flags["draft_bits"] = "4"
    if device_limit:
        flags["device_limit"] = device_limit
    chosen = chosen_settings(None, flags)
    answers = []
    with open_session(chosen, offline=False, note=lambda line: print(line, file=sys.stderr)) as running:
        for prompt in PROMPTS:
            ids = running.session.encode_chat([{"role": "user", "content": prompt}])
            chunks = list(running.session.stream(ids, running.sampling, max_tokens=max_tokens))
            answers.append((chunks[-1].stats, "".join(chunk.text for chunk in chunks)))
        sums = {
            key: sum(getattr(stats, key) for stats, _ in answers)
            for key in ("tokens", "passes", "elapsed_s", "draft_s", "verify_s", "streamed_bytes")
        }
        return {
            **sums,
            "texts": [text for _, text in answers],
            "dtype": str(running.session.target.model.dtype).removeprefix("torch."),
            "num_resident": len(running.plan.resident),
            "num_streamed": len(running.plan.streamed),
            "raw_link_bps": running.raw_link_bps,
            "peak_bytes": peak_rss_bytes(),
            "limit_bytes": running.plan.limit_bytes,
        }


def run_accelerate(target: Path, max_memory: str, max_tokens: int) -> dict:
    """Answers PROMPTS with transformers and accelerate, the layers that do not fit offloaded to disk."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": max_memory}, offload_folder=folder
        )
        tokens, elapsed_s, texts = 0, 0.0, []
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            started = time.perf_counter()
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            elapsed_s += time.perf_counter() - started
            new = output[0, inputs["input_ids"].shape[1] :]
            tokens += len(new)
            texts.append(tokenizer.decode(new, skip_special_tokens=True))
        on_disk = sum(place == "disk" for place in model.hf_device_map.values())
    return {"tokens": tokens, "elapsed_s": elapsed_s, "texts": texts, "modules_on_disk": on_disk}


def compare(arguments: argparse.Namespace) -> dict:
    demo, target = widened_demo(arguments.factor)
    limit = arguments.limit
    folder = None if arguments.no_cgroup else make_cgroup(limit)
    ours = [
        "--worker",
        "specexec",
        "--target",
        str(target),
        "--tokens",
        str(arguments.tokens),
        "--budget",
        arguments.budget,
    ]
    peer = ["--worker", "accelerate", "--target", str(target), "--tokens", str(arguments.peer_tokens)]
    rates = [raw_rate(target)]
    speculative = in_cgroup(folder, __file__, [*ours, "--draft", str(demo)])
    rates.append(raw_rate(target))
    accelerate = in_cgroup(folder, __file__, [*peer, "--max-memory", arguments.peer_memory])
    rates.append(raw_rate(target))
    plain = in_cgroup(folder, __file__, [*ours, "--draft", "none", "--tokens", str(arguments.peer_tokens)])
    rates.append(raw_rate(target))
    resident = in_cgroup(None, __file__, [*ours, "--draft", str(demo), "--device-limit", "10GB"])
    if folder is not None:
        folder.rmdir()
    raw_link_bps = statistics.median([*rates, speculative["raw_link_bps"]])
    link_s = speculative["streamed_bytes"] / speculative["passes"] / raw_link_bps
    compute_s = resident["verify_s"] / resident["passes"]
    s_per_pass = speculative["verify_s"] / speculative["passes"]
    tokens_per_s = speculative["tokens"] / speculative["elapsed_s"]
    accelerate_tokens_per_s = accelerate["tokens"] / accelerate["elapsed_s"]
    return {
        "tokens_per_s": tokens_per_s,
        "accelerate_tokens_per_s": accelerate_tokens_per_s,
        "ratio": tokens_per_s / accelerate_tokens_per_s,
        "plain_tokens_per_s": plain["tokens"] / plain["elapsed_s"],
        "tokens_per_pass": speculative["tokens"] / speculative["passes"],
        "s_per_pass": s_per_pass,
        "draft_s_per_pass": speculative["draft_s"] / speculative["passes"],
        "floor_s_per_pass": max(link_s, compute_s),
        "pass_over_floor": s_per_pass / max(link_s, compute_s),
        "compute_s_per_pass": compute_s,
        "raw_link_bps": raw_link_bps,
        "raw_link_bps_samples": [*rates, speculative["raw_link_bps"]],
        "same_text_as_accelerate": all(
            ours.startswith(theirs) for ours, theirs in zip(speculative["texts"], accelerate["texts"], strict=True)
        ),
        "dtype": speculative["dtype"],
        "num_resident": speculative["num_resident"],
        "num_streamed": speculative["num_streamed"],
        "accelerate_modules_on_disk": accelerate["modules_on_disk"],
        "peak_bytes": speculative["peak_bytes"],
        "limit_bytes": limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=1_500_000_000, help="bytes of the memory cgroup")
    parser.add_argument("--factor", type=int, default=16, help="how much wider the MLPs become")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each of specexec's answers")
    parser.add_argument("--peer-tokens", type=int, default=12, help="tokens of each answer without a draft")
    parser.add_argument("--peer-memory", default="600MB", help="accelerate's max_memory for weights that stay")
    parser.add_argument("--budget", default="auto", help="nodes of specexec's trees, or auto")
    parser.add_argument("--no-cgroup", action="store_true", help="this process is limited already")
    parser.add_argument("--worker", choices=["specexec", "accelerate"], help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draft", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--device-limit", default="", help=argparse.SUPPRESS)
    parser.add_argument("--max-memory", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker == "specexec":
        result = run_specexec(
            arguments.target, arguments.draft, arguments.budget, arguments.device_limit, arguments.tokens
        )
    elif arguments.worker == "accelerate":
        result = run_accelerate(arguments.target, arguments.max_memory, arguments.tokens)
    else:
        result = compare(arguments)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
