"""Programs for given costs within limits of memory, and the bound that no program can beat."""
