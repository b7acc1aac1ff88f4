"""Pictures of layouts and of trees."""

from fshard.explore.picture import Picture, picture, visualize
from fshard.explore.treescope_records import treescope_sharding, use_treescope

__all__ = ["Picture", "picture", "treescope_sharding", "use_treescope", "visualize"]
