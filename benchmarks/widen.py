"""Make a llama-type checkpoint larger without changing what it computes: real text, real acceptance, more bytes.

    python benchmarks/widen.py SOURCE DESTINATION FACTOR

Every MLP gets FACTOR times its neurons. The new ones have random input rows and a zero output column: they do all
the work of a neuron and add nothing. The result is written in shards of at most 1 GB with an index, a layer at a time.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from offload.checkpoint import open_checkpoint
from offload.layout import typed

SHARD_BYTES = 10**9


def widen(source: Path, destination: Path, factor: int) -> None:
    """Writes the widened copy of `source`; the directory appears under its name only when it is whole."""
    checkpoint = open_checkpoint(source)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and file.name != "model.safetensors.index.json":
            shutil.copy(file, partial)
    config = json.loads((source / "config.json").read_text())
    config["intermediate_size"] *= factor
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    placed: dict[str, int] = {}
    for entry in sorted(checkpoint.tensors.values(), key=lambda entry: (entry.file, entry.offset)):
        raw = bytearray(entry.nbytes)
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            file.readinto(raw)
        tensor = _wider(entry.name, typed(torch.frombuffer(raw, dtype=torch.uint8), entry), factor, generator)
        if sum(each.nbytes for each in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            _save(partial, len(shards), shards[-1])
            shards[-1] = {}
            shards.append({})
        shards[-1][entry.name] = tensor
        placed[entry.name] = len(shards)
    _save(partial, len(shards), shards[-1])
    index = {"metadata": {}, "weight_map": {name: _shard_name(number) for name, number in placed.items()}}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    partial.rename(destination)


def _wider(name: str, tensor: torch.Tensor, factor: int, generator: torch.Generator) -> torch.Tensor:
    if "gate_proj" in name or "up_proj" in name:
        added = torch.randn(tensor.shape[0] * (factor - 1), tensor.shape[1], generator=generator) * 0.02
        return torch.cat([tensor, added.to(tensor.dtype)])
    if "down_proj" in name:
        return torch.nn.functional.pad(tensor, (0, tensor.shape[1] * (factor - 1)))
    return tensor


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / _shard_name(number), metadata={"format": "pt"})


if __name__ == "__main__":
    widen(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
