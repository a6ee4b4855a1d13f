"""The command `pull`: fetches models before anything is asked of them."""

from app.environment import is_offline
from app.models import locate
from app.presets import Preset, load_preset, preset_names
from app.quiet import quiet_libraries
from app.settings import DRAFT_KINDS, named_model


def pull_models(name: str, *, offline: bool) -> None:
    """Brings a preset's models, or one model, into the cache and prints where each is."""
    quiet_libraries()
    is_preset = name in preset_names() or name.endswith(".toml")
    for model in models_of(load_preset(name)) if is_preset else [name]:
        print(f"{model}: {locate(model, offline=offline or is_offline())}")


def models_of(preset: Preset) -> list[str]:
    """The target, and the draft where that is a model of its own."""
    draft = preset.settings.get("draft", "auto")
    return [preset.settings["target"]] + ([] if draft in DRAFT_KINDS else [named_model(draft)])
