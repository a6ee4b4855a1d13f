"""Presets: each TOML file names a target, a draft and the limits they run under."""
