"""`infer pull`, `infer list` and `infer rm`: the checkpoints in the local hub cache

The hub's own library downloads, with its progress bars, and removes what no other checkpoint has.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from infer.cli.plain import plain, visible
from infer.errors import InferError
from infer.models.hub import cached_checkpoints, locate, remove_cached
from infer.models.registry import ARCHITECTURES


def run_pull(model: str, revision: str | None) -> None:
    """Download a checkpoint of the hub, unless it is there; print where it is."""
    path, name = locate(model, revision=revision)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    Console(stderr=True).print(
        plain(f"{name}: {size / 1e9:.2f} GB; serve it with `infer serve {model}`", "dim"),
        highlight=False,
        soft_wrap=True,
    )
    print(visible(str(path)))


def run_list() -> None:
    """Print the checkpoints in the local hub cache."""
    console = Console()
    table = local_checkpoints("")
    if table is None:
        console.print("No checkpoints in the local hub cache; `infer pull OWNER/NAME` gets one.")
    else:
        console.print(table)


def local_checkpoints(title: str) -> Table | None:
    """A table of the checkpoints in the local hub cache; None if there is none."""
    cached = cached_checkpoints()
    if not cached:
        return None
    table = Table("model", "architecture", "size", title=title or None, box=box.SIMPLE)
    for checkpoint in cached:
        is_known = checkpoint.architecture in (*ARCHITECTURES, "GGUF")
        what = checkpoint.architecture + ("" if is_known else " (not supported)")
        what += f", {checkpoint.quantization}" if checkpoint.quantization else ""
        if checkpoint.unreadable:
            what = f"unreadable: {checkpoint.unreadable}"
        table.add_row(plain(checkpoint.name), plain(what), f"{checkpoint.num_bytes / 1e9:.2f} GB")
    return table


def run_rm(names: list[str], *, is_sure: bool) -> None:
    """Remove checkpoints from the local hub cache, after a question unless `is_sure`."""
    known = {checkpoint.name: checkpoint.num_bytes for checkpoint in cached_checkpoints()}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"; do you mean {near[0]}?" if near else "; `infer list` shows what is there"
            where = " is a folder or file of your own, which you remove yourself"
            is_own = Path(name).exists()
            raise InferError(f"{name} is not in the local hub cache{where if is_own else hint}")
    num_bytes = sum(known[name] for name in {*names})
    if not is_sure:
        question = f"remove {', '.join(map(visible, names))} ({num_bytes / 1e9:.2f} GB)?"
        typer.confirm(question, abort=True, err=True)
    freed = remove_cached(names)
    print(f"{freed / 1e9:.2f} GB are free")
