"""Floor 6: where GPyTorch begins.  Two families of models, and the log density that both compute."""
