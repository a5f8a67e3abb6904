"""Two sides compared figure by figure: what they share, whether they differ, and which spans did.

A side is the launches of a commit (`commits`) or of a value of a setting (`across`).
"""
