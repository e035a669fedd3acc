"""Twenty steps of training, bit by bit, against a trainer that is written out here once and not touched again.

The reference knows nothing of vitrail's loop, step, optimiser, schedule, averaging or model code. It starts from the
same weights and the same bytes, seeds dropout by the same rule, and must end with the same bits: on one thread, on any
one processor. A refactoring that moves a single bit fails here, and then the changelog says so under Numerics.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.dataset import ArrayDataset, Labels
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import Squash
from vitrail.distributed.process_group import World
from vitrail.models.vit_config import ViTConfig
from vitrail.optim.config import Optim, Schedule
from vitrail.tasks.classification.objective import Classification
from vitrail.train.assemble import build_fresh_network
from vitrail.train.config import Data, Keep, Run, Scoring
from vitrail.train.data import DataSplits
from vitrail.train.loop import Training
from vitrail.train.observer import NullObserver
from vitrail.train.resolve import resolve
from vitrail.train.resume import open_folder

SEED, STEPS, BATCH, MICRO, CLASSES, COUNT = 11, 20, 12, 6, 5, 40
WIDTH, DEPTH, HEADS, PATCH, SIDE = 16, 2, 2, 4, 8
DROPOUT, SKIP, SMOOTHING = 0.1, 0.2, 0.1
LR, DECAY, CLIP, WARMUP, AVERAGE, LAYER = 3e-3, 0.1, 0.5, 4, 0.9, 0.8

# The order of the first six epochs under this seed: whole numbers, the same on every processor.
ORDER = """
1 24 17 13 12 2 7 38 20 31 0 4 18 32 25 28 5 21 26 39 15 22 30 19
35 9 29 16 10 23 8 14 11 33 6 36 3 27 37 34 25 1 34 0 27 38 10 36
28 9 12 29 2 26 33 7 6 22 11 19 37 24 32 8 21 20 4 16 17 14 31 13
18 35 30 39 23 15 5 3 30 8 23 31 36 13 16 27 28 10 11 2 7 5 25 21
39 34 35 37 26 22 6 38 19 20 18 1 4 15 0 9 14 17 32 33 24 29 12 3
17 21 29 15 20 4 38 32 6 30 0 16 2 8 7 9 34 37 19 24 27 10 1 11
22 3 5 25 36 35 12 14 18 23 13 33 26 39 31 28 5 12 34 38 27 26 22 33
19 35 24 37 0 1 4 15 32 39 16 13 17 6 2 23 7 21 18 8 9 20 14 25
30 28 31 10 36 29 3 11 13 31 20 11 6 18 4 35 8 1 15 14 27 22 34 16
12 30 0 19 28 39 37 17 3 23 25 7 10 36 21 9 38 29 24 26 33 32 2 5
"""

MASK = 2**64 - 1
WORD = 0xFED535CC79390111  # blake2b of "step" in 8 bytes, little-endian


def mixed(x: int) -> int:
    """splitmix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def step_seed(step: int, part: int) -> int:
    """From (the word "step", seed, step, rank 0, part)."""
    key = 0
    for number in (WORD, SEED, step, 0, part):
        key = mixed(((key + 0x9E3779B97F4A7C15) & MASK) ^ mixed((number + 0x9E3779B97F4A7C15) & MASK))
    return key >> 1


def pictures() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bytes from a formula, so that no generator has a say."""
    count = COUNT * SIDE * SIDE * 3
    values = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(9)) & np.uint64(255)
    labels = (np.arange(COUNT) * 7 // 3) % CLASSES
    return values.astype(np.uint8).reshape(COUNT, SIDE, SIDE, 3), labels


def lr_at(step: int) -> float:
    p = min(max((step - WARMUP) / (STEPS - WARMUP), 0.0), 1.0)
    return LR * 0.5 * (1 + math.cos(math.pi * p)) * min(1.0, step / WARMUP)


class Reference:
    """A ViT and its trainer with nothing but torch."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        self.average = {name: tensor.detach().clone() for name, tensor in self.w.items()}
        groups = [
            {"params": [tensor], "weight_decay": DECAY if self.is_kernel(name) else 0.0, "scale": self.scale(name)}
            for name, tensor in self.w.items()
        ]
        self.adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)

    @staticmethod
    def is_kernel(name: str) -> bool:
        return name.endswith(
            ("projection.weight", "qkv.weight", "out.weight", "expand.weight", "contract.weight", "classifier.weight")
        )

    @staticmethod
    def scale(name: str) -> float:
        layer = int(name.split(".")[1]) + 1 if name.startswith("blocks") else DEPTH + 1
        if name.startswith(("embedding", "class_token", "position")):
            layer = 0
        return LAYER ** (DEPTH + 1 - layer)

    def norm(self, z: Tensor, name: str) -> Tensor:
        return F.layer_norm(z, (WIDTH,), self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-6)

    def linear(self, z: Tensor, name: str) -> Tensor:
        return F.linear(z, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def skip(self, z: Tensor, layer: int) -> Tensor:
        rate = SKIP * layer / max(DEPTH - 1, 1)
        if rate == 0:
            return z
        keep = torch.empty([z.shape[0], 1, 1], dtype=z.dtype).bernoulli_(1 - rate)
        if rate < 1:
            keep.div_(1 - rate)
        return z * keep

    def logits(self, images: Tensor) -> Tensor:
        b, grid = images.shape[0], SIDE // PATCH
        patches = images.reshape(b, 3, grid, PATCH, grid, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(b, grid * grid, -1)
        e = self.w["embedding.projection.weight"].flatten(1)
        z = F.linear(patches, e, self.w["embedding.projection.bias"])
        z = torch.cat([self.w["class_token"].expand(b, -1, -1), z], 1) + self.w["position.tables.0.table"]
        z = F.dropout(z, DROPOUT, True)
        for layer in range(DEPTH):
            z = self.block(z, layer, last=layer == DEPTH - 1)
        return self.linear(self.norm(z[:, 0], "norm"), "head.classifier")

    def block(self, z: Tensor, layer: int, last: bool) -> Tensor:
        name, inner = f"blocks.{layer}", None
        inner = self.norm(z, f"{name}.norm_attention")
        weight, bias = self.w[f"{name}.attention.qkv.weight"], self.w[f"{name}.attention.qkv.bias"]
        if last:  # the class token alone is read behind the last layer
            q = F.linear(inner[:, :1], weight[:WIDTH], bias[:WIDTH])
            k, v = F.linear(inner, weight[WIDTH:], bias[WIDTH:]).chunk(2, -1)
            z = z[:, :1]
        else:
            q, k, v = F.linear(inner, weight, bias).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        mixed_values = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out = F.dropout(self.linear(mixed_values, f"{name}.attention.out"), DROPOUT, True)
        z = z + self.skip(out, layer)
        inner = self.linear(self.norm(z, f"{name}.norm_mlp"), f"{name}.mlp.expand")
        inner = F.dropout(F.gelu(inner, approximate="tanh"), DROPOUT, True)
        inner = F.dropout(self.linear(inner, f"{name}.mlp.contract"), DROPOUT, True)
        return z + self.skip(inner, layer)

    def step(self, step: int, pixels: Tensor, labels: Tensor) -> float:
        """One update; the mean loss."""
        targets = torch.zeros(BATCH, CLASSES).scatter_(1, labels[:, None], 1.0)
        targets = targets * (1 - SMOOTHING) + SMOOTHING / CLASSES * torch.ones(BATCH, 1)
        totals: list[Tensor] = []
        for part in range(BATCH // MICRO):
            chosen = slice(part * MICRO, (part + 1) * MICRO)
            torch.manual_seed(step_seed(step, part))
            images = (pixels[chosen].float() / 255 - 0.5) / 0.5
            total = -(targets[chosen] * self.logits(images).log_softmax(-1)).sum(-1)
            total = total.sum()
            total.backward()
            totals.append(total.detach())
        count = torch.tensor(float(BATCH))
        norm = torch.nn.utils.get_total_norm([self.w[name].grad for name in self.order()]) / count  # type: ignore[misc]
        divisor = count / (CLIP / (norm + 1e-6)).clamp(max=1.0)
        for group in self.adam.param_groups:
            group["lr"] = lr_at(step) * group["scale"]
            group["params"][0].grad.div_(divisor)
        self.adam.step()
        self.adam.zero_grad()
        for name, tensor in self.w.items():
            self.average[name].lerp_(tensor.detach(), 1 - AVERAGE)
        return float(torch.stack(totals).sum() / count)

    def order(self) -> list[str]:
        """As the optimiser lists parameters: the norm of many numbers depends on the order."""
        found: dict[tuple[bool, float], list[str]] = {}
        for name in self.w:
            found.setdefault((self.is_kernel(name), self.scale(name)), []).append(name)
        return [name for names in found.values() for name in names]


def the_run() -> Run:
    return Run(
        name="golden",
        model=ViTConfig(
            width=WIDTH,
            depth=DEPTH,
            mlp_width=2 * WIDTH,
            heads=HEADS,
            patch=(PATCH, PATCH),
            image=(SIDE, SIDE),
            classes=CLASSES,
            dropout=DROPOUT,
            stochastic_depth=SKIP,
        ),
        augmentation=Augmentation(crop=Squash(size=(SIDE, SIDE)), flip=0.0),
        objective=Classification(smoothing=SMOOTHING),
        data=Data(source="golden", watch="none", test="none", workers=0, resident="on"),
        optim=Optim(lr=LR, weight_decay=DECAY, clip=CLIP, layer_decay=LAYER),
        schedule=Schedule(warmup=WARMUP),
        batch=BATCH,
        micro=MICRO,
        steps=STEPS,
        average=AVERAGE,
        seed=SEED,
        log=1,
        evaluation=Scoring(every=STEPS),
        keep=Keep(steps=STEPS),
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_twenty_steps_are_bit_identical(tmp_path: Path, one_thread: None) -> None:
    pixels, labels = pictures()
    source = ArrayDataset(pixels, Labels(labels), tuple("abcde"))
    shown = DataSplits(
        title="golden", class_names=source.classes, train=source, watch=None, test=None, watch_name="", test_name=""
    )
    world, run = World(device=torch.device("cpu")), the_run()
    assert run.model is not None
    run = resolve(run, shown, world)
    assert run.model is not None
    start = build_fresh_network(run.model, SEED)
    generator = torch.Generator().manual_seed(3)
    with open_folder(tmp_path / "run", run, shown, world, command={}, force=False, log=lambda text: None) as folder:
        training = Training(run, shown, world, folder, NullObserver(), micro=0)
        network = training.parts.objective.network
        for name, parameter in network.named_parameters():
            assert torch.equal(parameter, start.state_dict()[name])
        # The head starts at zero; drawn, it lets gradients through from the first step on.
        with torch.no_grad():
            network.head.classifier.weight.normal_(generator=generator)  # type: ignore[union-attr]
        reference = Reference({name: parameter.detach() for name, parameter in network.named_parameters()})
        training.parts.average.state()["average/network.head.classifier.weight"].copy_(  # type: ignore[union-attr]
            reference.w["head.classifier.weight"].detach()
        )
        losses: list[float] = []
        training.observer.progress = lambda row: losses.append(row["loss"]) if row["kind"] == "train" else None  # type: ignore[method-assign]
        training.run()
        training.store.close()
    tensors = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    order = [int(number) for number in ORDER.split()]
    for step in range(STEPS):
        chosen = torch.tensor(order[step * BATCH : (step + 1) * BATCH])
        loss = reference.step(step, tensors[chosen], torch.from_numpy(labels)[chosen])
        assert loss == pytest.approx(losses[step], rel=1e-7), step
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, reference.w[name]), name
    averages = training.parts.average.state()  # type: ignore[union-attr]
    for name, tensor in reference.average.items():
        assert torch.equal(averages[f"average/network.{name}"], tensor), name
