"""What a training loop needs around it: a checked config, checkpoints, records, sweeps."""
