"""How much memory one image adds to a training step, compared with the closed form of docs/scale.md.

    python bench/multi_process.py                                   # B/16, L/16 and H/14 at 224 px on a GPU
    python bench/multi_process.py --ways recomputed --batches 256 512

Runs forward and backward passes of one micro-batch at two batch sizes; the difference of the peaks is what the
additional images take. With recomputation the batches must be large: otherwise the peak is that of the gradients, when
the activations are already freed. The network runs as in training, in bfloat16 with float32 master weights: eagerly,
compiled, and with recomputation. With --shard it also runs under FSDP2 in a process group of one, which exchanges
nothing but gathers and casts as several processes would.
"""

import argparse
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed import parallel as sharing
from vitrail.distributed.meta_init import draw_parameters
from vitrail.distributed.parallel import Parallel, parallelise
from vitrail.distributed.process_group import World, join_world
from vitrail.models.build import build
from vitrail.models.layers import initialise
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config
from vitrail.objectives.objective import ObjectiveContext
from vitrail.tasks.classification.objective import Classification, ClassificationObjective

MB = 1e6
WAYS = {"written": (False, False), "compiled": (True, False), "recomputed": (False, True)}


def expected(config: ViTConfig, recompute: bool) -> float:
    """Bytes an image, in bfloat16, as docs/scale.md derives it."""
    tokens, d, m = config.tokens, config.width, config.mlp_width
    if recompute:
        return 2.0 * tokens * (config.depth * d + 10 * d + 3 * m)
    return 2.0 * tokens * config.depth * (8 * d + 2 * m)


def inputs(count: int, device: torch.device) -> tuple[Tensor, ...]:
    pixels = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8, device=device)
    label = torch.randint(0, 1000, (count,), device=device)
    return pixels, torch.nn.functional.one_hot(label, 1000).float(), label, label >= 0


def fresh(config: ViTConfig) -> ClassificationObjective:
    with torch.device("meta"):
        network = build(config)
    context = ObjectiveContext(1000, Preprocessing(image=config.image), Mix(), 1, World(device=torch.device("cpu")))
    return ClassificationObjective(network, Classification(), context)


def drawn(learner: Any) -> None:
    torch.manual_seed(0)
    draw_parameters(learner.network, initialise)


def peak(parallel: Parallel, count: int) -> int:
    """The most bytes that a step with so many images holds, the second time."""
    batch = inputs(count, parallel.world.device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        parallel(*batch).total.backward()
        parallel.module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def measured(parallel: Parallel, batches: Iterable[int]) -> float:
    """Bytes an image, from a smaller and a larger batch."""
    small, large = batches
    return (peak(parallel, large) - peak(parallel, small)) / (large - small)


def sharded(config: ViTConfig, world: World) -> Parallel:
    """By FSDP2 although there is one process."""
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, device_id=world.device)
    mesh = sharing.init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    return sharing.shard_blocks(fresh(config), mesh, world, "bfloat16", False, drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["B/16", "L/16", "H/14"])
    parser.add_argument("--batches", nargs=2, type=int, default=[16, 48])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--shard", action="store_true", help="also run the first model under FSDP2")
    args = parser.parse_args()
    with join_world("cuda") as world:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        for name in args.models:
            config = model_config(f"ViT-{name}", classes=1000)
            assert isinstance(config, ViTConfig)
            for way in args.ways:
                compile, recompute = WAYS[way]
                parallel = parallelise(
                    fresh(config), world=world, precision="bfloat16", compile=compile, recompute=recompute, values=drawn
                )
                found, guess = measured(parallel, args.batches), expected(config, recompute)
                print(f"ViT-{name} {way:10} {found / MB:8.1f} MB an image, closed form {guess / MB:8.1f}", flush=True)
                del parallel
                torch.compiler.reset()
                torch.cuda.empty_cache()
        if args.shard:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29544"}
            config = model_config(f"ViT-{args.models[0]}", classes=1000)
            assert isinstance(config, ViTConfig)
            parallel = sharded(config, world)
            print(f"FSDP2 ViT-{args.models[0]}: {measured(parallel, args.batches) / MB:.1f} MB an image")
            assert all(parameter.dtype == torch.float32 for parameter in parallel.module.parameters())
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
