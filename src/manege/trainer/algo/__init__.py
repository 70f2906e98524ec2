"""Credit: calls to forest, forest to samples, rewards to advantages and weights. Pure; numpy only."""
