"""The three runtimes: `virtual` (threads), `process` (torch.distributed) and `abstract` (shapes only)."""
