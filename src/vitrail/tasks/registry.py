"""The tasks that come with the package, and how one is found."""

from vitrail.core.errors import unknown_name
from vitrail.data.collection import Collection
from vitrail.data.targets import Targets
from vitrail.objectives.objective import ObjectiveConfig
from vitrail.tasks.classification.task import CLASSIFICATION
from vitrail.tasks.segmentation.task import SEGMENTATION
from vitrail.tasks.task import TASKS, Task, register_task

for own in (CLASSIFICATION, SEGMENTATION):
    register_task(own)


def find_task(name: str) -> Task:
    """A task by its name; ConfigError with the names there are where it is not registered."""
    if name not in TASKS:
        raise unknown_name("task", name, tuple(TASKS))
    return TASKS[name]


def task_of(objective: ObjectiveConfig) -> Task | None:
    """The task whose targets an objective learns from; none for one that learns from the images alone."""
    return find_task(objective.task) if objective.task else None


def targets_of(objective: ObjectiveConfig) -> Targets:
    """What an objective learns from; labels come along with images that are learnt from alone, for scores."""
    return (task_of(objective) or CLASSIFICATION).targets


def recognise_task(collection: Collection) -> Task:
    """The first task that the data are annotated for: classification where there are labels, and also where there is
    nothing, so that its error says how images are labelled."""
    return next((task for task in TASKS.values() if task.recognises(collection)), CLASSIFICATION)
