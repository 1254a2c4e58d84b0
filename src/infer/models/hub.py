"""Locating a checkpoint: the demo model of the package, a local folder or GGUF file, or the hub.

`huggingface_hub` downloads and honours its own environment variables (HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE). Only files that the engine reads are downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infer.errors import LoadError
from infer.models.model_config import load_json

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"
"""Folder of the demo model."""
SHIPPED_NAME = "infer-demo"
"""Name under which the demo model is served."""
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja"]


def locate(model: str | None, *, revision: str | None = None) -> tuple[Path, str]:
    """(folder or GGUF file, name under which it is served) of a checkpoint.

    `model`: a path, a hub id `owner/name`, or None for the demo model. The checkpoint of a hub id
    is downloaded at `revision` to the local hub cache. `LoadError` if there is no such checkpoint.
    """
    if model is None or model == SHIPPED_NAME:
        return SHIPPED_FOLDER, SHIPPED_NAME
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            found = sorted(file.name for file in folder.glob("*.gguf"))
            hint = f"; give the path of one GGUF file in it: {', '.join(found)}" if found else ""
            raise LoadError(f"{folder} is a folder without config.json: not a checkpoint{hint}")
        return folder, folder.resolve().name
    if folder.suffix.lower() == ".gguf":
        if not folder.is_file():
            raise LoadError(f"{folder} does not exist; give the path of a GGUF file")
        return folder, folder.stem
    if folder.exists():
        raise LoadError(
            f"{folder} is a file; give the folder of a checkpoint, a .gguf file, or a hub id"
        )
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise LoadError(f"{model} is neither a folder here nor a hub id of the form owner/name")
    return _download(model, revision), model


@dataclass(frozen=True, slots=True)
class CachedCheckpoint:
    """A checkpoint in the local hub cache."""

    name: str
    """The hub id, `owner/name`."""
    architecture: str
    """The first entry of `architectures` in its config, or "unknown"."""
    num_bytes: int
    """Size of its files on disk, in bytes."""


def cached_checkpoints() -> list[CachedCheckpoint]:
    """The checkpoints in the local hub cache that have a `config.json`, sorted by hub id."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        for revision in repo.revisions:
            config = revision.snapshot_path / "config.json"
            if repo.repo_type == "model" and config.is_file():
                names = load_json(config).get("architectures") or ["unknown"]
                found.append(CachedCheckpoint(repo.repo_id, str(names[0]), revision.size_on_disk))
                break
    return found


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    what = hub_id if revision is None else f"{hub_id} (revision {revision})"
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_WANTED_FILES))
    except LocalEntryNotFoundError:
        raise LoadError(
            f"{what} is not in the local hub cache and the hub cannot be reached (offline, or"
            " HF_HUB_OFFLINE is set); download it where there is a network, or give a local folder"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(f"{what} cannot be fetched from the hub: {reason}") from None
