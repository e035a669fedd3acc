"""Vision Transformers after "An Image is Worth 16x16 Words": build, train, evaluate, inspect and serve them.

The names below are imported on first use, so that `import vitrail` does not load torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail import export as export
    from vitrail import inspection as inspection
    from vitrail.api import (
        Evaluation,
        Features,
        Trained,
        evaluate,
        extract_features,
        finetune,
        fit,
        fit_segmenter,
        train,
    )
    from vitrail.checkpoint.convert import convert
    from vitrail.checkpoint.hub_repository import from_pretrained, push_to_hub, save_pretrained
    from vitrail.checkpoint.weights import create_model, load, save
    from vitrail.core.errors import VitrailError
    from vitrail.data.collection import open_collection
    from vitrail.evaluation.frozen.knn import find_nearest
    from vitrail.models.positions.embeddings import resize_position
    from vitrail.models.query_configs import EoMTConfig, PMTConfig
    from vitrail.models.resnet_config import ResNetConfig
    from vitrail.models.vit_config import ViTConfig
    from vitrail.models.vit_parts import Rotary, Windows
    from vitrail.models.zoo import create_config, list_models
    from vitrail.predict.predictor import Predictor, predictor
    from vitrail.tasks.classification.prediction import Prediction
    from vitrail.tasks.mask_queries.prediction import PredictedSegments
    from vitrail.tasks.segmentation.prediction import PredictedMask

__version__ = "0.1.0"

__all__ = [
    "EoMTConfig", "Evaluation", "Features", "PMTConfig", "PredictedMask", "PredictedSegments", "Prediction",
    "Predictor", "ResNetConfig", "Rotary", "Trained", "ViTConfig", "VitrailError", "Windows", "convert",
    "create_config", "create_model", "evaluate", "extract_features", "find_nearest", "finetune", "fit",
    "fit_segmenter", "from_pretrained", "list_models", "load", "open_collection", "predictor", "push_to_hub",
    "resize_position", "save", "save_pretrained", "train",
]  # fmt: skip

_NAMES = {  # the names of each module
    "vitrail.api": "Evaluation Features Trained evaluate extract_features finetune fit fit_segmenter train",
    "vitrail.checkpoint.convert": "convert",
    "vitrail.checkpoint.hub_repository": "from_pretrained push_to_hub save_pretrained",
    "vitrail.checkpoint.weights": "create_model load save",
    "vitrail.core.errors": "VitrailError",
    "vitrail.data.collection": "open_collection",
    "vitrail.evaluation.frozen.knn": "find_nearest",
    "vitrail.models.positions.embeddings": "resize_position",
    "vitrail.models.query_configs": "EoMTConfig PMTConfig",
    "vitrail.models.resnet_config": "ResNetConfig",
    "vitrail.models.vit_config": "ViTConfig",
    "vitrail.models.vit_parts": "Rotary Windows",
    "vitrail.models.zoo": "create_config list_models",
    "vitrail.predict.predictor": "Predictor predictor",
    "vitrail.tasks.classification.prediction": "Prediction",
    "vitrail.tasks.mask_queries.prediction": "PredictedSegments",
    "vitrail.tasks.segmentation.prediction": "PredictedMask",
}
_FACE = {name: module for module, names in _NAMES.items() for name in names.split()}
_PARTS = ("export", "inspection")  # modules that are part of the interface: vitrail.inspection.rollout(model, images)


def __getattr__(name: str) -> object:
    """Imports a public name on first use (PEP 562)."""
    if name in _PARTS:
        return import_module(f"vitrail.{name}")
    if name not in _FACE:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    value: object = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """The import system binds each subpackage to its parent; here `vitrail.train` stays the function, and modules are
    imported as `from vitrail.train.config import ...`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _FACE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
