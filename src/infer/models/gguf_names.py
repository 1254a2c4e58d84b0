"""Names of GGUF files: parts of one file, quantisations, and which file of several is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from infer.errors import LoadError

SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
"""Pattern of the name of a file that is one part of several: (name, number, number of parts)."""
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4\w*|BF16|FP?16|FP?32))$", re.IGNORECASE
)


def select_gguf(files: Sequence[str], wanted: str, where: str) -> list[str]:
    """The file, or the parts of the file in their order, that `wanted` names among GGUF files.

    `wanted`: a quantisation such as Q4_K_M, or a file's name. `LoadError` lists what there is if no
    file or several are meant; `where` is the repository's name in it.
    """
    models = gguf_models(files)
    if not models:
        raise LoadError(f"{where} holds no GGUF files, so {wanted!r:.80} cannot be taken from it")
    if wanted.lower().endswith(".gguf"):
        matching = [
            name
            for name, parts in models.items()
            if wanted in parts or wanted in (PurePosixPath(part).name for part in parts)
        ]
    else:
        matching = [name for name in models if _quantisation(name).lower() == wanted.lower()]
    if not matching:
        raise LoadError(f"{where} has no {wanted!r:.80}; there are: {listed(names_of(models))}")
    if len(matching) > 1:
        names = [models[name][0] for name in matching]
        raise LoadError(
            f"{where} has {len(matching)} files of {wanted!r:.80}; name one: {listed(names)}"
        )
    parts = models[matching[0]]
    split = SPLIT_NAME.fullmatch(parts[0])
    if split and len(parts) != int(split[3]):
        raise LoadError(f"{where} has only {len(parts)} of the {int(split[3])} parts of {parts[0]}")
    return parts


def gguf_models(files: Sequence[str]) -> dict[str, list[str]]:
    """Names of models, without suffix and part, each with its GGUF files in their order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        is_projector = PurePosixPath(file).name.lower().startswith("mmproj")
        if file.lower().endswith(".gguf") and not is_projector:
            split = SPLIT_NAME.fullmatch(file)
            models.setdefault(split[1] if split else file[:-5], []).append(file)
    return models


def names_of(models: dict[str, list[str]]) -> list[str]:
    """What names one of the models: quantisations, or names of files without one."""
    return sorted({_quantisation(name) or files[0] for name, files in models.items()})


def _quantisation(name: str) -> str:
    """The quantisation at the end of a file's name without its suffix; empty if there is none."""
    match = _QUANTISATION.search(PurePosixPath(name).name)
    return match[1] if match else ""


def listed(names: Sequence[str]) -> str:
    """The first 40 names, each cut to 200 characters, and the number of the others."""
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return ", ".join(f"{name:.200}" for name in names[:40]) + more
