"""Reads the accelerators of a machine without torch: which there are, and their counters.

devices.py     what is known of a device, and which devices a setting leaves visible
nvidia.py      NVML
"""
