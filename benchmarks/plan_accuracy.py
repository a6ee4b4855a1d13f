"""Planned against actual: seconds per pass, peak memory and link utilisation, by format, inside a memory cgroup.

    python benchmarks/plan_accuracy.py

The demo model widened 16 times (2.66 GB) runs in a cgroup of 1.5 GB in bf16, int8, NF4 and as GGUF (Q8_0; Q4_K, with
Q5_0 where rows are no multiple of 256, as llama.cpp mixes them). The machine's own compute type is used: bf16, or fp32
where the CPU has no bf16 instructions. Trees of a fixed size are made up: what is guessed does not change what a pass
costs. Passes behind the prefill count, by their median. Then bf16 again with 0, 10 and 20
of 30 layers resident and no cgroup, since 20 are larger than it. The last line printed is one JSON object.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from limits import in_cgroup, make_cgroup, raw_rate, widened_demo

from app.environment import cache_dir
from app.launch import open_session
from app.presets import chosen_settings
from app.quiet import quiet_libraries
from offload.checkpoint import open_checkpoint
from offload.hardware import peak_rss_bytes
from offload.layout import typed
from specexec.budget import Budget
from specexec.tree import TokenTree

PROMPT = "Write a short story about a lighthouse keeper and a storm."
LIMIT = 1_500_000_000
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


class AnyTree:
    """Guesses a tree of exactly the size asked for: what is guessed does not change what a pass costs."""

    def propose(self, context: np.ndarray, budget: Budget) -> TokenTree:
        count = budget.num_nodes
        return TokenTree(np.arange(count) + 100, np.full(count, -1), np.zeros(count, np.float32))


def measure(target: str, bits: str, resident: str, passes: int, budget: str) -> dict:
    """Planned and actual figures of `passes` passes behind the prefill."""
    flags = {"target": target, "draft": "none", "ctx": "512", "budget": budget, "seed": "1"}
    flags |= {"bits": bits} if bits else {}
    flags |= {"resident": resident} if resident else {}
    quiet_libraries()
    with open_session(chosen_settings(None, flags), offline=True, note=lambda line: None) as running:
        running.session.drafter = AnyTree()
        ids = running.session.encode_chat([{"role": "user", "content": PROMPT}])
        stats = [chunk.stats for chunk in running.session.stream(ids, running.sampling, max_tokens=passes + 2)]
        pairs = list(itertools.pairwise(stats[1:]))  # the first pass behind the prefill may still wait for its memory
        seconds = [late.verify_s - early.verify_s for early, late in pairs]
        streamed = [late.streamed_bytes - early.streamed_bytes for early, late in pairs]
        prediction = running.choice.prediction
        return {
            "dtype": str(running.session.target.model.dtype).removeprefix("torch."),
            "planned_s_per_pass": prediction.s_per_pass,
            "planned_link_s": prediction.link_s,
            "planned_compute_s": prediction.compute_s,
            "s_per_pass": statistics.median(seconds),
            "link_bps": sum(streamed) / sum(seconds),
            "raw_link_bps": running.raw_link_bps,
            "planned_peak_bytes": running.plan.total_bytes,
            "peak_bytes": peak_rss_bytes(),
            "num_resident": len(running.plan.resident),
            "num_streamed": len(running.plan.streamed),
        }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="bf16,int8,nf4,gguf-q8_0,gguf-q4_k,residents")
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--budget", default="64")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    parser.add_argument("--bits", default="", help=argparse.SUPPRESS)
    parser.add_argument("--resident", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(
            json.dumps(
                measure(arguments.target, arguments.bits, arguments.resident, arguments.passes, arguments.budget)
            )
        )
        return
    _, wide = widened_demo(16)
    folder = make_cgroup(LIMIT)
    cases: dict[str, dict] = {}
    common = ["--worker", "--passes", str(arguments.passes), "--budget", arguments.budget]

    def run(name: str, within: Path | None, target: Path, **more: str) -> None:
        before = raw_rate(wide)
        options = [part for key, value in more.items() for part in (f"--{key}", value)]
        case = in_cgroup(within, __file__, [*common, "--target", str(target), *options])
        case["raw_link_bps"] = statistics.median([before, case["raw_link_bps"] or before, raw_rate(wide)])
        case["time_error"] = case["planned_s_per_pass"] / case["s_per_pass"] - 1
        case["memory_error"] = case["planned_peak_bytes"] / case["peak_bytes"] - 1
        case["link_utilisation"] = case["link_bps"] / case["raw_link_bps"]
        case["is_link_bound"] = case["planned_link_s"] > case["planned_compute_s"]
        cases[name] = case
        print(name, json.dumps(case), flush=True)

    for name in arguments.cases.split(","):
        if name == "residents":
            for count in ("0", "10", "20"):
                run(f"bf16, {count} resident", None, wide, resident=count)
        elif name.startswith("gguf-"):
            path = cache_dir() / f"benchmark-wide16.{name.removeprefix('gguf-')}.gguf"
            if not path.exists():
                write_gguf(wide, path.with_suffix(".partial"), Kind[name.removeprefix("gguf-").upper()])
                path.with_suffix(".partial").rename(path)
            run(name, folder, path)
        else:
            more = {"int8": {"bits": "8"}, "nf4": {"bits": "4"}}.get(name, {})
            run(name, folder, wide, **more)
    folder.rmdir()
    bound = [case["link_utilisation"] for case in cases.values() if case["is_link_bound"]]
    errors = [abs(case[key]) for case in cases.values() for key in ("time_error", "memory_error")]
    print(
        json.dumps(
            {
                "worst_error": max(errors),
                "least_link_utilisation": min(bound, default=None),
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main()
