"""The parts of the command-line trainer `engine.train`."""
