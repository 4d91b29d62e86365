"""`report.html`: one page about a run, about several runs, or about a comparison, with everything in it.

`deft report` and the end of training write it. The page contains its charts, images and videos: it can be sent by mail
and opened without a network. It shows what is in the run directories; nothing is played or trained.
"""

from deft.evaluation.report.writing import COMPARISON_FILE, REPORT_FILE, attempt_report, write_report

__all__ = ["COMPARISON_FILE", "REPORT_FILE", "attempt_report", "write_report"]
