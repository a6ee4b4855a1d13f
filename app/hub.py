"""Checkpoints from the Hugging Face Hub, into its own cache; HF_HOME, HF_TOKEN and HF_ENDPOINT hold."""

import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.progress import Progress

_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_PATIENCE_S = 5.0


def is_reachable() -> bool:
    """Whether the Hub answers within five seconds, name resolution (which has no timeout of its own) included."""
    from huggingface_hub.constants import ENDPOINT

    answered: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=_PATIENCE_S).close()
        except urllib.error.HTTPError:
            pass  # it answers, if only to say no
        except OSError:
            return
        answered.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    return bool(answered)


def local_snapshot(model_id: str) -> Path | None:
    """The cached snapshot of a model, or None unless it is whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model_id, allow_patterns=_PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"*.safetensors"}
    return folder if all(any(folder.glob(shard)) for shard in shards) else None  # a plan fetches the config alone


def known_config(model_id: str) -> Path | None:
    """The cached folder with a model's config, whether or not its weights are there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def fetch_config(model_id: str) -> Path:
    """The folder with a model's config, fetched alone; errors as for `download`."""
    from huggingface_hub import hf_hub_download

    with _explained(model_id):
        return Path(hf_hub_download(model_id, "config.json")).parent


def download(model_id: str) -> Path:
    """Fetches safetensors, configs and tokenizer; ConnectionError or FileNotFoundError says why it could not."""
    from huggingface_hub import snapshot_download

    with Progress(f"download {model_id}") as progress, _explained(model_id):
        return Path(snapshot_download(model_id, allow_patterns=_PATTERNS, tqdm_class=_reporting_to(progress)))


def dataset(dataset_id: str, part: str | None, *, offline: bool) -> Path:
    """The folder of a data set's parquet files, or of a part of them; errors as for `download`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = {"repo_type": "dataset", "allow_patterns": [f"*{part}*/*.parquet" if part else "*.parquet"]}
    if offline:
        try:
            folder = Path(snapshot_download(dataset_id, **wanted, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ConnectionError(f"{dataset_id} is not cached and this run is offline: fetch it first") from None
    else:
        with Progress(f"download {dataset_id}") as progress, _explained(dataset_id):
            folder = Path(snapshot_download(dataset_id, **wanted, tqdm_class=_reporting_to(progress)))
    if part is None:
        return folder
    found = [each for each in sorted(folder.rglob(part)) if each.is_dir()]
    if not found:
        raise FileNotFoundError(f"{dataset_id} has no folder {part!r} of parquet files")
    return found[0]


def describe(model_id: str) -> tuple[Path, str]:
    """The folder with the model's config, and the type that most of its weights are stored in: no weight is fetched."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    folder = fetch_config(model_id)
    with _explained(model_id):
        try:
            counts = get_safetensors_metadata(model_id).parameter_count
        except NotASafetensorsRepoError:
            raise FileNotFoundError(f"{model_id} has no safetensors on the Hub, so it cannot be run") from None
        return folder, max(counts, key=counts.__getitem__)


@contextmanager
def _explained(model_id: str) -> Iterator[None]:
    """What keeps a model from coming, in one line that says what to do."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not is_reachable():
        raise ConnectionError(f"cannot reach the Hub to fetch {model_id}: check the network, or give a local directory")
    try:
        yield
    except GatedRepoError:
        raise ConnectionError(
            f"{model_id} is gated: accept its terms on the Hub, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"no model {model_id!r} on the Hub (nor a directory of that name); a private one needs HF_TOKEN"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConnectionError(f"cannot fetch {model_id} from the Hub: {str(error).splitlines()[0]}") from error


def _reporting_to(progress: Progress) -> type:
    """A tqdm class that shows nothing itself and hands counts of bytes on."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B":
                progress(int(self.n), int(self.total or 0))

    return Bar
