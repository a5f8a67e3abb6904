"""Throughput across commits: what is compared with what, gates, histories, measuring the past."""
