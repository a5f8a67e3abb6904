"""Two sides that differ along one axis, figure by figure, and which spans explain a change.

A side is the launches of a commit (`commits.comparison`), or those of all values of a setting
(`across`). Both become contrasts, and one judgement makes lines of them (`lines`).
"""
