"""What `vitrail report` does."""

from vitrail.cli.options.report import ReportOptions
from vitrail.train.folder.story import describe


def run(options: ReportOptions) -> int:
    print(describe(options.run))
    return 0
