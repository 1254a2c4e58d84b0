"""Locating a checkpoint: the demo model of the package, a local folder or GGUF file, or the hub.

`huggingface_hub` downloads and honours its own environment variables (HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE). Only files that the engine reads are downloaded. Of a repository with GGUF files
that is one of them, or the parts of one: `owner/name:Q4_K_M` names it by its quantisation,
`owner/name:file.gguf` by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit
from urllib.request import url2pathname

from infer.errors import LoadError
from infer.files import reading
from infer.models.model_config import load_json
from infer.readable_text import readable

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"
"""Folder of the demo model."""
SHIPPED_NAME = "infer-demo"
"""Name under which the demo model is served."""
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_PAGE = re.compile(
    r"(?:https?://|hf://)?(?:(?:www\.)?huggingface\.co/|hf\.co/|(?<=hf://))"
    r"([^/\s]+/[^/\s]+?)(?:/(?:tree|blob)/main/?|/)?"
)
"""Address of a repository's page, as people copy it."""
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
"""Pattern of the name of a file that is one part of several: (name, number, number of parts)."""
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4\w*|BF16|FP?16|FP?32))$", re.IGNORECASE
)


def locate(model: str | None, *, revision: str | None = None) -> tuple[Path, str]:
    """(folder or GGUF file, name under which it is served) of a checkpoint.

    `model`: a path, a hub id `owner/name`, `owner/name:` with a quantisation or the name of a GGUF
    file, or None for the demo model. The checkpoint of a hub id is downloaded at `revision` to the
    local hub cache. `LoadError` if there is no such checkpoint.
    """
    if model is None or model == SHIPPED_NAME:
        return SHIPPED_FOLDER, SHIPPED_NAME
    model = _without_address(model)
    folder = _expanded(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            found = sorted(file.name for file in folder.glob("*.gguf"))
            hint = f"; give the path of one GGUF file in it: {', '.join(found)}" if found else ""
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


def cached_checkpoints() -> list[CachedCheckpoint]:
    """The checkpoints in the local hub cache that have a `config.json`, sorted by hub id, after
    those whose folders cannot be read."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, ValueError):  # there is no such folder, or it is a file
        return []
    found = []
    for problem in map(str, cache.warnings):  # its folders are not as the hub's library makes them
        folder = re.search(r"models--([^/\\]+)", problem)
        name = folder[1].replace("--", "/") if folder else "?"
        found.append(CachedCheckpoint(name, "", 0, problem))
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        for revision in repo.revisions:
            config = revision.snapshot_path / "config.json"
            if repo.repo_type == "model" and config.is_file():
                found.append(_cached(repo.repo_id, config, revision.size_on_disk))
                break
    return found


def _cached(name: str, config: Path, num_bytes: int) -> CachedCheckpoint:
    """What a repository holds. Anybody may have written it, so what is wrong with it is told."""
    try:
        with reading("config.json"):
            names = load_json(config).get("architectures") or ["unknown"]
    except LoadError as error:
        return CachedCheckpoint(name, "", num_bytes, str(error))
    if not isinstance(names, list) or not isinstance(names[0], str):
        found = f"architectures must be a list of names, not {names!r:.80}"
        return CachedCheckpoint(name, "", num_bytes, f"{config}: {found}")
    return CachedCheckpoint(name, names[0], num_bytes)


def select_gguf(files: Sequence[str], wanted: str, where: str) -> list[str]:
    """The file, or the parts of the file in their order, that `wanted` names among GGUF files.

    `wanted`: a quantisation such as Q4_K_M, or a file's name. `LoadError` lists what there is if no
    file or several are meant; `where` is the repository's name in it.
    """
    models = _gguf_models(files)
    if not models:
        raise LoadError(f"{where} holds no GGUF files, so {wanted!r:.80} cannot be taken from it")
    if wanted.lower().endswith(".gguf"):
        found = [
            name
            for name, parts in models.items()
            if wanted in parts or wanted in (PurePosixPath(part).name for part in parts)
        ]
    else:
        found = [name for name in models if _quantisation(name).lower() == wanted.lower()]
    if not found:
        raise LoadError(f"{where} has no {wanted!r:.80}; there are: {_listed(_known(models))}")
    if len(found) > 1:
        names = [models[name][0] for name in found]
        raise LoadError(
            f"{where} has {len(found)} files of {wanted!r:.80}; name one: {_listed(names)}"
        )
    parts = models[found[0]]
    split = SPLIT_NAME.fullmatch(parts[0])
    if split and len(parts) != int(split[3]):
        raise LoadError(f"{where} has only {len(parts)} of the {int(split[3])} parts of {parts[0]}")
    return parts


def _gguf_models(files: Sequence[str]) -> dict[str, list[str]]:
    """Names of models, without suffix and part, each with its GGUF files in their order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        is_projector = PurePosixPath(file).name.lower().startswith("mmproj")
        if file.lower().endswith(".gguf") and not is_projector:
            split = SPLIT_NAME.fullmatch(file)
            models.setdefault(split[1] if split else file[:-5], []).append(file)
    return models


def _known(models: dict[str, list[str]]) -> list[str]:
    """What names one of the models: quantisations, or names of files without one."""
    return sorted({_quantisation(name) or files[0] for name, files in models.items()})


def _quantisation(name: str) -> str:
    """The quantisation at the end of a file's name without its suffix; empty if there is none."""
    match = _QUANTISATION.search(PurePosixPath(name).name)
    return match[1] if match else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return ", ".join(f"{name:.200}" for name in names[:40]) + more


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
        known = _known(_gguf_models(_files_of(hub_id, revision)))
    if known:
        raise LoadError(
            f"{what} holds GGUF files; name one of them, as {hub_id}:{known[0]}"
            f" (there are: {_listed(known)})"
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
