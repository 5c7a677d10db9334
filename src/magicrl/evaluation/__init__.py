"""The sampling job, avg@k and pass@k with intervals."""
