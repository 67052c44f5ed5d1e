"""Errors in a plan and its data, collected and reported together."""

from vlora.plan_files.errors import MAX_LISTED, Location, PlanErrors, PlanText

__all__ = ["MAX_LISTED", "Location", "PlanErrors", "PlanText"]
