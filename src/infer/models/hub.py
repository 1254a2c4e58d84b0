"""Locating a checkpoint: the demo model, a local folder or GGUF file, a package, or the hub.

`huggingface_hub` downloads and honours its own environment variables (HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE). Only files that the engine reads are downloaded. Of a repository with GGUF files
that is one of them, or the parts of one: `owner/name:Q4_K_M` names it by its quantisation,
`owner/name:file.gguf` by its name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from infer.config import SHIPPED_NAME
from infer.errors import LoadError
from infer.files import reading
from infer.models.gguf_names import SPLIT_NAME, gguf_models, listed, names_of, select_gguf
from infer.models.model_config import load_json
from infer.models.package import find_package
from infer.models.quantized_config import read_quantization, with_quantization_file
from infer.readable_text import readable

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"
"""Folder of the demo model."""
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja"]
PACKAGE = "package:"
"""What the name of a model begins with that an installed package carries."""
_HUB_PAGE = re.compile(
    r"(?:https?://|hf://)?(?:(?:www\.)?huggingface\.co/|hf\.co/|(?<=hf://))"
    r"([^/\s]+/[^/\s]+?)(?:/(?:tree|blob)/main/?|/)?"
)
"""Address of a repository's page, as people copy it."""


def locate(model: str | None, *, revision: str | None = None) -> tuple[Path, str]:
    """(folder or GGUF file, name under which it is served) of a checkpoint.

    `model`: a path, `package:` with the name of an installed package that carries a checkpoint, a
    hub id `owner/name`, `owner/name:` with a quantisation or the name of a GGUF file, or None for
    the demo model. The checkpoint of a hub id is downloaded at `revision` to the local hub cache.
    `LoadError` if there is no such checkpoint.
    """
    if model is None or model == SHIPPED_NAME:
        return SHIPPED_FOLDER, SHIPPED_NAME
    if model.startswith(PACKAGE):
        path = find_package(model.removeprefix(PACKAGE)).path
        return path, path.stem if path.is_file() else path.name
    model = _without_address(model)
    folder = _expanded(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            files = sorted(file.name for file in folder.glob("*.gguf"))
            hint = f"; give the path of one GGUF file in it: {', '.join(files)}" if files else ""
            raise LoadError(f"{folder} is a folder without config.json: not a checkpoint{hint}")
        return folder, readable(folder.resolve().name)
    hub_id, colon, wanted = model.partition(":")
    is_path = model.startswith(("/", ".", "~"))
    if colon and hub_id.count("/") == 1 and not is_path and not folder.exists():
        return _download_gguf(hub_id, wanted, revision), model
    if folder.suffix.lower() == ".gguf":
        if not folder.is_file():
            raise LoadError(f"{folder} does not exist; give the path of a GGUF file")
        split = SPLIT_NAME.fullmatch(folder.name)
        return folder, readable(split[1] if split else folder.stem)
    if folder.exists():
        raise LoadError(
            f"{folder} is a file; give the folder of a checkpoint, a .gguf file, or a hub id"
        )
    if is_path or model.count("/") != 1:
        raise LoadError(f"{model} is neither a folder here nor a hub id of the form owner/name")
    return _download(model, revision), model


def _without_address(model: str) -> str:
    """The path of a file:// URL, the hub id of the hub's page, and anything else without spaces
    around it that no file has."""
    if not Path(model).exists():
        model = model.strip()
    if model.lower().startswith("file://"):
        return url2pathname(urlsplit(model).path)
    page = _HUB_PAGE.fullmatch(model)
    return page[1] if page else model


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:  # ~name of a user that does not exist
        raise LoadError(f"{model}: {error}") from None


def verify(model: str | None) -> None:
    """Compare the files of an installed package's checkpoint with the checksums that it lists.

    `LoadError` if one differs. Other models have no checksums here.
    """
    if model is not None and model.startswith(PACKAGE):
        find_package(model.removeprefix(PACKAGE)).verify()


@dataclass(frozen=True, slots=True)
class CachedCheckpoint:
    """A checkpoint in the local hub cache."""

    name: str
    """The hub id, `owner/name`."""
    architecture: str
    """The first entry of `architectures` in its config, or "unknown"; "" if it is unreadable."""
    num_bytes: int
    """Size of its files on disk, in bytes."""
    unreadable: str = ""
    """Why its config cannot be read."""
    quantization: str = ""
    """How its weights are quantised, or why that is not supported; "" if they are not."""


def cached_checkpoints() -> list[CachedCheckpoint]:
    """The checkpoints in the local hub cache that have a `config.json`, sorted by hub id, after
    those whose folders cannot be read."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):  # there is no such folder, or it is a file
        return []
    checkpoints = []
    for problem in map(str, cache.warnings):  # its folders are not as the hub's library makes them
        folder = re.search(r"models--([^/\\]+)", problem)
        name = folder[1].replace("--", "/") if folder else "?"
        checkpoints.append(CachedCheckpoint(name, "", 0, problem))
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        for revision in repo.revisions:
            config = revision.snapshot_path / "config.json"
            if repo.repo_type == "model" and config.is_file():
                checkpoints.append(_cached(repo.repo_id, config, revision.size_on_disk))
                break
    return checkpoints


def remove_cached(names: Iterable[str]) -> int:
    """Remove checkpoints from the local hub cache, all revisions of each; returns how many bytes
    are free by that. Raises `LoadError` if one cannot be removed."""
    from huggingface_hub import constants, scan_cache_dir

    # Not the library's `delete_revisions`: it finds a revision by its hash, which a copy of a
    # repository shares with it.
    wanted, freed = set(names), 0
    try:
        for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos:
            if repo.repo_type == "model" and repo.repo_id in wanted:
                shutil.rmtree(repo.repo_path)
                freed += repo.size_on_disk
    except OSError as error:
        raise LoadError(f"{error.filename} cannot be removed: {error.strerror}") from None
    return freed


def _cached(name: str, config: Path, num_bytes: int) -> CachedCheckpoint:
    """What a repository holds. Anybody may have written it, so what is wrong with it is told."""
    try:
        with reading("config.json"):
            raw = with_quantization_file(config.parent, load_json(config))
            problems: list[str] = []
            quantization = read_quantization(raw, problems)
            names = raw.get("architectures") or ["unknown"]
    except LoadError as error:
        return CachedCheckpoint(name, "", num_bytes, str(error))
    if not isinstance(names, list) or not isinstance(names[0], str):
        problem = f"architectures must be a list of names, not {names!r:.80}"
        return CachedCheckpoint(name, "", num_bytes, f"{config}: {problem}")
    shown = "; ".join(problems) or str(quantization or "")
    return CachedCheckpoint(name, names[0], num_bytes, quantization=shown)


def _download_gguf(hub_id: str, wanted: str, revision: str | None) -> Path:
    """The first part of the file that `wanted` names, after all its parts were downloaded."""
    from huggingface_hub import hf_hub_download

    where = hub_id if revision is None else f"{hub_id} (revision {revision})"
    with _hub_errors(where):
        parts = select_gguf(_files_of(hub_id, revision), wanted, where)
        paths = [hf_hub_download(hub_id, part, revision=revision) for part in parts]
    return Path(paths[0])


def _files_of(hub_id: str, revision: str | None) -> list[str]:
    """The names of a repository's files; without a network, of those in the local hub cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return list(HfApi().list_repo_files(hub_id, revision=revision))
    except (HfHubHTTPError, HFValidationError):
        raise  # the hub has answered, or never will
    except Exception:  # without a network its HTTP library raises errors of its own
        folder = Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    what = hub_id if revision is None else f"{hub_id} (revision {revision})"
    with _hub_errors(what):
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=_WANTED_FILES))
        if (folder / "config.json").is_file():
            return folder
        names = names_of(gguf_models(_files_of(hub_id, revision)))
    if names:
        raise LoadError(
            f"{what} holds GGUF files; name one of them, as {hub_id}:{names[0]}"
            f" (there are: {listed(names)})"
        )
    return folder


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """What the hub's library raises, as a `LoadError` about `what`."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise LoadError(
            f"{what} is not in the local hub cache and the hub cannot be reached (offline, or"
            " HF_HUB_OFFLINE is set); download it where there is a network, or give a local folder"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(f"{what} cannot be fetched from the hub: {reason}") from None
