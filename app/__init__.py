"""The room that knows both the algorithm and the weights: settings, presets, sessions and the command line."""

__version__ = "0.1.0"
