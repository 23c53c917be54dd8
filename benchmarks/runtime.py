"""What answering tiles costs on top of the forward pass: `python -m benchmarks.runtime`, or `make bench`.

Every path runs the same model on the same tiles in batches of 64, in turn, several times; the ratios compare medians
of one run. Client and service share this machine's cores, so the HTTP figures count both ends.
"""

import asyncio
import base64
import io
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from benchmarks import scheduler as scheduler_costs
from benchmarks._bench import OUT, machine, print_table, write_json
from inference import Checkpoint, HttpClient, InProcessClient, PreparedSample, load_model_spec, resolve_model
from inference.contract import parse_request
from inference.models.conversion import export_tile_model
from inference.models.registry import model_cache
from inference.models.sample import Mode
from inference.models.server_model import BaseServerModel, load_server_model

BATCH, CALLERS, REPEATS = 64, 256, 3
MODE: Mode = "embedding"
MODELS = {"small": ("demo", 1024), "vit_s": ("lunit-vits16", 256)}
START_S = 180.0
PATIENCE_S = 900.0
"""Longer than 256 callers wait for their turn on a slow machine: a deadline is not what is measured."""

Paths = dict[str, Callable[[], None]]


def main() -> None:
    about = machine("torch", "numpy", "fastapi", "uvicorn", "httpx")
    costs = scheduler_costs.measure()
    numbers: dict[str, object] = {"overhead_us_per_item": costs["one_submitter_us"], "scheduler": costs}
    for label, (name, tiles) in MODELS.items():
        found = measure(_checkpoint(name), tiles)
        rows = [(key, value, _target(label, key)) for key, value in found.items() if not isinstance(value, dict)]
        rows += [(f"JSON: {step}, µs per tile", value, "") for step, value in found["json_us"].items()]  # type: ignore[attr-defined]
        print_table(f"{name}: {tiles} tiles, {CALLERS} callers, median of {REPEATS}", rows, about)
        numbers |= found if label == "vit_s" else {label: found}
    rows = [(key, value, "below 60" if key == "one_submitter_us" else "") for key, value in costs.items()]
    print_table("scheduler alone", rows, about)
    print("written to", write_json("runtime", {**numbers, "machine": about}))


def measure(checkpoint: Checkpoint, tiles: int) -> dict[str, object]:
    """Tiles per second of each path, their ratios to the bare forward, and what one JSON request consists of."""
    model = load_server_model(checkpoint)
    bodies = [_body(model, number) for number in range(tiles)]
    samples = [model.prepare_sample(parse_request(body)) for body in bodies]
    with InProcessClient(model, BATCH) as client, _service(checkpoint) as url:
        remote = HttpClient(url, model.model_name, max_concurrent=CALLERS, timeout_s=PATIENCE_S)
        try:
            seconds = _in_turn(_paths(model, client, remote, samples, bodies))
        finally:
            remote.close()
    rates = {name: tiles / statistics.median(taken) for name, taken in seconds.items()}
    bare = rates["bare"]
    return {
        **{f"{name}_tiles_per_s": rate for name, rate in rates.items()},
        "scheduler_vs_bare": rates["scheduler"] / bare,
        "json_vs_bare": rates["json"] / bare,
        "http_vs_bare": rates["http"] / bare,
        "http_binary_vs_bare": rates["http_binary"] / bare,
        "json_us": _json_steps(model, bodies[0]),
    }


def _paths(
    model: BaseServerModel,
    client: InProcessClient,
    remote: HttpClient,
    samples: Sequence[PreparedSample],
    bodies: Sequence[str],
) -> Paths:
    parts = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]

    def bare() -> None:
        for part in parts:
            model.forward_tiles(part, [MODE] * len(part))

    def scheduled() -> None:
        with ThreadPoolExecutor(CALLERS) as callers:
            list(callers.map(lambda sample: client.submit(sample, MODE).result(), samples))

    def concurrently(ask: Callable[[str], object]) -> None:
        async def everyone() -> None:
            turns = asyncio.Semaphore(CALLERS)

            async def one(body: str) -> None:
                async with turns:
                    await ask(body)  # type: ignore[misc]  # an asynchronous method of a client

            await asyncio.gather(*map(one, bodies))

        asyncio.run(everyone())

    tiles = [np.stack([sample.tile for sample in part]).transpose(0, 2, 3, 1) for part in parts]
    halves = [half for part in tiles for half in np.array_split(part, 2)]  # a whole batch is longer than a body may be

    def binary() -> None:
        with ThreadPoolExecutor(2) as callers:
            list(callers.map(lambda half: remote.run_tiles(half, MODE), halves))

    return {
        "bare": bare,
        "scheduler": scheduled,
        "json": lambda: concurrently(client.embed_async),
        "http": lambda: concurrently(remote.embed_async),
        "http_binary": binary,
    }


def _in_turn(paths: Paths) -> dict[str, list[float]]:
    """Seconds of each path, one after the other and again, so that other load meets all of them; the first is lost."""
    taken: dict[str, list[float]] = {name: [] for name in paths}
    for repeat in range(1 + REPEATS):
        for name, run in paths.items():
            started_at = time.perf_counter()
            run()
            if repeat:
                taken[name].append(time.perf_counter() - started_at)
    return taken


def _json_steps(model: BaseServerModel, body: str) -> dict[str, float]:
    """Microseconds of each step of one JSON request, but for the forward."""
    request = parse_request(body)
    (output,) = model.forward_tiles([model.prepare_sample(request)], [MODE])
    assert not isinstance(output, Exception)
    answer = model.respond(request, output, MODE)
    steps: dict[str, Callable[[], object]] = {
        "parse": lambda: parse_request(body),
        "decode image": lambda: request.image,
        "decode and prepare": lambda: model.prepare_sample(request),
        "respond": lambda: model.respond(request, output, MODE),
        "write": answer.to_json,
        "encode a PNG, at the caller": lambda: _png(np.asarray(request.image)),
    }
    return {name: _microseconds(step) for name, step in steps.items()}


def _microseconds(step: Callable[[], object], times: int = 50) -> float:
    def once() -> float:
        started_at = time.perf_counter()
        step()
        return time.perf_counter() - started_at

    return statistics.median(once() for _ in range(times)) * 1e6


def _checkpoint(name: str) -> Checkpoint:
    """The demo as it is; a network that needs weights with random ones, since speed does not depend on them."""
    if name == "demo":
        return resolve_model(name)
    made = export_tile_model(load_model_spec(name), model_cache(), random_init=True)
    return Checkpoint(made.path, made.manifest)


@contextmanager
def _service(checkpoint: Checkpoint) -> Iterator[str]:
    """The service as its users start it, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "inference.cli", "serve", "--model", str(checkpoint.path), "--port", str(port)]
    command += ["--deadline", str(PATIENCE_S)]
    log = OUT / "service.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as process:  # noqa: S603
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ping").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the service did not start: see {log}")


def _body(model: BaseServerModel, number: int) -> str:
    """A request whose tile compresses as stained tissue does: noise on a slow gradient."""
    side = model.model_spec.tile_spec.size
    dice = np.random.default_rng(number)
    slow = np.linspace(120, 220, side)[:, None, None] + dice.normal(0, 12, (side, side, 3))
    pixels = slow.clip(0, 255).astype(np.uint8)
    fields = {
        "image_data": base64.b64encode(_png(pixels)).decode(), "slide_name": "bench", "x": 0, "y": 0,
        "width": side, "height": side, "patch_idx": number,
    }  # fmt: skip
    return json.dumps(fields)


def _png(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, format="PNG")
    return data.getvalue()


def _target(label: str, key: str) -> str:
    return "at least 0.95" if (label, key) == ("vit_s", "scheduler_vs_bare") else ""


if __name__ == "__main__":
    main()
