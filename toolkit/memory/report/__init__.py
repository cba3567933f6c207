"""The report of an estimate: each rank, the host, the overhead of a GPU, calibration by past runs, and plots."""
