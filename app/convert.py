"""The embedded default's GGUF file to a safetensors checkpoint in bf16, once.

The conversion runs in a process of its own: what it takes must not count against this run's memory.
"""

import functools
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from ctypes import c_int
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch

from app.progress import watching
from offload.entries import TensorEntry
from offload.layout import decode

_BEGUN, _READ, _WRITTEN, _DONE = 35, 80, 85, 100  # per cent of the time: to import, parse the vocabulary, write weights


def convert(source: Path, folder: Path) -> None:
    """Writes config, tokenizer and bf16 weights of `source` into `folder`; ValueError names what cannot be read."""
    context = get_context("spawn")
    done = context.Value(c_int, 0)
    with (
        watching(f"convert {source.name}", lambda: done.value, _DONE, unit="%"),
        ProcessPoolExecutor(1, context, initializer=_report_to, initargs=(done,)) as pool,
    ):
        pool.submit(_convert_here, source, folder).result()


_done: Synchronized | None = None  # in the process that converts: how far it is, of _DONE


def _report_to(done: Synchronized) -> None:
    global _done
    _done = done
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # bars that no setting switches off; errors travel by themselves


def _reach(done: float) -> None:
    if _done is not None:
        _done.value = int(done)


def _convert_here(source: Path, folder: Path) -> None:
    import gguf

    from app.quiet import quiet_libraries

    quiet_libraries()
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # headers, config and tokenizer would each parse the vocabulary
    from app.target import load_tokenizer
    from offload.checkpoint import open_checkpoint

    _reach(_BEGUN)
    checkpoint = open_checkpoint(source)
    checkpoint.config.dtype = torch.bfloat16
    checkpoint.config.save_pretrained(folder)
    _reach(_READ)
    _write_weights(checkpoint.tensors, folder / "model.safetensors")
    load_tokenizer(source).save_pretrained(folder)
    _reach(_DONE)


def _write_weights(tensors: Mapping[str, TensorEntry], file: Path) -> None:
    entries = [tensors[name] for name in sorted(tensors)]
    with file.open("xb") as stream:
        stream.write(_header(entries))
        for k, entry in enumerate(entries, start=1):
            values = torch.empty(entry.shape, dtype=torch.bfloat16)
            decode(entry, _raw(entry), values)
            stream.write(values.view(torch.uint8).flatten().numpy())
            _reach(_READ + (_WRITTEN - _READ) * k / len(entries))


def _header(entries: list[TensorEntry]) -> bytes:
    """What a safetensors file begins with: the length of the JSON, and the JSON padded to eight bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + 2 * math.prod(entry.shape)
        fields[entry.name] = {"dtype": "BF16", "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(entry: TensorEntry) -> Mapping[str, torch.Tensor]:
    raw = {}
    for part in entry.parts:
        with part.file.open("rb") as stream:
            stream.seek(part.offset)
            raw[part.name] = torch.frombuffer(bytearray(stream.read(part.nbytes)), dtype=torch.uint8)
    return raw
