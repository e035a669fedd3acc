"""One objective on many devices: what is replicated, sharded, recomputed, compiled, and in which precision.

| sharding | parameters, gradients, moments | a step communicates |
|---|---|---|
| none | one process | nothing |
| ddp | replicated in every process | gradients |
| fsdp | split by rows over all processes, gathered block by block | weights twice, gradients |
| hsdp | split within a node, replicated across nodes | as fsdp in the node; a share of the gradients between nodes |

Any module with a list of `blocks` (or `stages` of them) is handled block by block; nothing else is assumed about the
network. Parameter names never change, so checkpoints do not depend on any of this.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.core.precision import HALF, Precision
from vitrail.distributed.meta_init import give_storage
from vitrail.distributed.process_group import World

T = TypeVar("T")

Sharding: TypeAlias = Literal["none", "ddp", "fsdp", "hsdp"]
GRAPHS: Final = 4  # per shape of the tokens, at most: whole and partial micro-batches, blocks with all queries or some


@dataclass(frozen=True, slots=True)
class Parallel:
    """An objective as the step calls it. Gradients are stored in the objective's own parameters, in float32; multiplied
    by `gradient_factor` they are the sum over processes."""

    module: nn.Module
    _run: nn.Module
    world: World
    gradient_factor: float

    def __call__(self, *inputs: Tensor) -> Any:
        """The objective's result for the local part of the batch."""
        self.world.count_collective()
        return self._run(*inputs)

    def micro(self, last: bool) -> AbstractContextManager[None]:
        """The context for forward and backward of a micro-batch: only the last one of a step exchanges gradients."""
        if isinstance(self._run, DistributedDataParallel):
            return nullcontext() if last else self._run.no_sync()
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        return nullcontext()

    @torch.no_grad()
    def evaluate_with(self, question: Callable[..., T], *inputs: Tensor) -> T:
        """`question(network, *inputs)` in the precision of training, for evaluation, with the objective's
        `eval_network` if it has one. Under FSDP all processes must call it together, because each holds only a part of
        the weights."""
        self.world.count_collective()
        whole = self._run.module if isinstance(self._run, DistributedDataParallel) else self._run
        return cast(PrecisionWrapper, whole).evaluate_with(question, *inputs)


def parallelise(
    module: nn.Module,
    *,
    world: World,
    sharding: Sharding = "none",
    precision: Precision = "float32",
    compile: bool = False,
    variants: int = 1,
    recompute: bool = False,
    values: Callable[[nn.Module], None] | None = None,
) -> Parallel:
    """Moves an objective to the world's device and makes it parallel, in place. A module without storage gets it here,
    for the local rows only, and is then filled by `values(module)` (see meta_init.py). `variants` is the number of
    shapes that its tokens come in, each of which has its own compiled graph. Create optimisers after this."""
    for name, value, kinds in (("sharding", sharding, Sharding), ("precision", precision, Precision)):
        if value not in get_args(kinds):
            raise unknown_name(name, value, get_args(kinds))
    if sharding == "none" and world.size > 1:
        raise ConfigError(f"sharding='none' is for one process, and there are {world.size}; use ddp, fsdp or hsdp")
    if any(tensor.is_meta for tensor in module.parameters()) and values is None:
        raise ValueError("the module has no storage, and nothing gives it values")
    # A single process has nothing to shard.
    shards = sharding in ("fsdp", "hsdp") and world.size > 1
    low = precision in HALF
    if precision == "fp8":
        let_read_eight_bits(module, shards=shards, recompute=recompute)
    if compile:
        # Beyond a limit, torch stops compiling a piece of code for further networks and runs them eagerly, silently.
        torch.compiler.reset()
        if variants > 1:
            limit = torch.compiler.config.recompile_limit
            torch.compiler.config.recompile_limit = max(limit, GRAPHS * variants)
    if recompute:
        for unit in shard_units(module):
            _recompute(unit, keep_weights=low and not shards and not compile)
    if shards:
        shard_blocks(module, _mesh(world, sharding), precision, compile)
    give_storage(module, world.device)
    if values is not None:
        values(module)
    whole = PrecisionWrapper(module, world.device, precision, cast_weights=low and not shards)
    if compile and not shards:
        whole.compile(dynamic=False)
    if shards or world.size == 1:
        return Parallel(module, whole, world, 1.0)
    own = [world.device] if world.device.type == "cuda" else None
    # Buffers are fixed tables only.
    run = DistributedDataParallel(whole, device_ids=own, broadcast_buffers=False, gradient_as_bucket_view=True)
    return Parallel(module, run, world, float(world.size))


def let_read_eight_bits(module: nn.Module, *, shards: bool, recompute: bool) -> None:
    """Switches the layers of an objective's networks to fp8 products (models/kernels/float8_layers.py)."""
    if shards or recompute:
        raise ConfigError("precision=fp8 does not support sharding=fsdp, sharding=hsdp or recompute; use bfloat16")
    for part in module.children():
        if shard_units(part):
            setattr(part, "float8", True)  # noqa: B010 (torch types a module's attributes as tensors)


def shard_blocks(module: nn.Module, mesh: DeviceMesh, precision: Precision, compile: bool) -> None:
    """FSDP2: each block is a unit, the rest of the objective another. Blocks are compiled one by one, between the hooks
    that gather and free their weights."""
    low = torch.bfloat16 if precision in HALF else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for unit in shard_units(module):
        if compile:
            unit.compile(dynamic=False)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    # Targets are inputs of the objective and must keep their type.
    rest = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=rest)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Plain sums: divide by 1 and force sum reductions, which both gloo and NCCL support.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def shard_units(module: nn.Module) -> list[nn.Module]:
    """The units that are sharded, recomputed and, under FSDP, compiled one by one: the members of every list called
    `blocks`, and the members of each member of every list called `stages`."""
    found: list[nn.Module] = []
    for name, part in module.named_modules():
        last = name.rpartition(".")[2] if isinstance(part, nn.ModuleList) else ""
        for unit in part.children() if last in ("blocks", "stages") else ():
            found += unit.children() if last == "stages" and isinstance(unit, nn.Sequential) else [unit]
    return found


def _mesh(world: World, sharding: Sharding) -> DeviceMesh:
    if sharding == "fsdp":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    if world.size % world.local_size:
        fact = f"{world.size} are not a multiple of the {world.local_size} here"
        raise ConfigError(f"sharding='hsdp' needs the same number of processes on every node, and {fact}; use fsdp")
    return init_device_mesh(world.device.type, (world.nodes, world.local_size), mesh_dim_names=("replicate", "shard"))


class FunctionalHolder(nn.Module):
    """Calls whatever it is given, while functional_call swaps the weights of the objective that it holds."""

    def __init__(self, objective: nn.Module):
        super().__init__()
        self.objective = objective

    def forward(self, call: Callable[..., T], *inputs: Tensor) -> T:
        return call(*inputs)


class PrecisionWrapper(nn.Module):
    """An objective in its precision. With `cast_weights` it runs on bfloat16 copies of its float32 weights, made again
    in each call as part of the graph, so that gradients arrive in float32. The objective decides how it computes its
    losses."""

    def __init__(self, objective: nn.Module, device: torch.device, precision: Precision, *, cast_weights: bool):
        super().__init__()
        self.held = FunctionalHolder(objective)
        self.device, self.precision, self.cast_weights = device, precision, cast_weights
        # The network, and whatever else in the objective is made of units: a teacher, a decoder.
        found = {name: part for name, part in objective.named_children() if name == "network" or shard_units(part)}
        self.networks = tuple(found)  # names, collected once, because a compiler traces `forward`
        if precision in HALF:
            for network in found.values():
                network.register_forward_pre_hook(_as_weights)
        asked = getattr(objective, "eval_network", cast(Any, objective).network)
        self.questioned: Callable[..., Any] = lambda question, *inputs: question(asked, *inputs)
        if isinstance(objective, FSDPModule):
            setattr(objective, "questioned", self.questioned)  # noqa: B010 (torch types a module's attributes as tensors)
            register_fsdp_forward_method(objective, "questioned")
            self.questioned = cast(Callable[..., Any], objective.questioned)

    def forward(self, *inputs: Tensor) -> Any:
        return self._call(self.held.objective, *inputs)

    def evaluate_with(self, question: Callable[..., T], *inputs: Tensor) -> T:
        if self.precision in HALF:
            inputs = tuple(tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in inputs)
        answer = self._call(partial(self.questioned, question), *inputs)
        if isinstance(self.held.objective, FSDPModule):
            self.held.objective.reshard()  # no backward pass follows that would do it
        return answer

    def _call(self, call: Callable[..., T], *inputs: Tensor) -> T:
        if self.cast_weights:
            return cast(T, functional_call(self.held, self._low(), (call, *inputs)))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "autocast"):
            return call(*inputs)

    def _low(self) -> dict[str, Tensor]:
        """All weights, and the networks' fixed tables, in bfloat16; the objective's own constants keep their type."""
        tensors = [*self.held.named_parameters()]
        for name in self.networks:
            tensors += [*getattr(self.held.objective, name).named_buffers(f"objective.{name}")]
        return {name: tensor.bfloat16() for name, tensor in tensors if tensor.dtype == torch.float32}


def _as_weights(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Casts images to the current type of the weights."""
    dtype = next(network.parameters()).dtype
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)


def _recompute(unit: nn.Module, *, keep_weights: bool) -> None:
    """Makes a block discard its activations and recompute them in the backward pass, with the same random numbers. With
    `keep_weights` it is recomputed with the very tensors that replaced its weights in the forward pass."""
    forward = unit.forward
    held = FunctionalHolder(unit)

    def forward_recomputed(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        if not keep_weights:
            return checkpoint(forward, *inputs, use_reentrant=False)
        weights: dict[str, Tensor] = dict(held.named_parameters())
        return checkpoint(partial(functional_call, held, weights), (forward, *inputs), use_reentrant=False)

    unit.forward = forward_recomputed
    setattr(unit, "recomputed", True)  # noqa: B010 (torch types a module's attributes as tensors)
