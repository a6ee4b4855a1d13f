"""The command `list`: the presets, why one would choose each, and what they would do on this machine."""

import json
import sys

from app import hub
from app.environment import is_offline
from app.models import is_cached
from app.plan_command import Elsewhere, outlook
from app.presets import Preset, chosen_settings, load_preset, preset_names
from app.progress import Progress
from app.pull import models_of
from offload.plan import Plan

_HERE = Elsewhere(None, None, None)


def show_presets(*, as_json: bool, offline: bool) -> None:
    """Prints a line, or one JSON entry, for each built-in preset; asks the Hub for configs, never for weights."""
    offline = offline or is_offline() or not hub.is_reachable()
    names, rows = preset_names(), []
    with Progress("list", "presets") as progress:
        for name in names:
            rows.append(_row(load_preset(name), offline=offline))
            progress(len(rows), len(names))
    if as_json:
        print(json.dumps({"presets": rows}))
        return
    widths = {key: max(len(str(row[key])) for row in rows) for key in ("name", "verdict")}
    for row in rows:
        speed = f"{row['tokens_per_s']:.2g} tokens/s" if row["tokens_per_s"] else ""
        cached = "cached" if row["cached"] else "not cached"
        told = f"{row['name']:<{widths['name']}}  {row['verdict']:<{widths['verdict']}}  {speed:<12}  {cached:<10}"
        print(f"{told}  {row['why']}")
    if not all(row["cached"] for row in rows):
        print("fetch one with `specexec pull NAME`", file=sys.stderr)


def verdict_of(name: str, *, offline: bool, in_place_of: Plan | None = None) -> str:
    """Whether a preset fits this machine, and how fast it is expected to be, in a few words; see `outlook`."""
    try:
        verdict, tokens_per_s = outlook(chosen_settings(name, {}), _HERE, offline=offline, in_place_of=in_place_of)
    except (OSError, ValueError):
        return _unknown(offline)
    return verdict + (f", {tokens_per_s:.2g} tokens/s" if tokens_per_s else "")


def _unknown(offline: bool) -> str:
    return "unknown without the Hub" if offline else "unknown"


def _row(preset: Preset, *, offline: bool) -> dict[str, object]:
    try:
        verdict, tokens_per_s = outlook(chosen_settings(preset.name, {}), _HERE, offline=offline)
    except (OSError, ValueError) as error:
        verdict, tokens_per_s = _unknown(offline), None
        if not offline:
            print(f"specexec: {preset.name}: {error}", file=sys.stderr)
    return {
        "name": preset.name,
        "target": preset.settings["target"],
        "draft": preset.settings.get("draft", "auto"),
        "gpu": preset.gpu,
        "ram": preset.ram,
        "verdict": verdict,
        "tokens_per_s": tokens_per_s,
        "cached": all(is_cached(model) for model in models_of(preset)),
        "why": preset.why,
    }
