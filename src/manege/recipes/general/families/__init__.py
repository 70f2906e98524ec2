"""The families of tasks, by name."""

from collections.abc import Mapping

from manege.recipes.general.families import compute, extract, find, fix, format, longdoc, schedule, transform
from manege.recipes.general.families.problem import Family

__all__ = ["FAMILIES"]

FAMILIES: Mapping[str, Family] = {
    "compute": compute.FAMILY,
    "extract": extract.FAMILY,
    "find": find.FAMILY,
    "fix": fix.FAMILY,
    "format": format.FAMILY,
    "longdoc": longdoc.FAMILY,
    "schedule": schedule.FAMILY,
    "transform": transform.FAMILY,
}
