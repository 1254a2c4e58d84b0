"""Hostile clients at the address of a cluster: `pytest -m cluster` in the environment with Ray.

They are those of the scorecard: bodies that are refused, connections that are cut, readers that do
not read, a key that floods, and routes without a key. What is no HTTP at all is answered by Ray's
proxy; here it must only leave the others alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import infer
from infer.server.tenancy.limits import OPEN_PATHS
from tests.reliability.test_hostile_inputs import Row, check_error, table
from tests.reliability.test_leaving_clients import read_slowly
from tests.support.frozen_heap import frozen_heap
from tests.support.json_client import call
from tests.support.ray_cluster import FRONT, RayCluster, ray_cluster
from tests.support.server_process import Findings, bodies, cut, follow, percentile
from tests.support.tenants import make

pytest.importorskip("ray", reason="pip install -e '.[cluster]'")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # Ray and what it brings have warnings of their own
]
PORT = 8125
VOCAB_SIZE = json.loads(
    (Path(infer.__file__).parent / "demo_model/config.json").read_text(encoding="utf-8")
)["vocab_size"]


@contextmanager
def cluster_of_two(log: Path, **settings: str) -> Iterator[RayCluster]:
    """A cluster with two engines and one front, once both engines are idle."""
    arguments = {"replicas": "2", "max_seq_len": "512", "insecure": "true", **settings}
    state = {"XDG_STATE_HOME": str(log.parent)}
    with ray_cluster(log, arguments, port=PORT, cores=(1, 1), environment=state) as cluster:
        yield cluster


async def engine_stats() -> dict[str, int]:
    """The sums over the engines, which say once a second what they have."""
    stats: dict[str, int] = (await asyncio.to_thread(call, PORT, "/stats"))[1]["engine"]
    return stats


async def until_idle(within_s: float) -> float:
    """Seconds until no request is left in any engine and each has its pages back."""
    began_s = time.monotonic()
    await asyncio.sleep(1.2)  # what engines have said before is no proof
    while True:
        now = await engine_stats()
        busy = {name: now[f"num_{name}"] for name in ("running", "waiting", "preempted", "open")}
        if not any(busy.values()) and now["num_free_pages"] == now["num_pages"]:
            return time.monotonic() - began_s
        assert time.monotonic() - began_s < within_s, busy
        await asyncio.sleep(0.1)


async def ask(row: Row) -> float:
    """Send a row; its answer is the one that `infer serve` gives. Returns the seconds."""
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    try:
        async with asyncio.timeout(30):
            writer.write(row.request)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if line)
            body = b""
            if "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
            else:
                while size := int(await reader.readline(), 16):
                    body += await reader.readexactly(size)
                    await reader.readexactly(2)
            took_s = time.perf_counter() - began_s
    finally:
        writer.transport.abort()
    status = int(lines[0].split()[1])
    assert status == row.status, (row.name, status, body[:300])
    if status != 200:
        assert "json" in headers["content-type"], (row.name, status, headers, body[:300])
        check_error(status, headers, body)
    return took_s


def is_whole(row: Row) -> bool:
    """Whether a row is one POST with the usual headers, which Ray's proxy hands on."""
    head, _, body = row.request.partition(b"\r\n\r\n")
    lines = head.splitlines()
    is_usual = len(lines) == 4 and lines[3] == b"content-length: %d" % len(body)
    return is_usual and lines[0].startswith(b"POST /v1/") and row.num_answers == 1 and not row.more


async def send_rubbish(row: Row) -> None:
    """Send what is no request, and leave after a moment, whatever is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    try:
        async with asyncio.timeout(2):
            writer.write(row.request)
            await reader.read(1000)
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


async def refuse_all() -> dict[str, Any]:
    """Every row of the scorecard's list of hostile inputs."""
    rows = [row for row in table(VOCAB_SIZE) if not row.waits]
    are_requests = [*map(is_whole, rows)]
    await until_idle(10)
    before = (await engine_stats())["num_steps"]
    took_ms = {
        row.name: 1000 * await ask(row)
        for row, is_request in zip(rows, are_requests, strict=True)
        if is_request and row.status != 200
    }
    await asyncio.sleep(1.2)
    assert (await engine_stats())["num_steps"] == before
    rubbish = [row for row, is_request in zip(rows, are_requests, strict=True) if not is_request]
    wanted = bodies(8, 120)
    calm = await asyncio.gather(*[follow(PORT, body) for body in wanted])
    among = asyncio.gather(*[follow(PORT, body) for body in wanted])
    for start in range(0, len(rubbish), 10):
        await asyncio.gather(*map(send_rubbish, rubbish[start : start + 10]))
    assert [each.answer for each in await among] == [each.answer for each in calm]
    assert (await asyncio.to_thread(call, PORT, "/health/ready"))[0] == 200
    slowest = sorted(took_ms, key=took_ms.__getitem__)[-3:]
    return {
        "rows, each with the answer of infer serve": len(took_ms),
        "slowest [ms]": {name: round(took_ms[name], 1) for name in slowest},
        "no requests of this server (bytes, methods, headers), with streams beside": len(rubbish),
    }


async def storm(streams: int, waves: int) -> dict[str, Any]:
    """Streams of which nine of ten are reset within 50 ms; the others have their answers."""
    wanted = bodies(streams // 10, 120)
    calm = await asyncio.gather(*[follow(PORT, body) for body in wanted])
    assert all(heard.is_done for heard in calm)
    dice = random.Random(3)
    back_s = []
    for _ in range(waves):
        cleanup = [
            cut(PORT, {**dice.choice(wanted), "max_tokens": 400}, dice.uniform(0, 0.05))
            for _ in range(streams - len(wanted))
        ]
        staying = [follow(PORT, body) for body in wanted]
        results = await asyncio.gather(*staying, *cleanup)
        for heard, expected in zip(results, calm, strict=False):
            assert heard is not None
            assert heard.answer == expected.answer
        back_s.append(await until_idle(10))
    return {
        "cut": waves * (streams - len(wanted)),
        "survivors, all exact": waves * len(wanted),
        "until no engine had a request, longest [s]": round(max(back_s), 1),
    }


def resident_mib(cluster: RayCluster) -> float:
    """Resident memory of the front."""
    [pid] = cluster.pids(FRONT)
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


async def slow_readers(cluster: RayCluster, slow: int, normal: int) -> dict[str, Any]:
    """Readers of 10 bytes a second beside others."""
    heavy = {
        **{"prompt": "Once upon a time", "max_tokens": 480, "stream": True, "logprobs": 20},
        **{"ignore_eos": True, "temperature": 0},
    }
    light = {**heavy, "logprobs": None}
    calm = await asyncio.gather(
        *[follow(PORT, light) for _ in range(normal)], *[follow(PORT, heavy) for _ in range(slow)]
    )
    before, over = resident_mib(cluster), asyncio.Event()
    readers = [asyncio.create_task(read_slowly(PORT, heavy, 10, over)) for _ in range(slow)]
    among = await asyncio.gather(*[follow(PORT, light) for _ in range(normal)])
    assert all(heard.answer == calm[0].answer for heard in among)
    after = resident_mib(cluster)
    over.set()
    await asyncio.gather(*readers)
    await until_idle(30)
    gaps = [percentile([g for h in part for g in h.gaps_s], 99) for part in (calm[:normal], among)]
    return {
        "slow, normal": (slow, normal),
        "normal ones, p99 between tokens, all read / some do not [ms]": tuple(
            round(1000 * gap, 1) for gap in gaps
        ),
        "more memory in the front [MiB]": round(after - before, 1),
    }


def test_hostile_clients_at_the_clusters_address(tmp_path: Path) -> None:
    async def main(cluster: RayCluster) -> list[dict[str, Any]]:
        return [await refuse_all(), await storm(200, 5), await slow_readers(cluster, 30, 20)]

    log = tmp_path / "log"
    with (
        cluster_of_two(log, max_waiting_requests="600", write_stall_s="10") as cluster,
        frozen_heap(),
    ):
        found = asyncio.run(main(cluster))
    print(found)
    for name, counted in zip(("bad requests", "storm", "slow readers"), found, strict=True):
        load = "two engines and a front on Ray, shipped model, over Ray's proxy"
        Findings().note("C4", name, load, **counted)
    before, after = found[2]["normal ones, p99 between tokens, all read / some do not [ms]"]
    assert after <= 1.5 * before
    assert found[2]["more memory in the front [MiB]"] < 100


def test_keys_at_the_clusters_address(tmp_path: Path) -> None:
    """Each route without a key and with wrong ones, and a key that floods beside a quiet one."""
    file, num_flood, num_tokens = tmp_path / "keys.json", 64, 64
    admin = make(file, "admin", admin=True)
    noisy = make(file, "noisy", max_concurrent=num_flood, max_queued=num_flood)
    quiet = make(file, "quiet")
    wrong = [{}, {"authorization": "Bearer no"}, {"x-api-key": "no"}]
    common = {"model": "infer-demo", "ignore_eos": True, "temperature": 0}

    async def first_token_ms(number: int) -> float:
        body = {**common, "prompt": f"{number} foxes", "max_tokens": 2}
        status, answer = await asyncio.to_thread(call, PORT, "/v1/completions", body, headers=quiet)
        assert status == 200
        trace = await asyncio.to_thread(call, PORT, f"/v1/requests/{answer['id']}", headers=quiet)
        return float(trace[1]["first_token_ms"])

    async def neighbours() -> tuple[list[float], list[float], list[float]]:
        """Milliseconds: the quiet key's first tokens alone and beside the flood; its answers."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(num_flood + 4))
        over, took_ms = asyncio.Event(), list[float]()

        async def flood(number: int) -> None:
            while not over.is_set():
                body = {**common, "prompt": f"{number} owls", "max_tokens": num_tokens}
                began_s = time.monotonic()
                status, _ = await asyncio.to_thread(
                    call, PORT, "/v1/completions", body, headers=noisy
                )
                assert status == 200
                took_ms.append(1000 * (time.monotonic() - began_s))

        alone = [await first_token_ms(number) for number in range(15)]
        flooding = [asyncio.create_task(flood(number)) for number in range(num_flood)]
        await asyncio.sleep(3)
        beside = [await first_token_ms(100 + number) for number in range(15)]
        over.set()
        await asyncio.gather(*flooding)
        return alone, beside, took_ms

    log = tmp_path / "log"
    with cluster_of_two(log, api_keys=str(file), max_batch_size="8"):
        paths = call(PORT, "/openapi.json", headers=admin)[1]["paths"]
        refused = 0
        for path, methods in paths.items():
            for method in methods:
                sample = path.replace("{name}", "x").replace("{id}", "x")
                for headers in wrong:
                    body: Any = {} if method == "post" else None
                    status, said = call(PORT, sample, body, headers=headers, method=method.upper())
                    assert (status == 401) is (path not in OPEN_PATHS), (method, path, status)
                    if status == 401:
                        error = said["error"]  # Anthropic's have no code
                        known = ("invalid_api_key", "authentication_error")
                        assert error.get("code", error["type"]) in known, said
                        refused += 1
        assert refused > 50
        asked = {**common, "prompt": "a", "max_tokens": 1}
        name = call(PORT, "/v1/completions", asked, headers=noisy)[1]["id"]
        assert call(PORT, f"/v1/requests/{name}", headers=quiet)[0] == 404
        assert call(PORT, f"/v1/requests/{name}", headers=admin)[0] == 200
        assert call(PORT, "/stats", headers=quiet)[0] == 403
        alone, beside, took_ms = asyncio.run(neighbours())
    print(refused, alone, beside, took_ms)
    Findings().note(
        "C4",
        "keys",
        f"two engines of 8 seats and a front on Ray; {num_flood} requests of one key always open",
        **{
            "refused without a right key": refused,
            "first token of the quiet key, alone, p50 and longest [ms]": (
                round(statistics.median(alone), 1),
                round(max(alone), 1),
            ),
            "beside the flood [ms]": (round(statistics.median(beside), 1), round(max(beside), 1)),
            "answers of the flood": len(took_ms),
            "until one of them had come, p50 [ms]": round(statistics.median(took_ms), 1),
        },
    )
    # It waits for the next seat, not for all that the flood has queued, which is four rounds.
    assert statistics.median(beside) < 0.4 * statistics.median(took_ms)
