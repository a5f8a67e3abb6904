"""The parts of the command-line trainer, in the order in which they are used."""
