"""The parts of a stage: named configurations, the partition, the split model, the data."""
