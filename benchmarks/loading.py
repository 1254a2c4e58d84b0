"""The time and the memory that loading takes: `python benchmarks/loading.py [SHAPE] [FOLDER]`.

It writes a checkpoint of a real shape with random weights if FOLDER has none. Then it alternates
two things, three times each and each in a new process: reading the files' bytes from the page
cache, and loading them into a model. It prints the medians, their limits and the peak memory of
loading.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

READ = """
import sys, time
from pathlib import Path
buffer = bytearray(1 << 24)
started = time.perf_counter()
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with open(file, "rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
print(time.perf_counter() - started)
"""
LOAD = """
import sys, time
import torch
from infer.models.model import build_model
from infer.models.registry import read_model_config
from infer.models.weights import open_checkpoint
from pathlib import Path
def high_water():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
before = high_water()
started = time.perf_counter()
folder = Path(sys.argv[1])
config = read_model_config(folder)
model = build_model(config, open_checkpoint(folder, torch.bfloat16, torch.device("cpu")), 4096)
seconds = time.perf_counter() - started
print(seconds, before, high_water())
"""


def run(code: str, folder: Path) -> list[float]:
    """Runs a program on a folder; returns the numbers that it prints."""
    command = [sys.executable, "-c", code, str(folder)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    return [float(word) for word in result.stdout.split()]


def main() -> None:
    """Measure and print."""
    from shapes import SHAPES, write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("folder", nargs="?", type=Path, help="default: /tmp/infer-shapes/SHAPE")
    options = parser.parse_args()
    shape = options.shape
    folder = options.folder or Path("/tmp/infer-shapes") / shape
    write(folder, shape)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    run(READ, folder)
    reads, loads = [], []
    for _ in range(3):
        reads.append(run(READ, folder)[0])
        loads.append(run(LOAD, folder))
    read, load = statistics.median(reads), statistics.median(each[0] for each in loads)
    peak = max(each[2] for each in loads)
    print(f"{shape}: {size / 1e9:.2f} GB in {len(list(folder.glob('*.safetensors')))} files")
    print(f"reading the bytes {read:.2f} s, loading {load:.2f} s (limit {1.3 * read + 3:.2f} s)")
    print(
        f"peak memory {peak / 1e9:.2f} GB, of it {loads[0][1] / 1e9:.2f} GB before loading"
        f" (limit {1.15 * size / 1e9 + 1:.2f} GB)"
    )


if __name__ == "__main__":
    main()
