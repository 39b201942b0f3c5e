"""Floor 6: where GPyTorch begins."""
