"""What `vitrail trace` does."""

from vitrail.cli.options.trace import TraceOptions
from vitrail.core.console import print_table
from vitrail.models.family import Step, summed, walk
from vitrail.models.zoo import model_config, resolve


def run_trace(options: TraceOptions) -> int:
    config = model_config(options.model, image_size=options.image_size, classes=options.classes)
    steps = walk(config)
    shown = steps if options.all else fold_blocks(steps)
    rows = [step_row(step) for step in [*shown, summed(steps)]]
    height, width = config.image
    print_table(
        ["step", "shape", "parameters", "MACs"], rows, title=f"{resolve(options.model)} at {height}x{width}", left=2
    )
    return 0


def step_row(step: Step) -> list[str]:
    shape = "x".join(str(n) for n in step.shape)
    return [step.name, shape, f"{step.params:,}" if step.params else "", f"{step.macs:,}" if step.macs else ""]


def fold_blocks(steps: list[Step]) -> list[Step]:
    """The walk with blocks 2 to L-1 of an encoder in one line, where they are alike."""
    first = [step for step in steps if step.name.startswith("block 1:")]
    middle = [step for step in steps if step.name.startswith("block ") and not step.name.startswith("block 1:")]
    if len(middle) <= len(first):
        return steps
    start, end = steps.index(middle[0]), steps.index(middle[-1])
    last = middle[-1].name.split(":")[0].removeprefix("block ")
    total = summed(middle)
    return [
        *steps[:start],
        Step(f"blocks 2-{last}: the same", total.shape, total.params, total.macs),
        *steps[end + 1 :],
    ]
