"""What the pages of a run show of a classifier: which classes it confuses, its worst answers and its surest ones."""

from collections.abc import Iterable, Sequence

from vitrail.core.errors import VitrailError
from vitrail.data.source import Source
from vitrail.evaluation.accuracy import Answer, Score
from vitrail.report.heat import Heat
from vitrail.report.page import Section
from vitrail.report.panels import Galleries, Gallery, Mood, Shot, shot


def score_sections(score: Score, source: Source | None, names: Sequence[str], title: str) -> list[Section]:
    """The confusion matrix, where it was counted, and the galleries. `title` is the split and, behind a comma, whose
    answers they are."""
    found: list[Section] = []
    if score.confusion is not None:
        found.append(Heat(title=f"Confusion on {title}", counts=score.confusion, classes=names))
    _, comma, weights = title.partition(", ")
    shown = {"Worst answers": score.worst, "Surest right answers": score.best}
    galleries = [
        Gallery(title=f"{name}{comma}{weights}", shots=show_answers(answers, source, names))
        for name, answers in shown.items()
        if answers
    ]
    return [*found, Galleries(galleries=galleries)] if galleries else found


def show_answers(answers: Iterable[Answer], source: Source | None, names: Sequence[str]) -> list[Shot]:
    """Each image with what it shows and what was said; one that cannot be read now is left blank."""
    shots: list[Shot] = []
    for answer in answers:
        mood: Mood = "right" if answer.predicted == answer.label else "wrong"
        said = "" if mood == "right" else f"said {names[answer.predicted]}, "
        try:
            image = None if source is None else source.picture(answer.sample).rgb()
        except VitrailError:
            image = None
        shots.append(shot(image, f"{names[answer.label]}\n{said}{answer.probability:.1%}", mood=mood))
    return shots
