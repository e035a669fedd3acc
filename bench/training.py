"""Training speed compared with the same network in timm: complete steps of both, alternating in one process.

    python -m bench.training                                            # S/16, B/16, L/16 and H/14 at 224 px
    python -m bench.training --models B/16 --precision autocast --batch 512
    python -m bench.training --models DINOv2-reg-B/14 DINOv3-L/16 --batch 128
    python -m bench.training --device cpu --models Ti/16 --image-size 32 --depth 2 --batch 4 --compile off

A step is forward, loss, backward, clipping by the global norm and fused AdamW with float32 master weights, on images
that are on the device as bytes. Both networks start from the same weights (imported from timm) and use the same
objective, precision, optimiser and compiler; only the code of the network differs. `bfloat16` computes in bfloat16
throughout, with the parameters cast once per step; `fp8` is the same with vitrail's products in fp8, next to
timm in bfloat16; `autocast` keeps the residual stream and the norms in float32, as timm's own training script does. The
loss column is the difference between the two first losses relative to timm's; it shows that the networks are the same,
or how far off fp8 is. TFLOP/s are nominal for both: 6 FLOPs per multiply-accumulate of the whole network.
Memory is what a step adds to parameters and moments at its peak. Compiling takes most of the time: with `--lock FILE`,
several benchmarks can share a card, compile at the same time, and measure one after another.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bench.turns import add_lock, take_turn
from vitrail.checkpoint.formats.key_table import TensorShapes, import_tensors
from vitrail.checkpoint.formats.registry import recognise
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix, one_hot
from vitrail.distributed.process_group import World
from vitrail.models.build import Model, build_from
from vitrail.objectives.objective import Objective, ObjectiveContext
from vitrail.optim.config import Optim
from vitrail.optim.groups import group_parameters
from vitrail.optim.optimiser import Optimiser, clip_factor, total_norm
from vitrail.tasks.classification.objective import Classification, ClassificationObjective

TIMM = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/16": "vit_base_patch16_224",
    "L/16": "vit_large_patch16_224",
    "H/14": "vit_huge_patch14_224",
    "DINOv2-reg-B/14": "vit_base_patch14_reg4_dinov2",
    "DINOv3-L/16": "vit_large_patch16_dinov3",
}
BATCHES = {
    "Ti/16": 1024,
    "S/16": 512,
    "B/16": 256,
    "L/16": 256,
    "H/14": 128,
    "DINOv2-reg-B/14": 256,
    "DINOv3-L/16": 128,
}
CLASSES = 1000
OPTIM = Optim(lr=1e-4, weight_decay=0.1, clip=1.0)


class Cast(nn.Module):
    """A network whose float32 parameters are the masters: each forward pass runs on copies in bfloat16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        low = {name: parameter.bfloat16() for name, parameter in self.network.named_parameters()}
        return functional_call(self.network, low, (images.bfloat16(),))


class Autocast(nn.Module):
    """A network under torch's autocast to bfloat16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            return self.network(images)


PRECISIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": Cast,
    "fp8": Cast,
    "autocast": Autocast,
    "float32": lambda network: network,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What one row of the table is measured at."""

    model: str
    precision: str = "bfloat16"
    batch: int = 256
    image: int = 224
    depth: int | None = None
    compile: str = "default"
    device: str = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Medians of one library at one setting."""

    ms: float
    images_per_s: float
    tflops: float
    peak_gb: float
    first_loss: float


@dataclass(slots=True)
class Runner:
    """All that a step of one library needs."""

    objective: Any  # compiled, maybe
    optimiser: Optimiser
    inputs: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        return bare_step(self.objective, self.optimiser, self.inputs)


def bare_step(objective: Any, optimiser: Optimiser, inputs: tuple[Tensor, ...]) -> Tensor:
    """One update with nothing around it; returns the mean loss, on the device."""
    outcome = objective(*inputs)
    outcome.total.backward()
    norm = total_norm(optimiser.gradients()) / outcome.count
    ok = norm.isfinite()
    optimiser.step(OPTIM.lr, divisor=outcome.count / clip_factor(norm, OPTIM.clip), ok=ok)
    optimiser.zero_grad()
    return outcome.total.detach() / outcome.count


def timm_network(setting: Setting) -> nn.Module:
    """Fresh, made on the device; the head is drawn, too, so that gradients flow from the first step on."""
    import timm

    more = {} if setting.depth is None else {"depth": setting.depth}
    torch.manual_seed(0)
    with torch.device(setting.device):
        network = timm.create_model(TIMM[setting.model], num_classes=CLASSES, img_size=setting.image, **more)
        nn.init.normal_(network.get_classifier().weight, std=0.02)
    return network


def own_network(setting: Setting, theirs: nn.Module) -> Model:
    """Our network around copies of timm's weights, with timm's exact GELU."""
    path, tensors = Path("timm"), {name: tensor.detach().clone() for name, tensor in theirs.state_dict().items()}
    known, tensors = recognise(path, tensors)
    facts = {"image": (setting.image, setting.image)}
    config = known.infer(TensorShapes(path=path, tensors=tensors, facts=facts))
    return build_from(config, import_tensors(path, config, known.table(config), tensors))


def pictures(setting: Setting) -> tuple[Tensor, ...]:
    """Bytes [B, 3, H, W], targets [B, K], labels [B] and which count [B]."""
    draw = torch.Generator(setting.device).manual_seed(1)
    where = {"device": setting.device, "generator": draw}
    pixels = torch.randint(0, 256, (setting.batch, 3, setting.image, setting.image), dtype=torch.uint8, **where)
    label = torch.randint(0, CLASSES, (setting.batch,), **where)
    return pixels, one_hot(label, CLASSES), label, torch.ones_like(label, dtype=torch.bool)


def runner(setting: Setting, network: nn.Module, inputs: tuple[Tensor, ...]) -> Runner:
    network.train()
    network.class_token_only = True  # as vitrail trains; timm's networks know nothing of it
    optimiser = Optimiser(group_parameters(network, OPTIM), OPTIM)
    preprocessing = Preprocessing(image=(setting.image, setting.image))
    context = ObjectiveContext(CLASSES, preprocessing, Mix(), 1, World(device=torch.device(setting.device)))
    objective: Objective = ClassificationObjective(PRECISIONS[setting.precision](network), Classification(), context)
    compiled = objective.to(setting.device)
    if setting.compile != "off":
        compiled = torch.compile(compiled, fullgraph=True, dynamic=False, mode=setting.compile)
    return Runner(compiled, optimiser, inputs)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Runner, steps: int, device: str) -> float:
    """Milliseconds a step."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - start) * 1e3 / steps
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps


def first_steps(run: Runner, warmup: int, device: str, lock: Path | None) -> tuple[float, float]:
    """Compiles and warms up. The first loss, and the gigabytes that a step adds at its peak."""
    loss = float(run())
    wait(device)
    before = 0
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    with take_turn(lock):
        for _ in range(warmup):
            run()
        wait(device)
    return loss, (torch.cuda.max_memory_allocated() - before) / 1e9 if device == "cuda" else 0.0


def compare(setting: Setting, *, rounds: int, steps: int, warmup: int, lock: Path | None) -> dict[str, Row]:
    """Both libraries at one setting: `rounds` turns of `steps` steps each, the first to go changing every round."""
    torch.compiler.reset()
    theirs, inputs = timm_network(setting), pictures(setting)
    own = own_network(setting, theirs)
    own.float8 = setting.precision == "fp8"
    runners = {
        "vitrail": runner(setting, own, inputs),
        "timm": runner(setting, theirs, inputs),
    }
    firsts = {library: first_steps(run, warmup, setting.device, lock) for library, run in runners.items()}
    times: dict[str, list[float]] = {library: [] for library in runners}
    with take_turn(lock):
        for turn in range(rounds):
            for library in list(runners) if turn % 2 else list(runners)[::-1]:
                times[library].append(timed(runners[library], steps, setting.device))
    return {library: row(setting, own.config.macs, times[library], *firsts[library]) for library in runners}


def row(setting: Setting, macs: int, times: list[float], first_loss: float, peak_gb: float) -> Row:
    ms = statistics.median(times)
    rate = setting.batch / ms * 1e3
    return Row(
        ms=ms,
        images_per_s=rate,
        tflops=6 * macs * rate / 1e12,
        peak_gb=peak_gb,
        first_loss=first_loss,
    )


def line(setting: Setting, rows: dict[str, Row]) -> str:
    own, other = rows["vitrail"], rows["timm"]
    apart = abs(own.first_loss - other.first_loss) / other.first_loss
    return (
        f"{setting.model:15} {setting.precision:9} {setting.batch:6} {own.images_per_s:12,.0f} "
        f"{other.images_per_s:10,.0f} {other.ms / own.ms:6.3f} {own.ms:11.2f} {other.ms:8.2f} {own.tflops:15.0f} "
        f"{other.tflops:12.0f} {own.peak_gb:11.1f} {other.peak_gb:8.1f} {apart:8.0e}"
    )


HEADER = (
    f"{'ViT':15} {'precision':9} {'batch':>6} {'vitrail img/s':>12} {'timm img/s':>10} {'ratio':>6} {'vitrail ms':>11} "
    f"{'timm ms':>8} {'vitrail TFLOP/s':>15} {'timm TFLOP/s':>12} {'vitrail GB':>11} {'timm GB':>8} {'loss':>8}"
)


def machine(device: str) -> str:
    import timm

    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    return f"torch {torch.__version__}, timm {timm.__version__}, {name}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["S/16", "B/16", "L/16", "H/14"], choices=TIMM)
    parser.add_argument("--precision", nargs="+", default=["bfloat16"], choices=PRECISIONS)
    parser.add_argument("--batch", type=int, help=f"images per step (default: {BATCHES})")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--depth", type=int, help="number of layers, instead of the network's own")
    parser.add_argument("--compile", default="default", help="a mode of torch.compile, or off")
    parser.add_argument("--rounds", type=int, default=10, help="turns per library")
    parser.add_argument("--steps", type=int, default=5, help="steps per turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_lock(parser)
    parser.add_argument("--out", type=Path, help="also write the numbers to this file, as JSON")
    args = parser.parse_args(arguments)
    print(f"{machine(args.device)}; {args.rounds} turns of {args.steps} steps, compile {args.compile}")
    print(HEADER)
    results: list[dict[str, Any]] = []
    for model in args.models:
        for precision in args.precision:
            setting = Setting(
                model=model,
                precision=precision,
                batch=args.batch or BATCHES[model],
                image=args.image_size,
                depth=args.depth,
                compile=args.compile,
                device=args.device,
            )
            rows = compare(setting, rounds=args.rounds, steps=args.steps, warmup=args.warmup, lock=args.lock)
            print(line(setting, rows), flush=True)
            results.append(asdict(setting) | {library: asdict(row) for library, row in rows.items()})
            if args.out:
                args.out.write_text(json.dumps({"machine": machine(args.device), "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
