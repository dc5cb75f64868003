"""Uses a trained network: evaluation, prediction and export, for the programs in scripts/."""
