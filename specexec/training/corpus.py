"""The texts that drafts are trained on, as shards on disk: made one by one, and gone on with after any interruption."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specexec.training.answers import Manner, Speech, speak
from specexec.training.files import replace_whole


@dataclass(frozen=True)
class Task:
    """What a corpus is to hold.

    prompts: ids that the texts begin with, one each. layers: whose outputs to store beside them; None for none.
    about: how the texts are made, in words; shards that say otherwise, or lack a layer, are refused.
    """

    prompts: Sequence[Sequence[int]]
    manner: Manner
    batch: int
    seed: int
    layers: tuple[int, ...] | None
    about: str

    @property
    def num_shards(self) -> int:
        return -(-len(self.prompts) // self.batch)


def make_corpus(
    model: PreTrainedModel,
    task: Task,
    directory: Path,
    *,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None],
) -> None:
    """Make the shards that `directory` lacks; each depends on nothing but the task and its number.

    share: (i, n) makes every n-th shard from the i-th on, for one of n processes. progress: told texts done and in all.
    Raises ValueError where the directory holds shards of another task, OSError where the disk is full.
    """
    numbers = range(share[0], task.num_shards, share[1])
    for done, number in enumerate(numbers):
        progress(done * task.batch, len(numbers) * task.batch)
        path = shard_path(directory, number)
        if path.is_file():
            _require_same(path, task)
            continue
        prompts = task.prompts[number * task.batch : (number + 1) * task.batch]
        generator = torch.Generator().manual_seed(task.seed + number)
        write_shard(path, speak(model, prompts, task.manner, generator=generator, layers=task.layers), task)
    progress(len(numbers) * task.batch, len(numbers) * task.batch)


def write_shard(path: Path, speeches: Sequence[Speech], task: Task) -> None:
    """Store `speeches`; the file appears whole or not at all."""
    tensors = {
        "ids": torch.from_numpy(np.concatenate([each.ids for each in speeches])).int(),
        "lengths": torch.tensor([len(each.ids) for each in speeches], dtype=torch.int32),
        "starts": torch.tensor([each.start for each in speeches], dtype=torch.int32),
    }
    if task.layers is not None:
        tensors["features"] = torch.cat([each.features for each in speeches])
        tensors["final"] = torch.cat([each.final for each in speeches])
    about = {"about": task.about, "layers": " ".join(map(str, task.layers or ()))}
    replace_whole(path, lambda place: save_file(tensors, place, metadata=about))


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def _require_same(path: Path, task: Task) -> None:
    with safe_open(path, "pt") as shard:
        about, layers = shard.metadata()["about"], {int(each) for each in shard.metadata()["layers"].split()}
    if about != task.about:
        raise ValueError(f"{path.parent} holds texts made otherwise ({about}): use another folder or remove it")
    if not layers >= set(task.layers or ()):
        raise ValueError(f"{path.parent} lacks layers that this recipe reads (it has {sorted(layers)}): make it again")


@dataclass(frozen=True)
class Text:
    """One of a corpus; features [n, width] and final [n, H] as Speech has them, None where they are not stored."""

    number: int
    ids: np.ndarray
    start: int
    features: torch.Tensor | None
    final: torch.Tensor | None


class Corpus:
    """The whole shards of a directory, read text by text.

    layers: whose outputs are wanted with each text; None for tokens only. Raises ValueError where there are no texts or
    the shards lack one of the layers.
    """

    def __init__(self, directory: Path, layers: Sequence[int] | None = None) -> None:
        paths = sorted(directory.glob("shard-*.safetensors"))
        self._shards = [_Shard(path, layers) for path in paths]
        self._places = [(shard, row) for shard in self._shards for row in range(len(shard.starts))]
        if not self._places:
            raise ValueError(f"{directory} holds no texts")

    def __len__(self) -> int:
        return len(self._places)

    def text(self, number: int, most: int | None = None) -> Text:
        """The text of that number, or its first `most` tokens."""
        shard, row = self._places[number]
        return shard.text(row, number, most)

    def counts(self, numbers: Sequence[int], vocab_size: int) -> np.ndarray:
        """How often the answers of the texts `numbers` say each token: int64 [vocab_size]."""
        said = np.zeros(vocab_size, np.int64)
        for number in numbers:
            shard, row = self._places[number]
            said += np.bincount(shard.ids(row)[shard.starts[row] :], minlength=vocab_size)
        return said


class _Shard:
    def __init__(self, path: Path, layers: Sequence[int] | None) -> None:
        self._path, self._columns = path, None
        with safe_open(path, "pt") as file:
            self._ids = file.get_tensor("ids").numpy().astype(np.int64)
            self._ends = np.cumsum(file.get_tensor("lengths").numpy())
            self.starts = file.get_tensor("starts").tolist()
            if layers is not None:
                stored = [int(each) for each in file.metadata()["layers"].split()]
                if lacking := [layer for layer in layers if layer not in stored]:
                    raise ValueError(f"{path} lacks what layers {lacking} put out (it has {stored}): make it again")
                size = file.get_slice("final").get_shape()[1]
                columns = [torch.arange(size) + size * stored.index(layer) for layer in layers]
                self._columns = torch.cat([torch.empty(0, dtype=torch.int64), *columns])

    def ids(self, row: int) -> np.ndarray:
        return self._ids[self._begin(row) : self._ends[row]]

    def text(self, row: int, number: int, most: int | None) -> Text:
        begin, ids = self._begin(row), self.ids(row)[:most]
        features = final = None
        if self._columns is not None:
            with safe_open(self._path, "pt") as file:
                features = file.get_slice("features")[begin : begin + len(ids)][:, self._columns]
                final = file.get_slice("final")[begin : begin + len(ids)]
        return Text(number, ids, self.starts[row], features, final)

    def _begin(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0


def frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` tokens said most often, ascending: int64 [size]."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])
