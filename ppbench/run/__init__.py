"""From cases to rows: launch workers, run cases with a runtime, store the results."""
