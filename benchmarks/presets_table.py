"""Prints the README's table of presets with the speed planned for each on its own machine; nothing is fetched or run.

python benchmarks/presets_table.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import shapes

from app.blueprint import Blueprint
from app.plan_command import Elsewhere, outlook
from app.presets import chosen_settings, load_preset, preset_names


def blueprint(name: str, *, offline: bool) -> Blueprint:
    """A model of the presets from its dimensions as its authors give them."""
    return Blueprint(name, shapes.known_config(shapes.ON_THE_HUB[name]), torch.bfloat16, None)


def main() -> None:
    """One row per preset that names a machine."""
    print("| preset | GPU, RAM | target | draft | bits | plan | tokens/s, planned |")
    print("|---|---|---|---|---|---|---|")
    for preset in map(load_preset, preset_names()):
        if preset.gpu is None:
            continue
        chosen = chosen_settings(preset.name, {})
        verdict, speed = outlook(chosen, Elsewhere.read(preset.gpu, preset.ram, None), offline=True, look=blueprint)
        target, draft = (name.rpartition("/")[2] for name in (chosen.settings.target, chosen.settings.draft))
        where = f"{preset.gpu}, {preset.ram}"
        print(f"| `{preset.name}` | {where} | {target} | {draft} | {chosen.settings.bits} | {verdict} | {speed:.2g} |")


if __name__ == "__main__":
    main()
