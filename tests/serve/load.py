"""Loads for a server, each from a process of its own, and what comes of them."""

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.models.tiny import awake
from tests.serve.client import form, get, post
from tests.serve.subprocess_server import ROOT, Running
from vitrail.checkpoint.weights import save
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config
from vitrail.predict.predictor import predictor

# What the package ships: 4 million parameters, 64 patches of 4 px and a class token.
SHIPPED = model_config("ViT-Mini/4", classes=10, pool="mean", class_token=False)
SMALL = ViTConfig(width=32, depth=2, mlp_width=64, heads=2, image=(32, 32), patch=(8, 8), classes=10)
PICTURES = 48
TOPK = 5


@dataclass(frozen=True, slots=True)
class Stock:
    """Weights, requests with the answers that the offline predictor gives, and requests that cannot be answered."""

    weights: Path
    good: list[tuple[str, Any]]
    bad: list[tuple[str, Any]]


def stocked(folder: Path, config: ViTConfig) -> Stock:
    weights = folder / "weights.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save(awake(config, torch.float32), weights, labels=[f"class {at}" for at in range(config.classes)])
    offline = predictor(weights, device="cpu")
    good, bad = list[tuple[str, Any]](), list[tuple[str, Any]]()
    for number in range(PICTURES):
        data = photograph(number)
        answers = offline(data, topk=TOPK).top
        path = folder / f"good{number}"
        path.write_bytes(post(f"/predict?topk={TOPK}", *form([(f"{number}.jpg", data)])))
        good.append((str(path), [[answer.index, answer.probability] for answer in answers]))
    sound = photograph(0)
    for number, raw in enumerate(
        (
            post("/predict", *form([("a.jpg", sound[: len(sound) // 2])])),
            post("/predict", *form([("a.jpg", b"no image")])),
            post("/predict", b"text/plain", sound),
            post("/predict", b"application/json", b'{"images": ["%%%"]}'),
            post("/predict?topk=none", *form([("a.jpg", sound)])),
            post("/nowhere", *form([("a.jpg", sound)])),
        )
    ):
        path = folder / f"bad{number}"
        path.write_bytes(raw)
        bad.append((str(path), None))
    (folder / "health").write_bytes(get("/health"))
    return Stock(weights, good, bad)


def photograph(number: int) -> bytes:
    """A smooth image of some size, as JPEG or PNG."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    image = coarse.resize((40 + 3 * number, 32 + 2 * number), Image.Resampling.BICUBIC)
    content = io.BytesIO()
    image.save(content, "PNG" if number % 4 == 0 else "JPEG")
    return content.getvalue()


def plan(requests: list[tuple[str, Any]], **more: Any) -> dict[str, Any]:
    return {"requests": requests, "clients": 1, "seconds": 0.0, "count": 0, **more}


class Load:
    """Clients in a process of their own."""

    def __init__(self, server: Running, folder: Path, asked: dict[str, Any]) -> None:
        name = folder / f"plan{time.monotonic_ns()}.json"
        name.write_text(json.dumps(asked))
        self.server, self.cpu = server, server.cpu
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.client", str(server.port), str(name)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def done(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0
        report: dict[str, Any] = json.loads(out)
        report["server_cpu"] = (self.server.cpu - self.cpu) / report["seconds"]
        report["rate"] = report["statuses"].get("200", 0) / report["seconds"]
        return report


def load(server: Running, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    return Load(server, folder, asked).done()
