"""DINO (Caron et al. 2021): self-distillation without labels. The student sees two global crops and several local crops
of an image, and from each crop predicts the teacher's output for the others. The teacher sees only the global crops.

Centring and sharpening of the teacher's outputs prevent collapse, where they become the same for all images.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from vitrail.core.errors import ImageSizeError
from vitrail.core.text import Pair, format_size, pair
from vitrail.data.loader import Batch
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import Range
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.objectives.multicrop import PositionsAt, check_resizable, represent_at, split_views, with_crop
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput
from vitrail.objectives.patch_ops import ViTObjective
from vitrail.objectives.projection_heads import PrototypeHead, Teacher, local_tensors, mlp_macs, momentum_at

GLOBAL_CROPS = 2  # per image; the teacher sees only these


@dataclass(frozen=True, kw_only=True, slots=True)
class DINO(ObjectiveConfig):
    """The head has layers of width `hidden`, then a `bottleneck` and `outputs` prototypes. Views are crops whose share
    of the image lies in `global_scale` or `local_scale`; flips and colours are the run's augmentation. The teacher's
    temperature goes from `teacher_start` to `teacher_temperature` over the first `warmup` share of the run, and its
    momentum from `momentum` to 1 over the whole run. The last layer is frozen for the first `freeze_last` share."""

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return DINOObjective(network, self, context)

    outputs: int = 4096
    hidden: int = 2048
    bottleneck: int = 256
    local_views: int = 8
    local_size: int = 0  # 0 for half the image, in whole patches
    local_scale: Range = (0.05, 0.4)
    global_scale: Range = (0.4, 1.0)
    student_temperature: float = 0.1
    teacher_temperature: float = 0.04
    teacher_start: float = 0.04
    warmup: float = 0.1
    centre_momentum: float = 0.9
    momentum: float = 0.996
    freeze_last: float = 0.01

    def __post_init__(self) -> None:
        self.check_numbers("be at least 1", lambda value: value >= 1, "outputs", "hidden", "bottleneck")
        self.check_numbers("not be below 0", lambda value: value >= 0, "local_views", "local_size")
        temperatures = ("student_temperature", "teacher_temperature", "teacher_start")
        self.check_numbers("be above 0", lambda value: value > 0, *temperatures)
        shares = ("warmup", "centre_momentum", "momentum", "freeze_last")
        self.check_numbers("lie in 0 to 1", lambda value: 0 <= value <= 1, *shares)
        rule = "be two shares of the image, the smaller first"
        self.check_numbers(rule, lambda ends: 0 < ends[0] <= ends[1] <= 1, "local_scale", "global_scale")

    def local(self, image: Pair, patch: Pair = (1, 1)) -> Pair:
        """The size of the local crops."""
        if self.local_size:
            return pair(self.local_size)
        rows, columns = (max(side // 2 // part, 1) * part for side, part in zip(image, patch, strict=True))
        return rows, columns

    def views(self, augmentation: Augmentation, patch: Pair = (1, 1)) -> tuple[Augmentation, ...]:
        first, second = split_views(with_crop(augmentation, augmentation.size, self.global_scale))
        small = with_crop(augmentation, self.local(augmentation.size, patch), self.local_scale)
        return (first, second, *[small] * self.local_views)

    def check_model(self, model: ModelConfig) -> ViTConfig:
        """The model as a ViT config; raises where this objective cannot train it."""
        model = vit_config(model, "objective dino")
        if not self.local_views:
            return model
        size = self.local(model.image, model.patch)
        if any(side % part for side, part in zip(size, model.patch, strict=True)):
            why = f"objective.local_size={self.local_size} is not a whole number of {format_size(model.patch)} patches"
            raise ImageSizeError(f"{why}; use a multiple of the patch, or 0 for half the image")
        return model if size == model.image else check_resizable(model, "dino")

    def macs_per_image(self, model: ModelConfig) -> float:
        """MACs per image: all crops through the student, the global crops through the teacher without gradients."""
        config = replace(self.check_model(model), head="none", classes=0)
        head = mlp_macs(config.features, self.hidden, self.hidden, self.bottleneck, self.outputs)
        wide = GLOBAL_CROPS * (config.macs + head)
        small = replace(config, image=self.local(config.image, config.patch)) if self.local_views else config
        return wide + wide / 3 + self.local_views * (small.macs + head)

    def sharpness(self, step: int, steps: int) -> float:
        """The teacher's temperature at a step."""
        done = min(step / (self.warmup * steps), 1.0) if self.warmup else 1.0
        return self.teacher_start + (self.teacher_temperature - self.teacher_start) * done


class DINOObjective(ViTObjective):
    """The loss of an image is the cross-entropy of the student's output with the teacher's, averaged over all pairs of
    a global crop and another crop. The teacher's outputs are centred by their running mean over earlier steps."""

    config: DINO

    centre: Tensor
    seen: Tensor

    def __init__(self, network: Backbone, config: DINO, context: ObjectiveContext) -> None:
        super().__init__(network, config, context)
        self.head = PrototypeHead(self.model.features, config.hidden, config.bottleneck, config.outputs)
        self.teacher = Teacher(self.network, self.head)
        small = config.local(self.model.image, self.model.patch)
        self.at = PositionsAt(self.model, small) if config.local_views else None
        self.register_buffer("centre", torch.zeros(config.outputs))
        # The sum of this step's teacher outputs followed by their number; zero between steps, so it is not saved.
        self.register_buffer("seen", torch.zeros(config.outputs + 1), persistent=False)

    @property
    def eval_network(self) -> Backbone:
        return self.teacher.network

    def views(self, augmentation: Augmentation) -> tuple[Augmentation, ...]:
        return self.config.views(augmentation, self.model.patch)

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """All views as bytes [B, 3, H, W], which images count [B], and the teacher's temperature [B]."""
        self.seen.zero_()  # a step that ran out of memory is repeated
        sharpness = self.config.sharpness(step, self.steps)
        return *batch.views, batch.valid, torch.full(batch.valid.shape, sharpness, device=batch.valid.device)

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        *views, valid, temperature = inputs
        wide = self.cast(self.normalise(torch.cat(views[:GLOBAL_CROPS])))
        y = [self.network.represent(wide)]
        if self.at is not None:
            small = self.cast(self.normalise(torch.cat(views[GLOBAL_CROPS:])))
            y.append(represent_at(self.network, small, self.at))
        student = self.head(torch.cat(y)).unflatten(0, (len(views), -1))  # [views, B, K]
        with torch.no_grad():
            answers = self.teacher.head(self.teacher.network.represent(wide)).unflatten(0, (GLOBAL_CROPS, -1))
            total = torch.where(valid[:, None], answers, 0.0).sum((0, 1))  # of this micro-batch, for the centre
            self.seen.add_(torch.cat([total, GLOBAL_CROPS * valid.sum(dtype=total.dtype)[None]]))
            target = ((answers - self.centre) / temperature[:, None]).log_softmax(-1)
        losses, entropy = distillation_loss(student / self.config.student_temperature, target)
        found = {"teacher_entropy": entropy, "kl": (losses - entropy).detach()}
        tallies = {name: torch.where(valid, value, 0.0).sum().float() for name, value in found.items()}
        return ObjectiveOutput(torch.where(valid, losses, 0.0).sum().float(), valid.float().sum(), tallies)

    def on_start(self) -> None:
        self.teacher.copy_from(self.network, self.head)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        # The centre moves towards the mean of this step's teacher outputs, over all micro-batches and processes.
        self.world.sum_(self.seen)
        mean = self.seen[:-1] / self.seen[-1].clamp(min=1.0)
        moved = self.centre.lerp(mean, 1 - self.config.centre_momentum)
        # A step that is skipped because of non-finite numbers must not change the centre.
        sound = self.seen.isfinite().all() & (self.seen[-1] > 0)
        self.centre.copy_(torch.where(sound, moved, self.centre))
        self.seen.zero_()
        if step < round(self.config.freeze_last * self.steps):
            # The teacher still has the initial weights. Computing gradients keeps the optimiser's moments up to date.
            weight, drawn = local_tensors([self.head.last.weight, cast(PrototypeHead, self.teacher.head).last.weight])
            weight.copy_(drawn)
        self.teacher.follow(self.network, self.head, momentum_at(step, start=self.config.momentum, steps=self.steps))


def distillation_loss(student: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy between the student's logits [views, B, K] and the teacher's log-probabilities [global crops, B,
    K], averaged over all pairs of different views, and the teacher's mean entropy. Both are per image, [B].

    With logits s and probabilities p the cross-entropy is log Σ exp s - p·s. The logits can be summed over views before
    the product, so one product for each of the teacher's views is enough.
    """
    size, taught = len(student), len(target)
    norms, logits = student.logsumexp(-1), student.sum(0)  # [views, B], [B, K]
    losses = norms.new_zeros(norms.shape[1])
    for view, answer in enumerate(target.exp()):
        others = norms.sum(0) - norms[view]
        losses = losses + others - (answer * (logits - student[view])).sum(-1)
    entropy = -(target.exp() * target).sum(-1).mean(0)
    return losses / (taught * (size - 1)), entropy
