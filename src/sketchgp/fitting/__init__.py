"""How hyperparameters are fitted: what is minimised, by which optimiser, and from where."""
