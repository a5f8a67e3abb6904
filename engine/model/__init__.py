"""What a stage is made of: named configurations, the partition, the split model, the data."""
