"""Pictures of layouts, meshes and trees."""

from fshard.explore.notebook import register
from fshard.explore.picture import Picture, picture, visualize

register()

__all__ = ["Picture", "picture", "visualize"]
