"""The embedded default's GGUF file to a safetensors checkpoint, once.

The conversion runs in a process of its own: it holds the whole model, and its memory must not count against this run's.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from app.progress import watching


def convert(source: Path, folder: Path) -> None:
    """Writes config, tokenizer and bf16 weights of `source` into `folder`; ValueError names what cannot be read."""
    architecture, num_bytes = _header(source)
    with (
        watching(f"convert {source.name}", lambda: _written_bytes(folder), num_bytes),
        ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool,
    ):
        try:
            pool.submit(_convert_here, str(source), str(folder)).result()
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(f"{source.name}: cannot read a GGUF of architecture {architecture!r}: {error}") from error


def _written_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.glob("*.safetensors"))


def _header(source: Path) -> tuple[str, int]:
    """The architecture's name, and the bytes of the weights in bf16."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        architecture = reader.get_field("general.architecture")
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{source} is not a readable GGUF file: {error}") from error
    if architecture is None:
        raise ValueError(f"{source} does not say which architecture it is of")
    return str(architecture.contents()), sum(2 * int(tensor.n_elements) for tensor in reader.tensors)


def _convert_here(source: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from app.quiet import quiet_libraries

    quiet_libraries()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a bar that no setting switches off; errors travel by themselves
    directory, name = str(Path(source).parent), Path(source).name
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
