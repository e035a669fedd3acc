"""What `vitrail report` does."""

from vitrail.cli.options.report import ReportOptions
from vitrail.train.run_folder.describe_run import describe


def run(options: ReportOptions) -> int:
    print(describe(options.run))
    return 0
