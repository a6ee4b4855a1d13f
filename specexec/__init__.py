"""Lossless tree-speculative decoding for targets larger than the memory at hand."""

__version__ = "0.1.0"
