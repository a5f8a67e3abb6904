"""Verifies that a run trains the module that its model's author wrote.

ranks.py     the case in small, its ranks' steps beside the author's (`engine.exactness`)
record.py    results of earlier verifications on this machine
losses.py    a run's first and last loss beside the unsplit model's and other runs', in every run
"""
