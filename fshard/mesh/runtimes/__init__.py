"""The three runtimes: `virtual` (threads), `process` (torch.distributed), `abstract` (shapes)."""
