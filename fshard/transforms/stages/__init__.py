"""The gradient of a model in pipeline stages."""
