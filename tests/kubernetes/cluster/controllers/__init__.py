"""Controllers: what makes pods of jobs and workloads."""
