"""Evidence: the paper's tables beside ours, and which claims hold, made from records."""

from rootfree_lab.evidence.write import write_evidence

__all__ = ["write_evidence"]
