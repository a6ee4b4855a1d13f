"""The commands around models that are not asked anything yet: fetch them, list the presets."""

import json
import sys

from app.environment import is_offline
from app.models import is_cached, locate
from app.presets import Preset, load_preset, preset_names
from app.quiet import quiet_libraries
from app.settings import DRAFT_KINDS


def pull_models(name: str, *, offline: bool) -> None:
    """Brings a preset's models, or one model, into the cache and prints where each is."""
    quiet_libraries()
    is_preset = name in preset_names() or name.endswith(".toml")
    for model in _models_of(load_preset(name)) if is_preset else [name]:
        print(f"{model}: {locate(model, offline=offline or is_offline())}")


def show_presets(*, as_json: bool) -> None:
    """Prints a line, or one JSON entry, for each built-in preset."""
    presets = [load_preset(name) for name in preset_names()]
    rows = [
        {
            "name": each.name,
            "target": each.settings["target"],
            "why": each.why,
            "cached": all(is_cached(model) for model in _models_of(each)),
        }
        for each in presets
    ]
    if as_json:
        print(json.dumps({"presets": rows}))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {'cached' if row['cached'] else 'not cached':<10}  {row['why']}")
    if not all(row["cached"] for row in rows):
        print("fetch one with `specexec pull NAME`", file=sys.stderr)


def _models_of(preset: Preset) -> list[str]:
    draft = preset.settings.get("draft", "auto")
    return [preset.settings["target"]] + ([] if draft in DRAFT_KINDS else [draft])
