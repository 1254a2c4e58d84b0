"""Our engine and its peers on one checkpoint, in turns, in one run: see README.md beside this file.

`python run.py --model PATH --engines ours:bfloat16,openvino:fp16 --json FILE` starts a worker for
each engine. Each round measures the memory bandwidth, then each load and the prefill of one long
prompt with each engine; the order of the engines changes from round to round. Only the worker that
is measured runs, and the others are stopped by SIGSTOP. If memory does not hold all workers, each
round starts them one after the other. Ratios are medians of the rounds' ratios, because whatever
slows the machine for a minute slows both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
IN_OUR_ENVIRONMENT = ("ours", "hf")
CAPS = {
    "": {},
    "avx2": {
        "INFER_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
"""Variables that keep an engine to an instruction set, by what follows its variant's @."""
BANDWIDTH = """
import torch
from infer.bench.machine import read_rates
torch.set_num_threads(2)
print(read_rates()["best"])
"""
Job = dict[str, int]


class Worker:
    """An engine in a process group of its own, which is stopped except while it answers."""

    def __init__(self, engine: str, model: Path, peers: Path, log: Path) -> None:
        name, _, variant = engine.partition(":")
        variant, _, cap = variant.partition("@")
        python = Path(sys.executable) if name in IN_OUR_ENVIRONMENT else peers / name / "bin/python"
        script = HERE / f"worker_{name}.py"
        if not script.is_file():
            raise SystemExit(f"no engine {name!r}")
        if cap not in CAPS:
            raise SystemExit(f"{engine!r}: after @ comes one of {', '.join(filter(None, CAPS))}")
        if not python.is_file():
            raise SystemExit(f"{python} is missing; run: sh {HERE / 'setup.sh'} {name}")
        self.engine, self.log = engine, log
        with log.open("a", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [python, script, model.resolve(), variant],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env=os.environ | CAPS[cap],
                encoding="utf-8",
            )
        self.ready = self._read()
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine} ended; its messages are in {self.log}")
        return json.loads(line)

    def run(self, job: Job) -> float:
        """The seconds of one job."""
        return float(self.ask(job)["seconds"])

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to one job of the protocol in worker.py."""
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process and those that it has started."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()


def available_gib() -> float:
    """The memory that a new process can have, in GiB."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("no MemAvailable in /proc/meminfo")


class Bench:
    """The workers, and what was measured of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.engines: list[str] = options.engines.split(",")
        self.cases: dict[str, Job] = {
            str(n): {
                "num_requests": n,
                "input_len": options.input_len,
                "output_len": options.output_len,
            }
            for n in options.loads
        }
        if options.prefill:
            self.cases["prefill"] = {
                "num_requests": 1,
                "input_len": options.prefill,
                "output_len": 1,
            }
        self.workers: dict[str, Worker] = {}
        self.in_turn = False
        self.rounds: list[dict[str, Any]] = []
        if options.json.is_file():
            former = json.loads(options.json.read_text(encoding="utf-8"))
            names = ("model", "cases", "engines", "cpu")
            if any(former[name] != self.document()[name] for name in names):
                raise SystemExit(f"{options.json} holds another comparison; name another file")
            self.rounds, self.in_turn = former["rounds"], former["in_turn"]

    def _worker(self, engine: str) -> Worker:
        """The engine's worker, started and warm."""
        if engine not in self.workers:
            while self.workers and available_gib() < self.options.headroom_gib:
                self.in_turn = True
                self.workers.pop(next(iter(self.workers))).close()
            log = self.options.json.with_suffix(f".{engine.replace(':', '-')}.log")
            worker = Worker(engine, self.options.model, self.options.peers, log)
            self.workers[engine] = worker
            print(f"  {engine} loaded in {worker.ready['load_seconds']:.1f} s", flush=True)
            for job in self.cases.values() if worker.ready["needs_warmup"] else ():
                worker.run(job | {"output_len": min(4, job["output_len"]), "seed": 0})
        return self.workers[engine]

    def run(self) -> None:
        """Runs the missing rounds; the file is written after each of them."""
        for engine in self.engines:
            self._worker(engine)
        for number in range(len(self.rounds) + 1, self.options.rounds + 1):
            found: dict[str, Any] = {"started": time.time(), "bandwidth_gb_s": bandwidth()}
            print(f"round {number}: {found['bandwidth_gb_s']:.1f} GB/s", flush=True)
            shift = (number - 1) % len(self.engines)
            order = self.engines[shift:] + self.engines[:shift]
            pairs = [(engine, case) for case in self.cases for engine in order]
            if self.in_turn:  # starting a worker is slow: all its cases at once
                pairs = [(engine, case) for engine in order for case in self.cases]
            seconds: dict[str, dict[str, float]] = {case: {} for case in self.cases}
            for engine, case in pairs:
                worker = self._worker(engine)
                seconds[case][engine] = worker.run(self.cases[case] | {"seed": number})
                print(f"  {case:>8} {engine:20} {seconds[case][engine]:8.3f} s", flush=True)
            self.rounds.append(found | {"order": order, "seconds": seconds})
            self.options.json.write_text(json.dumps(self.document(), indent=1), encoding="utf-8")

    def document(self) -> dict[str, Any]:
        """Everything that was measured, and the machine."""
        return {
            "model": self.options.model.name,
            "cases": self.cases,
            "engines": self.engines,
            "in_turn": self.in_turn,
            "cpu": cpu_name(),
            "rounds": self.rounds,
        }

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            worker.close()


def bandwidth() -> float:
    """The GB/s at which two threads read memory, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", BANDWIDTH],
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    return float(done.stdout)


def cpu_name() -> str:
    """The name that the kernel gives the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def tables(document: dict[str, Any]) -> str:
    """Tables: median tok/s (prefill: of prompts), and the first engine's ratio to the others."""
    cases, engines, rounds = document["cases"], document["engines"], document["rounds"]
    read = [r["bandwidth_gb_s"] for r in rounds]
    measured = f"{len(rounds)} rounds, {min(read):.1f}–{max(read):.1f}"
    if len(rounds) == 1:
        measured = f"1 round, {read[0]:.1f}"
    lines = [f"{document['model']}, {document['cpu']}, {measured} GB/s; tok/s", ""]

    def table(title: str, cell: Any, names: list[str]) -> None:
        lines.append(f"| {title} | " + " | ".join(cases) + " |")
        lines.append("|---" * (len(cases) + 1) + "|")
        for name in names:
            cells = [cell([r["seconds"][case] for r in rounds], name, case) for case in cases]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")

    def rate(seconds: list[dict[str, float]], name: str, case: str) -> str:
        job = cases[case]
        tokens = job["input_len"] if case == "prefill" else job["num_requests"] * job["output_len"]
        return f"{statistics.median(tokens / s[name] for s in seconds):.1f}"

    def ratio(seconds: list[dict[str, float]], name: str, case: str) -> str:
        ratios = [s[name] / s[engines[0]] for s in seconds]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"

    table("engine", rate, engines)
    if len(engines) > 1:
        table(f"{engines[0]} / …", ratio, engines[1:])
    return "\n".join(lines)


def main() -> None:
    """Measure and print; with --show, print a stored run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", type=Path, help="print the tables of a stored run and stop")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--engines", help="NAME:VARIANT[@avx2],…; ratios are those of the first")
    parser.add_argument(
        "--loads", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8, 32]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=1024, help="prompt tokens; 0 = leave it out")
    parser.add_argument("--headroom-gib", type=float, default=8.0, help="free before a start")
    parser.add_argument("--json", type=Path, default=Path("peers.json"))
    default = os.environ.get("INFER_PEERS", str(Path.home() / ".cache/infer-peers"))
    parser.add_argument("--peers", type=Path, default=Path(default), help="where setup.sh put them")
    options = parser.parse_args()
    if options.show:
        print(tables(json.loads(options.show.read_text(encoding="utf-8"))))
        return
    if options.model is None or options.engines is None:
        parser.error("--model and --engines are needed")
    bench = Bench(options)
    try:
        bench.run()
    finally:
        bench.close()
    print("\n" + tables(bench.document()))


if __name__ == "__main__":
    main()
