"""The benchmarks measure what this project claims: each claim is a row of words, command and goal.

    claims.py --parts--> MODULE.py --rows--> results/MODULE.PART.json --page.py--> README.md

A part of a benchmark measures its arms in turns, in the order in which `ppbench sweep` has them, or
lets `ppbench sweep` itself do it. The judge of `ppbench compare` says the ratio and its interval.
Why not pytest-benchmark or asv? Both time one function, and compare its time with that of another
day.
"""
