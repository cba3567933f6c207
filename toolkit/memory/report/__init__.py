"""What an estimate says: each rank, the host, the overhead of a GPU, calibration by past runs, pictures."""
