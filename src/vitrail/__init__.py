"""Vision Transformers after "An Image is Worth 16x16 Words": build them, read and write weights, see what they do.

The names below are imported when first used, so that `import vitrail` does not wait for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail import export as export
    from vitrail import inspection as inspection
    from vitrail.api import Evaluation, Features, Trained, evaluate, extract_features, finetune, fit, train
    from vitrail.checkpoint.convert import convert
    from vitrail.checkpoint.hub_repository import from_pretrained, push_to_hub, save_pretrained
    from vitrail.checkpoint.weights import create_model, load, save
    from vitrail.core.errors import VitrailError
    from vitrail.data.collection import open_collection
    from vitrail.evaluation.frozen.knn import find_nearest
    from vitrail.models.positions import resize_position
    from vitrail.models.resnet_config import ResNetConfig
    from vitrail.models.vit_config import ViTConfig
    from vitrail.models.zoo import create_config, list_models
    from vitrail.predict.predictor import Predictor, predictor
    from vitrail.tasks.classification.prediction import Prediction
    from vitrail.tasks.segmentation.prediction import PredictedMask

__version__ = "0.1.0"

__all__ = [
    "Evaluation",
    "Features",
    "PredictedMask",
    "Prediction",
    "Predictor",
    "ResNetConfig",
    "Trained",
    "ViTConfig",
    "VitrailError",
    "convert",
    "create_config",
    "create_model",
    "evaluate",
    "extract_features",
    "find_nearest",
    "finetune",
    "fit",
    "from_pretrained",
    "list_models",
    "load",
    "open_collection",
    "predictor",
    "push_to_hub",
    "resize_position",
    "save",
    "save_pretrained",
    "train",
]

_FACE = {
    "Evaluation": "vitrail.api:Evaluation",
    "Features": "vitrail.api:Features",
    "PredictedMask": "vitrail.tasks.segmentation.prediction:PredictedMask",
    "Prediction": "vitrail.tasks.classification.prediction:Prediction",
    "Predictor": "vitrail.predict.predictor:Predictor",
    "ResNetConfig": "vitrail.models.resnet_config:ResNetConfig",
    "Trained": "vitrail.api:Trained",
    "ViTConfig": "vitrail.models.vit_config:ViTConfig",
    "VitrailError": "vitrail.core.errors:VitrailError",
    "convert": "vitrail.checkpoint.convert:convert",
    "create_config": "vitrail.models.zoo:create_config",
    "create_model": "vitrail.checkpoint.weights:create_model",
    "evaluate": "vitrail.api:evaluate",
    "extract_features": "vitrail.api:extract_features",
    "find_nearest": "vitrail.evaluation.frozen.knn:find_nearest",
    "finetune": "vitrail.api:finetune",
    "fit": "vitrail.api:fit",
    "from_pretrained": "vitrail.checkpoint.hub_repository:from_pretrained",
    "list_models": "vitrail.models.zoo:list_models",
    "load": "vitrail.checkpoint.weights:load",
    "open_collection": "vitrail.data.collection:open_collection",
    "predictor": "vitrail.predict.predictor:predictor",
    "push_to_hub": "vitrail.checkpoint.hub_repository:push_to_hub",
    "resize_position": "vitrail.models.positions:resize_position",
    "save": "vitrail.checkpoint.weights:save",
    "save_pretrained": "vitrail.checkpoint.hub_repository:save_pretrained",
    "train": "vitrail.api:train",
}


_PARTS = ("export", "inspection")  # whole modules that people reach for: vitrail.inspection.rollout(model, images)


def __getattr__(name: str) -> object:
    """The public face, one name at a time (PEP 562)."""
    if name in _PARTS:
        return import_module(f"vitrail.{name}")
    if name not in _FACE:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    module, _, attribute = _FACE[name].partition(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """The import system binds each subpackage to its parent; `vitrail.train` stays the function all the same, and
    `from vitrail.train.config import ...` the way to the modules."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _FACE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
