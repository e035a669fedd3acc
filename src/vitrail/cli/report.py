"""What `vitrail report` does."""

from vitrail.cli.options.report import ReportOptions
from vitrail.train.run_folder.describe_run import describe_run


def run_report(options: ReportOptions) -> int:
    print(describe_run(options.run))
    return 0
