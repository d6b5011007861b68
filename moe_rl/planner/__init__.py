"""What a run will look like, computed before it starts. Imports no torch."""

from .report import describe_layout, plan_stages

__all__ = ["describe_layout", "plan_stages"]
