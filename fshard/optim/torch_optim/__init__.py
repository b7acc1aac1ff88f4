"""torch.optim's classes and instances as optimizers of fshard."""
