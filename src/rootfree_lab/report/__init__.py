"""Reports: records of runs in, one page and figures for a paper out."""

from rootfree_lab.report.records import ReportError
from rootfree_lab.report.write import Report, write_report

__all__ = ["Report", "ReportError", "write_report"]
