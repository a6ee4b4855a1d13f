"""The command `export`: the same target and draft as a command line of vLLM or SGLang, for a machine that holds both.

Option names: docs.vllm.ai (features/speculative_decoding), docs.sglang.io (advanced_features/speculative_decoding).
"""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app import hub
from app.environment import is_offline
from app.settings import DRAFT_KINDS, Settings, named_model

_GUESSES = {"ngram": 5, "suffix": 32, "external": 5, "eagle3": 3, "mtp": 1, "dflash": 16, "dspark": 7}
_HEADS = ("eagle3", "dflash", "dspark", "mtp")
_NEAREST = {"auto": "ngram", "self": "ngram", "graft": "suffix"}  # of what exists only here
_SGLANG = {"ngram": "NGRAM", "external": "STANDALONE", "mtp": "EAGLE"}  # others are called there as they are here
_FITS = "all weights have to fit the memory of the GPUs there; several GPUs share it with {flag} N"


def print_command(program: str, settings: Settings, *, offline: bool) -> int:
    """Prints the command on standard output, and in a line each on standard error what differs from here."""
    if settings.engine:
        raise ValueError("--engine names a server that runs already; this prints the command that starts one")
    if settings.target is None or settings.target.endswith(".gguf"):
        raise ValueError("name a model with --target or --preset; of a GGUF file the model that it was made of")
    given, settings = settings.draft, replace(settings, draft=named_model(settings.draft))
    mechanism, block = _mechanism(settings.draft, offline=offline or is_offline())
    write = {"vllm": vllm_command, "sglang": sglang_command}[program]
    command, notes = write(settings, mechanism, block)
    if given != settings.draft:
        notes.append(f"{given} guesses from repetitions, too, here only; there it is {settings.draft}")
    print(shlex.join(command))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def vllm_command(settings: Settings, mechanism: str, block: int | None) -> tuple[list[str], list[str]]:
    """Words and notes. mechanism: a kind without a model, `external`, or a head's; block: how many a head guesses."""
    command = ["vllm", "serve", str(settings.target)]
    notes = [_FITS.format(flag="--tensor-parallel-size")]
    if settings.ctx:
        command += ["--max-model-len", str(settings.ctx)]
    if settings.dtype:
        command += ["--dtype", settings.dtype]
    if settings.bits == 4:
        command += ["--quantization", "bitsandbytes"]
    elif settings.bits == 8:
        command += ["--quantization", "fp8"]
        notes.append("fp8 is the nearest that vLLM makes of 16-bit weights to the int8 of --bits 8")
    method = _NEAREST.get(mechanism, mechanism)
    if method != mechanism:
        notes.append(f"the draft {mechanism} exists only here; {method} is the nearest that vLLM has")
    if method != "none":
        asked: dict[str, Any] = {"method": "draft_model" if method == "external" else method}
        if mechanism in (*_HEADS, "external") and settings.draft != mechanism:
            asked["model"] = settings.draft
        asked["num_speculative_tokens"] = block or _GUESSES[method]
        if method == "ngram":
            asked["prompt_lookup_max"] = 4
        command += ["--speculative-config", json.dumps(asked)]
    return command, notes


def sglang_command(settings: Settings, mechanism: str, block: int | None) -> tuple[list[str], list[str]]:
    """Words and notes; see `vllm_command`."""
    command = ["python", "-m", "sglang.launch_server", "--model-path", str(settings.target)]
    notes = [_FITS.format(flag="--tp")]
    if settings.ctx:
        command += ["--context-length", str(settings.ctx)]
    if settings.dtype:
        command += ["--dtype", settings.dtype]
    if settings.bits == 4:
        command += ["--quantization", "bitsandbytes", "--load-format", "bitsandbytes"]
    elif settings.bits == 8:
        command += ["--quantization", "fp8"]
        notes.append("fp8 is the nearest that SGLang makes of 16-bit weights to the int8 of --bits 8")
    method = "ngram" if mechanism == "suffix" or mechanism in _NEAREST else mechanism
    if method != mechanism:
        notes.append(f"SGLang has no draft {mechanism}; its n-gram cache is the nearest")
    if method == "none":
        return command, notes
    command += ["--speculative-algorithm", _SGLANG.get(method, method.upper())]
    if mechanism in (*_HEADS, "external") and settings.draft != mechanism:
        command += ["--speculative-draft-model-path", settings.draft]
        if settings.bits in (4, 8):
            command += ["--speculative-draft-model-quantization", "unquant"]
            if settings.bits == 4:
                command += ["--speculative-draft-load-format", "auto"]
    if method in ("external", "eagle3", "mtp"):  # a chain: branches need attention kernels that not all GPUs have
        steps = block or _GUESSES[method]
        command += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
        command += ["--speculative-num-draft-tokens", str(steps + 1)]
    return command, notes


def _mechanism(draft: str, *, offline: bool) -> tuple[str, int | None]:
    """What kind of draft a name stands for, by its config or, where that is out of reach, its name; and its block."""
    if draft in DRAFT_KINDS:
        return draft, None
    config = _config(draft, offline=offline)
    told = " ".join([draft, *map(str, config.get("architectures") or ()), str(config.get("speculators_config", ""))])
    plain = told.lower().replace("-", "").replace("_", "")
    mechanism = next((head for head in _HEADS if head in plain), "external")
    block = config.get("block_size")
    return mechanism, block if mechanism in ("dflash", "dspark") and isinstance(block, int) else None


def _config(draft: str, *, offline: bool) -> Mapping[str, Any]:
    folder: Path | None = Path(draft).expanduser()
    if not folder.is_dir():
        try:
            folder = hub.known_config(draft) if offline else hub.fetch_config(draft)
        except (OSError, ValueError):
            folder = None
    file = folder / "config.json" if folder else None
    return json.loads(file.read_text()) if file and file.is_file() else {}
