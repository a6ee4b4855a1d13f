"""Planned against actual: seconds per pass, peak memory and link utilisation, by format, inside a memory cgroup.

    python benchmarks/plan_accuracy.py [--rounds 3]

The demo model widened 16 times (2.66 GB) runs in a cgroup of 1.5 GB in bf16, int8, NF4 and as GGUF (Q8_0; Q4_K, with
Q5_0 where rows are no multiple of 256, as llama.cpp mixes them), with trees of 64 nodes, where computing is the bound
here, and of 2 (`:2`), where the link is. The machine's own compute type is used: bf16, or fp32 on a CPU without bf16
instructions. Trees are made up: what is guessed does not change what a pass costs. A prompt fills the context, so that
all memory that was planned for is used. Passes behind it count, by their median. The raw rate is that of O_DIRECT reads
just before and just after them, for disks change by the minute; `error_at_measured_rate` is that of the plan's formula
with this rate in place of the one that was measured when the plan was made. Then bf16 again with 0, 10 and 20 of 30
layers resident and no cgroup, since 20 are larger than it; of these the time counts. A plan is as good as what was
measured when it was made, and neighbours make machines faster and slower by a third for seconds: all cases take turns
in several rounds, and of each case the run with the median error counts. The last line printed is one JSON object.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from limits import make_cgroup, widened_demo

from app.environment import cache_dir
from app.launch import Running, open_session
from app.presets import chosen_settings
from app.quiet import quiet_libraries
from offload.checkpoint import open_checkpoint
from offload.hardware import measure_read_bps, peak_rss_bytes
from offload.layout import typed
from offload.predict import Prediction, predict
from specexec.budget import Budget
from specexec.tree import TokenTree

PROMPT = "Write a short story about a lighthouse keeper and a storm."
LIMIT = 1_500_000_000
CTX = 512
ERRORS = ("time_error", "memory_error", "error_at_measured_rate")
_SAMPLE_BYTES = 1 << 30
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


_RARE = 40_000  # of the demo model's 49,152 tokens: a guess that came true would end the answer early


class AnyTree:
    """Guesses a tree of exactly the size asked for: what is guessed does not change what a pass costs."""

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        count = budget.num_nodes
        return TokenTree(np.arange(count) + _RARE, np.full(count, -1), np.zeros(count, np.float32))


def measure(
    target: str, bits: str, resident: str, passes: int, budget: str, rate: Callable[[], float | None] = lambda: None
) -> dict:
    """Planned and actual figures of `passes` passes behind the prefill; `rate` is asked just before and after them."""
    flags = {"target": target, "draft": "none", "ctx": str(CTX), "budget": budget, "seed": "1"}
    flags |= {"bits": bits} if bits else {}
    flags |= {"resident": resident} if resident else {}
    quiet_libraries()
    with open_session(chosen_settings(None, flags), offline=True, note=lambda line: None) as running:
        running.session.drafter, running.session.stop_ids = AnyTree(), frozenset()
        ids = running.session.encode_chat([{"role": "user", "content": PROMPT}])
        room = passes + 4
        answer = running.session.stream((CTX * ids)[: CTX - room], running.sampling, max_tokens=room)
        for _ in range(3):  # the prefill, and a pass that may still wait for its memory
            next(answer)
        before = rate()
        stats = [
            chunk.stats for chunk in itertools.islice(answer, 1 + passes)
        ]  # the slots filled in between: not counted
        after = rate()
        pairs = list(itertools.pairwise(stats))
        seconds = [late.verify_s - early.verify_s for early, late in pairs]
        streamed = [late.streamed_bytes - early.streamed_bytes for early, late in pairs]
        raw = statistics.median([before, after]) if before and after else running.raw_link_bps
        prediction, later = running.choice.prediction, _predicted(running, raw)
        return {
            "dtype": str(running.session.target.model.dtype).removeprefix("torch."),
            "planned_s_per_pass": prediction.s_per_pass,
            "planned_link_s": prediction.link_s,
            "planned_compute_s": prediction.compute_s,
            "s_per_pass": statistics.median(seconds),
            "time_error": prediction.s_per_pass / statistics.median(seconds) - 1,
            "error_at_measured_rate": later.s_per_pass / statistics.median(seconds) - 1,
            "is_link_bound": later.s_per_pass <= later.link_s,
            "link_bps": sum(streamed) / sum(seconds),
            "planned_raw_bps": running.raw_link_bps,
            "raw_bps": raw,
            "link_utilisation": sum(streamed) / sum(seconds) / raw if running.plan.streamed else None,
            "planned_peak_bytes": running.plan.total_bytes,
            "peak_bytes": peak_rss_bytes(),
            "memory_error": running.plan.total_bytes / peak_rss_bytes() - 1,
            "num_resident": len(running.plan.resident),
            "num_streamed": len(running.plan.streamed),
        }


def _predicted(running: Running, disk_bps: float | None) -> Prediction:
    """What the plan's formula gives for another rate of the disk."""
    choice, rates = running.choice, replace(running.rates, disk_bps=disk_bps or running.rates.disk_bps)
    return predict(running.shape, choice.plan, choice.draft, choice.budget, rates)


def in_proportion(cases: list[dict]) -> list[dict]:
    """Seconds per pass beside those of the first case times the share of layers that are streamed."""
    found = []
    for case in cases:
        first = cases[0]
        expected = first["s_per_pass"] * case["num_streamed"] / first["num_streamed"]
        at_rate = expected * first["raw_bps"] / case["raw_bps"]
        found.append(
            {
                "num_resident": case["num_resident"],
                "s_per_pass": case["s_per_pass"],
                "expected_s": expected,
                "error": expected / case["s_per_pass"] - 1,
                "error_at_measured_rate": at_rate / case["s_per_pass"] - 1,
            }
        )
    return found


def write_gguf(source: Path, path: Path, kind: Kind) -> None:
    """`source`, a llama checkpoint, as llama.cpp would store it; embedding and norms stay as they are."""
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    _add_tokenizer(writer, source)
    for entry in checkpoint.tensors.values():
        raw = bytearray(entry.nbytes)
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            file.readinto(raw)
        values = typed(torch.frombuffer(raw, dtype=torch.uint8), entry).float().numpy()
        name = entry.name
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        if (count := heads.get(name.split(".")[-2])) is not None:  # rotary pairs lie side by side in GGUF
            halves = values.reshape(count, 2, -1, values.shape[-1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if values.ndim == 1 or "token_embd" in name:
            writer.add_tensor(name, values if values.ndim == 1 else values.astype(np.float16))
            continue
        own = kind if kind != Kind.Q4_K else Kind.Q4_K if values.shape[-1] % 256 == 0 else Kind.Q5_0
        packed = q4_k(values) if own == Kind.Q4_K else gguf.quants.quantize(values, own)
        writer.add_tensor(name, packed, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q4_k(values: np.ndarray) -> np.ndarray:
    """Q4_K blocks by rounding to nearest: 8 groups of 32 values with 6-bit scales and minima per 256."""
    groups = values.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    scale = (groups.max(-1) - least) / 15
    d, dmin = scale.max(-1, keepdims=True) / 63, -least.min(-1, keepdims=True) / 63
    scales = np.round(np.divide(scale, d, where=d > 0, out=np.zeros_like(scale))).astype(np.uint8)
    minima = np.round(np.divide(-least, dmin, where=dmin > 0, out=np.zeros_like(least))).astype(np.uint8)
    step = d * scales
    shifted = groups + (dmin * minima)[..., None]
    quants = np.divide(shifted, step[..., None], where=step[..., None] > 0, out=np.zeros_like(groups))
    quants = np.clip(np.round(quants), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.empty((len(groups), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    halves = np.concatenate([d, dmin], axis=1).astype(np.float16).view(np.uint8)
    nibbles = (quants[:, :, 0] | quants[:, :, 1] << 4).reshape(len(groups), 128)
    return np.concatenate([halves, packed, nibbles], axis=1).reshape(*values.shape[:-1], -1)


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokens = {**tokenizer["model"]["vocab"], **{each["content"]: each["id"] for each in tokenizer["added_tokens"]}}
    special = {each["id"] for each in tokenizer["added_tokens"]}
    by_id = sorted(tokens, key=tokens.get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(by_id)
    writer.add_token_types([3 if tokens[token] in special else 1 for token in by_id])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template((source / "chat_template.jinja").read_text())


def case_of(within: Path | None, wide: Path, arguments: list[str]) -> dict:
    """What a worker finds in the cgroup `within`; whenever it asks, it is told the raw rate of the disk."""

    def enter() -> None:
        if within is not None:
            (within / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, __file__, "--worker", "--asks", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=enter, **pipes) as worker:
        for line in worker.stdout:
            if line.startswith("{"):
                return json.loads(line)
            if line == "rate?\n":
                print(
                    measure_read_bps(sorted(wide.glob("*.safetensors")), _SAMPLE_BYTES), file=worker.stdin, flush=True
                )
    raise SystemExit(f"{' '.join(arguments)} failed with exit code {worker.returncode}")


def ask_rate() -> float:
    """Lets the parent measure, which is outside the cgroup, so that it takes none of its memory."""
    print("rate?", flush=True)
    return float(sys.stdin.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="bf16,bf16:2,int8,int8:2,nf4,gguf-q8_0,gguf-q4_k,residents:2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--budget", default="64", help="of cases that name none")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--asks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    parser.add_argument("--bits", default="", help=argparse.SUPPRESS)
    parser.add_argument("--resident", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        asked = (given.target, given.bits, given.resident, given.passes, given.budget)
        print(json.dumps(measure(*asked, ask_rate) if given.asks else measure(*asked)))
        return
    _, wide = widened_demo(16)
    folder = make_cgroup(LIMIT)
    runs: dict[str, list[dict]] = {}

    def run(name: str, within: Path | None, target: Path, budget: str, **more: str) -> None:
        options = {"target": str(target), "passes": str(given.passes), "budget": budget or given.budget, **more}
        found = case_of(within, wide, [part for key, value in options.items() for part in (f"--{key}", value)])
        print(name, json.dumps(found), flush=True)
        runs.setdefault(name, []).append(found)

    for name in given.rounds * given.cases.split(","):
        kind, _, budget = name.partition(":")
        if kind == "residents":
            for count in ("0", "10", "20"):
                run(f"{name}, {count}", None, wide, budget, resident=count)
        elif kind.startswith("gguf-"):
            path = cache_dir() / f"benchmark-wide16.{kind.removeprefix('gguf-')}.gguf"
            if not path.exists():
                write_gguf(wide, path.with_suffix(".partial"), Kind[kind.removeprefix("gguf-").upper()])
                path.with_suffix(".partial").rename(path)
            run(name, folder, path, budget)
        else:
            run(name, folder, wide, budget, **{"int8": {"bits": "8"}, "nf4": {"bits": "4"}}.get(kind, {}))
    folder.rmdir()
    cases = {name: sorted(found, key=lambda case: case["time_error"])[len(found) // 2] for name, found in runs.items()}
    residents = in_proportion([case for name, case in cases.items() if name.startswith("residents")])
    limited = [case for name, case in cases.items() if not name.startswith("residents")]
    errors = {key: max(abs(case[key]) for case in cases.values()) for key in ERRORS}
    errors["memory_error"] = max((abs(case["memory_error"]) for case in limited), default=0.0)
    bound = [case["link_utilisation"] for case in cases.values() if case["is_link_bound"]]
    report = {"worst_error": max(errors["time_error"], errors["memory_error"]), "worst": errors}
    report |= {"least_link_utilisation": min(bound, default=None), "residents": residents, "cases": cases}
    report["all_time_errors"] = {name: [case["time_error"] for case in found] for name, found in runs.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
