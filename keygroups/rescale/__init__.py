"""Rescaling: other cuts on the axis of key groups, planned purely and carried out whole."""

from keygroups.rescale.execute import Progress, rescale
from keygroups.rescale.plan import RescalePlan, plan_rescale

__all__ = ["Progress", "RescalePlan", "plan_rescale", "rescale"]
