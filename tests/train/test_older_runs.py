"""Configs that older versions recorded: a run goes on as it was started."""

import copy
import json

from vitrail.core.config_overrides import from_plain, to_plain
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.recipes.registry import load_recipe
from vitrail.train.config import Run
from vitrail.train.run_folder.run import fill_missing_fields


def test_a_crop_without_a_sampler_is_torchvisions() -> None:
    config = json.loads(json.dumps(to_plain(load_recipe("digits"))))
    old = copy.deepcopy(config)
    assert old["augmentation"]["crop"].pop("sampler") == "torchvision"
    crop = from_plain(Run, old).augmentation.crop
    assert isinstance(crop, InceptionCrop)
    assert crop.sampler == "torchvision"
    assert fill_missing_fields(old, config) == config  # so that the folder takes the run for its own
    new = json.loads(json.dumps(to_plain(load_recipe("vit-b16-jft"))))
    assert new["augmentation"]["crop"]["sampler"] == "tensorflow"
    assert from_plain(Run, new).augmentation == load_recipe("vit-b16-jft").augmentation
