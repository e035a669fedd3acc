"""Builds objectives from their configs."""

import torch

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.randomness import hash_keys, hash_word
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.models.backbone import Backbone
from vitrail.models.build import build_on_meta
from vitrail.models.family import ModelConfig
from vitrail.objectives.dino import DINO
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.objectives.moco import MoCo
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, register_objective

for kind in (MaskedPatches, MAE, MoCo, DINO):
    register_objective(kind)


def build_objective(config: ObjectiveConfig, network: Backbone, context: ObjectiveContext, *, seed: int) -> Objective:
    """Builds the objective around a network that may have no storage yet. Its heads are drawn from the seed alone, and
    torch's generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(hash_keys(hash_word("heads"), seed)[0] >> 1))
        return config.build(network, context)


def count_weights(config: ObjectiveConfig, model: ModelConfig, world: World) -> tuple[int, int]:
    """How many parameters an objective trains, heads included, and how many others it keeps, such as a teacher's.
    Counted on an objective without storage."""
    with torch.device("meta"):
        context = ObjectiveContext(model.classes, Preprocessing(image=model.image), Mix(), 1, world)
        made = build_objective(config, build_on_meta(model), context, seed=0)
    trained = sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
    return trained, sum(tensor.numel() for tensor in made.state_dict().values()) - trained
