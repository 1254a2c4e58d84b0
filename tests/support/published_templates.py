"""Published chat templates, read at test time from packages that contain them.

pip downloads the packages once to the folder `INFER_TEMPLATES`, by default one in the user's cache
folder. The packages are not installed or run; the templates are read from the archives. Versions
are fixed, so that tests do not change without a commit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = {
    "trl": ("trl==1.16.0", "wheel", "trl/chat_templates/"),
    "axolotl": ("axolotl==0.19.0", "wheel", "axolotl/utils/chat_templates/templates/"),
    "llama.cpp": ("llama-cpp-python==0.3.36", "source", "/models/templates/"),
}
"""Packages: name → (requirement for pip, kind of archive, place of the templates in it)."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
LOADED = {
    # Llama
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct": "json",
    "llama.cpp/meta-llama-Llama-3.2-3B-Instruct": "json",
    "llama.cpp/meta-llama-Llama-3.3-70B-Instruct": "json",
    "trl/llama3": "hermes",
    "trl/llama3_1": "json",
    "trl/llama3_2": "json",
    "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "llama.cpp/meetkai-functionary-medium-v3.1": "functionary-v3.1",
    "llama.cpp/meetkai-functionary-medium-v3.2": "functionary-v3.2",
    "llama.cpp/fireworks-ai-llama-3-firefunction-v2": "functools",
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek",
    "trl/deepseek_r1_distill": "deepseek",
    # Mistral
    "axolotl/mistral_v1": "hermes",
    "axolotl/mistral_v2v3": "mistral",
    "axolotl/mistral_v3_tekken": "mistral",
    "axolotl/mistral_v7_tekken": "hermes",
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "llama.cpp/unsloth-mistral-Devstral-Small-2507": "mistral",
    "llama.cpp/unsloth-Apriel-1.5": "apriel",
    "llama.cpp/Bielik-11B-v3.0-Instruct": "hermes",
    # Qwen 2, 2.5 and 3
    "llama.cpp/Qwen-Qwen2.5-7B-Instruct": "hermes",
    "llama.cpp/Qwen-QwQ-32B": "hermes",
    "llama.cpp/Qwen-Qwen3-0.6B": "hermes",
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "trl/qwen2_5": "hermes",
    "trl/qwen3": "hermes",
    "trl/qwen3_instruct_2507": "hermes",
    "axolotl/qwen_25": "hermes",
    "axolotl/qwen3": "hermes",
    # Gemma 3
    "trl/gemma3": "hermes",
    "axolotl/gemma3": "hermes",
    # Nemotron's format; this model's architecture is not supported
    "llama.cpp/NVIDIA-Nemotron-Nano-v2": "nemotron",
}
"""Templates of the supported model families, and the format in which calls are expected."""


@cache
def templates() -> dict[str, str]:
    """All templates by `package/name`, except those for training."""
    found = {}
    for package, (spec, kind, folder) in PACKAGES.items():
        for path, text in _members(_archive(package, spec, kind)):
            if folder in f"/{path}" and path.endswith(".jinja") and "training" not in path:
                found[f"{package}/{Path(path).stem}"] = text
    return found


def _archive(package: str, spec: str, kind: str) -> Path:
    home = Path(os.environ.get("INFER_TEMPLATES", Path.home() / ".cache" / "infer" / "templates"))
    folder = home / f"{package}-{spec.partition('==')[2]}"
    if not any(folder.glob("*.whl")) and not any(folder.glob("*.tar.gz")):
        folder.mkdir(parents=True, exist_ok=True)
        form = "--only-binary" if kind == "wheel" else "--no-binary"
        command = ["-m", "pip", "download", "-q", "--no-deps", form, ":all:", "-d", str(folder)]
        done = subprocess.run(
            [sys.executable, *command, spec],
            capture_output=True,
            text=True,
            timeout=600,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr[-2000:]
    [archive] = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    return archive


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".jinja"):
                    yield name, wheel.read(name).decode()
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and member.name.endswith(".jinja"):
                file = source.extractfile(member)
                assert file is not None
                yield member.name, file.read().decode()
