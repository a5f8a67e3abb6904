"""Charts, each in a file of its own: functions from DataFrames to figures as plain data."""
