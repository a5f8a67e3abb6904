"""What only a GPU can prove: `make gpu`, or `python -m benchmarks.gpu`.

A check is a part of a module here. It takes the device and yields rows with their bounds; the CPU
runs its code too (`--device cpu`), where times mean nothing.
"""
