"""The tasks of the package, and how to find one."""

from vitrail.core.errors import unknown_name
from vitrail.data.collection import Collection
from vitrail.data.targets import Targets
from vitrail.objectives.objective import ObjectiveConfig, register_objective
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.instances.task import INSTANCES
from vitrail.tasks.mask_queries.objective import SemanticQueries
from vitrail.tasks.panoptic.task import PANOPTIC
from vitrail.tasks.segmentation.task import SEGMENTATION
from vitrail.tasks.task import TASKS, Task, register_task

for own in (CLASSIFICATION, PANOPTIC, INSTANCES, SEGMENTATION):  # as `recognise_task` tries them
    register_task(own)
register_objective(SemanticQueries)  # of segmentation, for networks with queries


def find_task(name: str) -> Task:
    """A task by name; ConfigError with the known names if it is not registered."""
    if name not in TASKS:
        raise unknown_name("task", name, tuple(TASKS))
    return TASKS[name]


def task_of(objective: ObjectiveConfig) -> Task | None:
    """The task whose targets an objective learns from; None for a self-supervised one."""
    return find_task(objective.task) if objective.task else None


def targets_of(objective: ObjectiveConfig) -> Targets:
    """The targets of an objective; a self-supervised one gets labels for its scores."""
    return (task_of(objective) or CLASSIFICATION).targets


def recognise_task(collection: Collection) -> Task:
    """The first task that the data are annotated for; classification if there are no annotations, because its error
    explains how to label images."""
    return next((task for task in TASKS.values() if task.recognises(collection)), CLASSIFICATION)
