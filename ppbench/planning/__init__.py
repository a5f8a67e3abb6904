"""Plans: from the costs of a model to the pipeline that trains it fastest within a memory."""
