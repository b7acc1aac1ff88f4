"""Pictures of layouts, meshes and trees; a page of the cost of a step."""

from fshard.explore.described import DescribedPlan, describe
from fshard.explore.notebook import register
from fshard.explore.page import page
from fshard.explore.picture import Picture, picture, visualize

register()

__all__ = ["DescribedPlan", "Picture", "describe", "page", "picture", "visualize"]
