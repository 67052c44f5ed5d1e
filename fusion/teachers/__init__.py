"""Small models that know one task: they label what has no labels, and adapters are measured against them."""

from fusion.teachers.built_in import TEACHERS, SmallNetwork

__all__ = ["TEACHERS", "SmallNetwork"]
