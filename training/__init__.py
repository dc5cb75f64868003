"""What a training loop needs around it: checked config, checkpoints, records, sweeps."""
